"""A machine that is watched, and modules of your own to compile."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from trainer.distributed.ranks import Ranks
from trainer.engines import Machine

CPU = torch.device("cpu")


class Watched:
    """A watchdog and a display that keep what they are told."""

    def __init__(self) -> None:
        self.moved: list[float] = []
        self.lines: list[str] = []

    def moves(self, seconds: float = 0.0) -> None:
        self.moved.append(seconds)

    def at(self, phase: str) -> None:
        self.lines.append(phase)

    def hide(self) -> None: ...

    def note(self, text: str) -> None:
        self.lines.append(text)


def machine_of(watched: Watched) -> Machine:
    return Machine(CPU, Ranks(), watch=watched, signs=watched)  # type: ignore[arg-type]


def own(block: type[nn.Module]) -> Any:
    from trainer.models.own import module
    from trainer.tasks.supervised import Supervised

    def loss(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, int]:
        return (output - target).square().sum(), target.numel()

    spec = module.spec_of(lambda: nn.Sequential(*(block() for _ in range(3))), "*", 0)
    task = Supervised(loss, spec.build, spec.blocks)
    return spec.tried_on(task.trial([(torch.ones(4), torch.ones(4))] * 2))


class Linear(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
