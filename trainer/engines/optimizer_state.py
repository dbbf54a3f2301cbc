"""What an optimizer keeps beside parameters: what is there and no more, and made anew without a step over them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from trainer.state import STEP, StateTensor


class OptimizerState:
    """The state of a `torch.optim.Optimizer`, by the tensor that it updates."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self.from_start = bool(optimizer.state)
        """Whether it has state before its first step, as Adagrad has."""
        self.common_step = 0.0
        """What checkpoints of old have in place of a count of each parameter."""

    def of(self, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """The numbers that it keeps of a tensor, by name; None and such are left out."""
        return {
            key: value if torch.is_tensor(value) else torch.tensor(value, dtype=torch.float64)
            for key, value in sorted(self._optimizer.state.get(tensor, {}).items())
            if isinstance(value, torch.Tensor | int | float)
        }

    def step(self) -> float:
        """Of the first parameter that has a count: each is a wait for the device."""
        return next((float(state[STEP]) for state in self._optimizer.state.values() if STEP in state), 0.0)

    def keep(self, tensors: Sequence[torch.Tensor], wanted: bool) -> None:
        """Have state of these tensors, as after a first step, or none."""
        states = self._optimizer.state
        for tensor in tensors:
            if not wanted and not self.from_start:
                states.pop(tensor, None)
            elif not states.get(tensor):
                states[tensor] = made(self._optimizer, tensor)

    def put(self, tensors: Sequence[torch.Tensor], key: str, value: torch.Tensor | float) -> None:
        """Set a scalar, as what it is there: a tensor or a number."""
        for state in (self._optimizer.state[tensor] for tensor in tensors):
            if torch.is_tensor(state[key]):
                state[key].fill_(value)
            else:
                state[key] = type(state[key])(value)


def made(optimizer: torch.optim.Optimizer, like: torch.Tensor, steps: int = 1) -> dict[str, Any]:
    """What it would keep beside `like` after some steps with zero gradients; tensors of its shape are zero.

    Asked of the optimizer by steps over a stand-in of one entry: nothing that it keeps for others changes.
    """
    groups, states = optimizer.param_groups, optimizer.state
    group = next((g for g in groups if any(p is like for p in g["params"])), groups[0])
    stand_in = torch.zeros((1,) * max(like.ndim, 1), dtype=like.dtype, device=like.device)
    stand_in.grad = torch.zeros_like(stand_in)
    optimizer.param_groups, optimizer.state = [{**group, "params": [stand_in]}], defaultdict(dict)
    try:
        for _ in range(steps):
            type(optimizer).step(optimizer)
        found = dict(optimizer.state[stand_in])
    finally:
        optimizer.param_groups, optimizer.state = groups, states
    with torch.no_grad():
        return {
            key: torch.zeros_like(like, dtype=value.dtype) if _is_like(value, stand_in) else value
            for key, value in found.items()
        }


def _is_like(value: Any, tensor: torch.Tensor) -> bool:
    return torch.is_tensor(value) and value.shape == tensor.shape


def elsewhere(name: str, shapes: Mapping[str, tuple[int, ...]]) -> list[StateTensor]:
    """State tensors of a parameter that other ranks hold."""
    return [
        StateTensor(name, part, shape, torch.float32, 0, read=lambda: None, write=lambda value: None)
        for part, shape in shapes.items()
    ]
