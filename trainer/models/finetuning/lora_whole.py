"""An adapter under the names of its base's whole model, of which only a part is trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainer.distributed.ranks import Ranks
from trainer.models.finetuning.lora_folder import OPENS, PREFIX, opened_by_class
from trainer.models.finetuning.lora_opening import Adapters, Shapes, check_folder, loadable
from trainer.models.finetuning.quantised import quantised_files
from trainer.models.finetuning.quantised.quantised_files import QuantisedLayers
from trainer.models.patches import saved_adapter_config
from trainer.models.spec import BaseFolder
from trainer.state import StateTensor, renamed


@dataclass(frozen=True)
class WholeNames:
    """The names that modules of a part have in the whole model."""

    modules: Mapping[str, str]

    @classmethod
    def of(cls, base: BaseFolder | None) -> WholeNames:
        """Return the names for a base; none if its whole model is trained, as none differs."""
        if base is None or not base.is_part:
            return cls({})
        tensors = base.names().items()
        return cls({_module(ours): _module(theirs) for ours, theirs in tensors})

    def whole(self, name: str) -> str:
        """Return the whole model's name for a module of the part, or for something in one."""
        return _translated(name, self.modules)

    def part(self, name: str) -> str:
        """Return the part's name for a module of the whole model; others keep theirs."""
        return _translated(name, {theirs: ours for ours, theirs in self.modules.items()})

    def in_files(self, published: Mapping[str, str]) -> dict[str, str]:
        """Map our names of an adapter's tensors to those in the files of the whole model's adapter.

        `published`: our names -> those in the files of the part's adapter.
        """
        return {
            ours: PREFIX + self.whole(theirs.removeprefix(PREFIX))
            for ours, theirs in published.items()
        }


def _module(tensor: str) -> str:
    return tensor.rpartition(".")[0]


def _translated(name: str, modules: Mapping[str, str]) -> str:
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        if (known := modules.get(".".join(parts[:count]))) is not None:
            return ".".join([known, *parts[count:]])
    return name


class WholeAdapter(BaseFolder):
    """The folder of an adapter that PEFT and inference engines load on the base's whole model."""

    def __init__(
        self,
        base: BaseFolder,
        config: Any,
        trained: Adapters,
        shapes: Shapes,
        quantised: QuantisedLayers | None,
    ) -> None:
        """Translate PEFT's adapter for the part: `config`, `trained`, `shapes`, `quantised` layers.

        Raises ConfigError if PEFT would not open the result on the whole model.
        """
        self._base = base
        names = WholeNames.of(base)
        self._files = names.in_files({name: name for name in shapes})
        self._shapes = {self._files[name]: shape for name, shape in shapes.items()}
        scalings = {names.whole(name): factor for name, factor in trained.scalings.items()}
        tensors = {names.whole(name): self._files[file] for name, file in trained.tensors.items()}
        whole = replace(config, **opened_by_class(base.whole()))
        targets = list(scalings)
        adapters = Adapters(scalings, tensors)
        self._config = saved_adapter_config(
            loadable(base.whole, whole, targets, adapters, self._shapes)
        )
        self._quantised = quantised and quantised.renamed(names.whole)

    @property
    def opens(self) -> str:
        return OPENS[None]

    @property
    def is_part(self) -> bool:
        return True

    def whole(self) -> nn.Module:
        return self._base.whole()

    def names(self) -> dict[str, str]:
        return self._base.names()

    def entries(self, entries: Sequence[StateTensor], ranks: Ranks) -> list[StateTensor]:
        return renamed(entries, self._files)

    def save_config(self, folder: Path, dtype: torch.dtype | None) -> None:
        self._config.save_pretrained(str(folder))
        quantised_files.write(folder, self._quantised, self.whole)

    def save_tokenizer_files(self, folder: Path) -> None:
        self._base.save_tokenizer_files(folder)

    def check(self, folder: Path) -> None:
        check_folder(folder, self._config, self._shapes)


def whole_adapter(
    base: BaseFolder | None,
    config: Any,
    trained: Adapters,
    shapes: Shapes,
    quantised: QuantisedLayers | None,
) -> WholeAdapter | None:
    """Return the folder of an adapter for the whole model; None if the whole model is trained."""
    if base is None or not base.is_part:
        return None
    return WholeAdapter(base, config, trained, shapes, quantised)
