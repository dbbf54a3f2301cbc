"""Dropout that depends on the place of a block in the model, not on the process that runs it
(contract 3).
"""

from __future__ import annotations

from typing import Any

from torch import nn

from trainer.distributed.seeding import derive, seed_generators
from trainer.models.spec import ModelSpec


class Dropout:
    """Seeds a micro-batch's forward pass, and each block in it again.

    So a pipeline stage drops what the whole model drops. Recomputed blocks are not seeded again:
    their checkpoint restores the generator state that they had.
    """

    def __init__(self, model: nn.Module, spec: ModelSpec) -> None:
        self._base = 0
        for index, name in enumerate(spec.blocks):
            model.get_submodule(name).register_forward_pre_hook(self._seed_block(index))

    def start(self, step_seed: int, micro_batch: int) -> None:
        """Seed the forward pass of this micro-batch, which comes next."""
        self._base = derive(step_seed, micro_batch)
        seed_generators(self._base)

    def _seed_block(self, index: int) -> Any:
        def hook(module: nn.Module, inputs: Any) -> None:
            seed_generators((self._base + index + 1) % 2**63)

        return hook
