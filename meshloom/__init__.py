"""Meshloom by its own name: `meshloom.X` is `trainer.X`, for each object and each module.

Scripts import this package. The code is in the package `trainer`, which tracebacks and pickles
name, so that what one name has pickled the other opens.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import InspectLoader, Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any

import trainer

_BESIDE = Path(__file__).resolve().parent.parent / "trainer" / "__init__.py"
_IMPORTED = getattr(trainer, "__file__", None) or "a folder without __init__.py"
if Path(_IMPORTED).resolve() != _BESIDE or not hasattr(trainer, "open_classifier"):
    # a file of that name beside the script comes first; the one on PyPI overwrites ours
    raise ImportError(
        f"the module `trainer` is {_IMPORTED}, which is not Meshloom's, {_BESIDE}: rename yours, or "
        "uninstall the package `trainer` and install meshloom again"
    )

from trainer import __version__, open_classifier, train, verify
from trainer import open as open

if TYPE_CHECKING:
    from trainer import Callback as Callback

__all__ = ["__version__", "Callback", "open_classifier", "train", "verify"]


class _SameModules(MetaPathFinder, Loader):
    """Imports `meshloom.X` as `trainer.X`: one module, which `sys.modules` has by both names."""

    @staticmethod
    def _spec(name: str) -> ModuleSpec | None:
        package, _, rest = name.partition(".")
        return find_spec(f"trainer.{rest}") if package == __name__ and rest != "__main__" else None

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if (spec := self._spec(name)) is None:
            return None
        is_package = spec.submodule_search_locations is not None
        return ModuleSpec(name, self, origin=spec.origin, is_package=is_package)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module(f"trainer.{spec.name.partition('.')[2]}")
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Give the module, which has run, its own spec again: the import set that of this name."""
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state

    def get_code(self, name: str) -> CodeType | None:
        """Return the code of a module, for `python -m`."""
        spec = self._spec(name)
        if spec is None or not isinstance(spec.loader, InspectLoader):
            return None
        return spec.loader.get_code(spec.name)


sys.meta_path.insert(0, _SameModules())  # before a folder of stubs is taken for a package


def __getattr__(name: str) -> Any:
    """Return what `trainer` imports once it is asked for, and its modules."""
    try:
        return getattr(trainer, name)
    except AttributeError:
        raise AttributeError(f"module 'meshloom' has no attribute {name!r}") from None
