"""A network with batch norm, its loss and samples."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from tests.support.training import TRAIN_BATCH


def block(inside: int, outside: int, momentum: float | None = 0.3) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(inside, outside, 3), nn.BatchNorm2d(outside, momentum=momentum), nn.Tanh()
    )


def network() -> nn.Module:
    head = nn.Sequential(nn.Flatten(), nn.Linear(4 * 9, 5))
    return nn.Sequential(block(1, 3), block(3, 4, None), block(4, 4), head)


def samples(step: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(step)
    images = torch.randn(TRAIN_BATCH, 1, 9, 9, generator=generator) * (1 + step)
    targets = torch.randint(0, 5, (TRAIN_BATCH,), generator=generator)
    return list(zip(images, targets, strict=True))


def loss_of(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, int]:
    return cross_entropy(output, target, reduction="sum"), len(target)
