"""The tiny copy of a transformers model, as a run reads it and as one process trains it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.certify.one_process.options import Amend, amended
from trainer.certify.parameters import Learner, learner, opened, published, write_base
from trainer.certify.tiny_run import Tiny
from trainer.distributed.ranks import Ranks
from trainer.models.finetuning.changed import changed_spec, with_changes
from trainer.models.materialise import on_host
from trainer.models.pretrained.named_base import NamedBase
from trainer.models.spec import ModelSpec, TinyCopies

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class SavedCopy:
    """A tiny copy of a config's model, whose weights are in a folder if a run would read them."""

    def __init__(
        self,
        plain: Callable[[PreTrainedConfig], ModelSpec],
        architecture: PreTrainedConfig,
        size: tuple[Any, ...],
        small: Tiny,
        folder: Path,
        ranks: Ranks,
    ) -> None:
        """Make the copy, and its weights in `folder`. Collective.

        `plain` returns the spec of an architecture, without weights; `size` has the arguments of
        its `TinyCopies.copy`.
        """
        self._plain = plain
        self._architecture = architecture
        self._size = size
        self._folder = folder
        section = small.config.trainer
        options = section.model
        self._whole = plain(architecture)
        self.spec = self._copy_of(self._whole)
        self._is_read = bool(options.name_or_path or section.adapter or small.low_precision)
        if self._is_read:
            ranks.on_first(lambda: write_base(self.spec, folder))
            read = options.model_copy(update={"name_or_path": str(folder)})
            self.spec = self.spec.with_weights(NamedBase.opened(read).weights(self.spec.build()))

    def _copy_of(self, plain: ModelSpec) -> ModelSpec:
        assert plain.tiny.copy is not None
        return plain.tiny.copy(*self._size)

    def changed(self, small: Tiny, ranks: Ranks) -> ModelSpec:
        """Return the copy with the config's adapter, frozen parameters and groups. Collective."""
        copies = TinyCopies(input=self.spec.tiny.input, copy=lambda *_: self.spec)
        whole = replace(self._whole, tiny=copies)
        whole = changed_spec(whole, small.config.trainer, ranks)
        assert whole.tiny.copy is not None
        return with_changes(whole.tiny.copy(len(self.spec.blocks), self._size[1]))

    def learner(self, small: Tiny, amend: Amend | None) -> Learner:
        """Return the copy as one process trains it; `amend` changes the model's config."""
        section = small.config.trainer
        plain = self._plain(amended(self._architecture, amend))
        copy = self._copy_of(plain)
        read = self._is_read
        model = opened(self._folder, section.model, amend) if read else on_host(copy, section.seed)
        own = learner(model, section, (plain, copy))
        return own._replace(published=partial(published, self._folder, section.model))
