"""Names that plug-ins, the modules of `trainer.plugins`, add to the built-in ones of a config."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_args

from pydantic import AfterValidator, BaseModel, ValidationInfo, WithJsonSchema

from trainer.errors import listed, named_line, suggestion

RECIPES = {
    "causal_lm": "trainer.recipes.causal_lm",
    "distillation": "trainer.recipes.distillation",
    "embeddings": "trainer.recipes.embeddings",
    "image_classification": "trainer.recipes.images",
    "labels": "trainer.recipes.labels",
    "masked_lm": "trainer.recipes.masked_lm",
    "own_module": "trainer.recipes.own_module",
    "pairs": "trainer.recipes.pairs",
    "teacher": "trainer.recipes.distillation.teacher",
}
"""The modules of the recipes that ship, each of which has its `RECIPE`."""
DEFAULT = "causal_lm"
"""The recipe of a config that names none."""
HANDED_IN = "own_module"
"""The recipe of what a script hands in, which no config names."""

TEACHER = "teacher"
"""The recipe of a model that is measured before another is trained, which no config names."""

Kind = Literal["task", "recipe", "optimizer", "source", "tracker"]
Made = TypeVar("Made")
NAMED: dict[str, dict[str, Any]] = {kind: {} for kind in get_args(Kind)}
_FOLDERS: set[str] = set()
"""The folders that configs have added to those of Python's modules."""


def register(kind: Kind, name: str) -> Callable[[Made], Made]:
    """Decorate what a config then calls `name`, which has a colon, as no built-in name has.

    A task, as `task(section)`, returns the arguments of `meshloom.train` for what is trained:
    `model`, `data`, `loss`, and maybe `evaluation_data`, `blocks` and `metrics`.
    A recipe, a `meshloom.recipe.Recipe`, says all of what is trained; see there. It may be an entry
    point of the group `meshloom.recipes` instead.
    An optimizer, as `optimizer(groups, **params)`, returns a `torch.optim.Optimizer`.
    A source, as `source(path)`, yields the rows of a file, dictionaries. What is prepared of them
    is kept: an edited source needs another name.
    A tracker, as `tracker(folder)`, has the methods of `meshloom.trackers.Tracker`; `epoch`
    may be left out.
    """

    def registered(made: Made) -> Made:
        if ":" not in name:
            raise ValueError(f'"{name}" without a colon, as in "package:{name}"')
        if (known := NAMED[kind].setdefault(name, made)).__module__ != made.__module__:
            raise ValueError(f'"{name}", which {known.__module__} has registered')
        NAMED[kind][name] = made
        return made

    return registered


def load(name: str, given: ValidationInfo) -> str:
    """Import a module, or an entry point of the group `meshloom.plugins`; return its name.

    The module may be beside the config, in the folder that is the validation's context. Raises
    ValueError with what is expected, also if that beside another config has its name.
    """
    beside = os.path.abspath(given.context or "")
    for folder in (os.getcwd(), beside):
        if folder not in sys.path:
            sys.path.append(folder)
            _FOLDERS.add(folder)
    try:
        if [point.load() for point in entry_points(group="meshloom.plugins", name=name)]:
            return name
        import_module(name)
    except (Exception, SystemExit) as error:  # whatever the module's own code raises
        raise ValueError(f"a plug-in that can be imported ({named_line(error)})") from None
    package = name.partition(".")[0]
    origin = _folder(sys.modules[package].__spec__)
    own = PathFinder.find_spec(package, [beside])
    elsewhere = origin in _FOLDERS and os.path.realpath(origin) != os.path.realpath(beside)
    if elsewhere and _folder(own):
        actual = f"Python has imported that of {origin} by its name; give it another"
        raise ValueError(f"the plug-in beside the config, in {beside} ({actual})")
    return name


def _folder(spec: ModuleSpec | None) -> str:
    """Return the folder in which a module or package lies, or nothing if it is no file."""
    origin = (spec and spec.origin) or ""
    return os.path.dirname(origin.removesuffix("__init__.py").rstrip(os.sep))


def _known(kind: Kind) -> AfterValidator:
    def checked(name: str) -> str:
        if name not in NAMED[kind]:
            raise ValueError(f"a {kind} of trainer.plugins")
        return name

    return AfterValidator(checked)


def _known_task(name: str) -> str:
    """Check the name of a plug-in's task or recipe, whose entry point is loaded if it has one."""
    if name in NAMED["task"] or name in NAMED["recipe"]:
        return name
    points = entry_points(group="meshloom.recipes", name=name)
    if ":" not in name or not points:
        raise ValueError(_tasks(name))
    try:
        if len(points) > 1:
            raise ValueError("several packages have one of this name")
        NAMED["recipe"][name] = points[name].load()
    except (Exception, SystemExit) as error:  # whatever the module's own code raises
        raise ValueError(f"a recipe that can be imported ({named_line(error)})") from None
    return name


def _tasks(name: str) -> str:
    """Say which tasks and recipes of plug-ins there are, and which of them a name is close to."""
    installed = {point.name for point in entry_points(group="meshloom.recipes")}
    names = sorted({*installed, *NAMED["recipe"], *NAMED["task"]})
    known = f" ({listed(names)})" if names else ""
    hint = suggestion(name, names)
    kinds = "a task of trainer.plugins, or an entry point of meshloom.recipes"
    return f"{kinds}{known}" + (f". {hint}" if hint else "")


def honours(task: str, key: str) -> bool:
    """Return True if a plug-in's recipe honours a key that not every recipe does."""
    return key in keys_of(task)


def keys_of(task: str) -> tuple[str, ...]:
    """Return the keys that a plug-in's recipe lists; none for another."""
    return tuple(getattr(NAMED["recipe"].get(task), "keys", ()))


def is_recipe(task: str) -> bool:
    """Return True for the name of a plug-in's recipe."""
    return task in NAMED["recipe"]


def options_of(task: str) -> type[BaseModel] | None:
    """Return the model of a plug-in's own keys, those of `trainer.recipe`; None if it has none."""
    return getattr(NAMED["recipe"].get(task), "options", None)


_COLON = WithJsonSchema({"type": "string", "pattern": ":"})
if TYPE_CHECKING:
    TaskName = str
else:
    _SHIPPED = tuple(name for name in RECIPES if name not in (HANDED_IN, TEACHER))
    TaskName = Literal[_SHIPPED] | Annotated[str, AfterValidator(_known_task), _COLON]
Service = Literal[
    "tensorboard", "mlflow", "wandb", "trackio", "comet_ml", "aim", "clearml", "dvclive", "swanlab"
]
TrackerName = Service | Annotated[str, _known("tracker"), _COLON]
Format = Literal["auto", "jsonl", "parquet", "arrow", "text", "csv", "hub"]
SourceName = Format | Annotated[str, _known("source"), _COLON]


def as_override(build: Callable[[list[dict[str, object]]], object] | None) -> list[str]:
    """Register a script's optimizer, if it has one; return the override that names it."""
    if build is None:
        return []
    NAMED["optimizer"]["script:optimizer"] = wraps(build)(lambda groups, **_: build(groups))
    return ["optimizer.type=script:optimizer"]
