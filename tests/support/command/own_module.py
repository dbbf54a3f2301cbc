"""A small module of its own with its data and loss, as a script would hand them in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

ROWS = [(torch.full((4,), i / 64), torch.tensor(i % 2)) for i in range(64)]


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def loss(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, int]:
    return cross_entropy(output, target, reduction="sum"), len(target)


def config(folder: Path, steps: int = 2, **more: Any) -> dict[str, Any]:
    run = {"folder": str(folder / "runs"), "name": "own"}
    section = {"steps": steps, "device": "cpu", "engine": "mesh", "run": run, **more}
    return {
        "train_batch_size": 8,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "trainer": section,
    }


OWN: Any = {"model": build, "data": ROWS, "loss": loss, "quiet": True}
