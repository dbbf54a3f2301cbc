"""Dropout that depends on where a block stands in the model, not on which process runs it (contract 3)."""

from __future__ import annotations

from typing import Any

from torch import nn

from trainer.distributed.seeding import derive, seed_generators
from trainer.models.spec import ModelSpec


class Dropout:
    """Seeds a micro-batch's forward pass, and each block in it once more.

    So a pipeline stage drops what the whole model drops. Recomputed blocks are not seeded again: their
    checkpoint brings the state back that they had.
    """

    def __init__(self, model: nn.Module, spec: ModelSpec) -> None:
        self._base = 0
        for index, name in enumerate(spec.blocks):
            model.get_submodule(name).register_forward_pre_hook(self._seed_block(index))

    def start(self, step_seed: int, micro_batch: int) -> None:
        """What comes next is the forward pass of this micro-batch."""
        self._base = derive(step_seed, micro_batch)
        seed_generators(self._base)

    def _seed_block(self, index: int) -> Any:
        def hook(module: nn.Module, inputs: Any) -> None:
            seed_generators((self._base + index + 1) % 2**63)

        return hook
