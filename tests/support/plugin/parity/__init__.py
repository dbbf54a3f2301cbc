"""A plug-in: the parity of bits as a task, an optimizer, a source of rows, and a tracker."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from trainer.config import TrainerSection
from trainer.plugins import register
from trainer.trackers import Evaluation, Record

BITS = torch.arange(64)[:, None] >> torch.arange(6) & 1


@register("task", "parity:parity")
def parity(section: TrainerSection) -> dict[str, Any]:
    """Return what is trained; `trainer.model.config` may say how wide the module is."""
    width = section.model.config["width"] if isinstance(section.model.config, dict) else 8
    return {
        "model": lambda: nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 2)),
        "data": torch.utils.data.TensorDataset(BITS.float(), BITS.sum(1) % 2),
        "loss": lambda output, target: (
            cross_entropy(output, target, reduction="sum"),
            len(target),
        ),
        "metrics": {
            "right": lambda output, target: ((output.argmax(1) == target).sum(), len(target))
        },
    }


@register("optimizer", "parity:SignSGD")
class SignSGD(torch.optim.Optimizer):
    """Moves each weight by the sign of its smoothed gradient."""

    def __init__(self, groups: Any, lr: float, weight_decay: float, momentum: float = 0.9) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                mean = state.setdefault("mean", torch.zeros_like(parameter))
                mean.lerp_(parameter.grad, 1 - group["momentum"])
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.sub_(mean.sign(), alpha=group["lr"])


@register("source", "parity:words")
def words(path: Path) -> Iterator[dict[str, str]]:
    """Yield a document for each line of words."""
    for line in path.read_text().splitlines():
        yield {"text": " ".join(line.split(","))}


@register("tracker", "parity:list")
class List:
    """Writes a line for each record and evaluation."""

    def __init__(self, folder: Path) -> None:
        self._file = (folder / "list.txt").open("a")

    def record(self, record: Record, /) -> None:
        print("step", record.step, file=self._file, flush=True)

    def evaluation(self, evaluation: Evaluation, /) -> None:
        print("right", evaluation.metrics["right"], file=self._file, flush=True)

    def close(self) -> None:
        self._file.close()
