"""An optimizer's state of parameters: read, removed, or created without a step over them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch.optim import Optimizer

from trainer.state import STEP, StateTensor


class OptimizerState:
    """The state of an `Optimizer`, by the tensor that it updates."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self.from_start = bool(optimizer.state)
        """True if the optimizer has state before its first step, as Adagrad has."""
        self.common_step = 0.0
        """The step count in old checkpoints, which lack a count for each parameter."""

    def of(self, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the numbers kept for a tensor, by name, without other values, such as None."""
        return {
            key: value if torch.is_tensor(value) else torch.tensor(value, dtype=torch.float64)
            for key, value in sorted(self._optimizer.state.get(tensor, {}).items())
            if isinstance(value, torch.Tensor | int | float)
        }

    def step(self) -> float:
        """Return the step count of one parameter: reading each would wait for the device."""
        states = self._optimizer.state.values()
        return next((float(state[STEP]) for state in states if STEP in state), 0.0)

    def keep(self, tensors: Sequence[torch.Tensor], present: bool) -> None:
        """Create state for these tensors, as after a first step, or remove it unless `present`."""
        states = self._optimizer.state
        for tensor in tensors:
            if not present and not self.from_start:
                states.pop(tensor, None)
            elif not states.get(tensor):
                states[tensor] = fresh_state(self._optimizer, tensor)

    def put(self, tensors: Sequence[torch.Tensor], key: str, value: torch.Tensor | float) -> None:
        """Set a scalar, as a tensor or number like the value already there."""
        for state in (self._optimizer.state[tensor] for tensor in tensors):
            if torch.is_tensor(state[key]):
                state[key].fill_(value)
            else:
                state[key] = type(state[key])(value)


def fresh_state(optimizer: Optimizer, like: torch.Tensor, steps: int = 1) -> dict[str, object]:
    """Create the state of `like` after steps with zero gradients; tensors of its shape are zero.

    The optimizer makes it in steps over a stand-in of one entry: no other state changes.
    """
    groups = optimizer.param_groups
    states = optimizer.state
    group = next((g for g in groups if any(p is like for p in g["params"])), groups[0])
    stand_in = torch.zeros((1,) * max(like.ndim, 1), dtype=like.dtype, device=like.device)
    stand_in.grad = torch.zeros_like(stand_in)
    alone = [{**group, "params": [stand_in]}]
    # the base class's own, which only sets attributes: subclasses convert state of old versions
    put = partial(Optimizer.__setstate__, optimizer)
    put({"param_groups": alone, "state": defaultdict(dict)})
    try:
        for _ in range(steps):
            type(optimizer).step(optimizer)
        state = dict(optimizer.state[stand_in])
    finally:
        put({"param_groups": groups, "state": states})
    with torch.no_grad():
        for key, value in state.items():
            if torch.is_tensor(value) and value.shape == stand_in.shape:
                state[key] = torch.zeros_like(like, dtype=value.dtype)
    return state


def elsewhere(name: str, shapes: Mapping[str, tuple[int, ...]]) -> list[StateTensor]:
    """List the state tensors of a parameter that other ranks hold."""
    return [
        StateTensor(name, part, shape, torch.float32, 0, list, lambda value: None)
        for part, shape in shapes.items()
    ]
