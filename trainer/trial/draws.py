"""Observation of where a model draws random numbers in training."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.distributed.seeding import seed_generators
from trainer.errors import ConfigError, Problem
from trainer.models.spec import ModelSpec
from trainer.trial.setup import row_of


@dataclass(frozen=True)
class Draws:
    """The places in a training forward pass that draw random numbers which change its result."""

    any: bool = False
    between: bool = False
    """True if it draws outside the blocks, after the first."""
    skips: bool = False
    """True if the numbers drawn decide which blocks run."""


def observe_draws(model: nn.Module, spec: ModelSpec) -> Draws:
    """Find where the model draws random numbers. Raises ConfigError if they are not from torch's
    default generator.
    """
    model.train()
    outside = _outside_torch()
    _, places, private, _ = _watched(model, spec, None)
    if private or _outside_torch() != outside:
        seen = (
            "draws random numbers from Python, NumPy or a generator of its own: no other "
            "layout "
            "could replay them"
        )
        raise ConfigError(Problem(f"trainer.model: {spec.name}", seen, "torch's default generator"))
    if "between" not in places:
        return Draws(any=bool(places))
    ends = [_watched(model, spec, held) for held in (0.0, 1.0 - 2.0**-24)]
    skips = any(ran != ends[0][3] for *_, ran in ends)
    return Draws(True, skips or not torch.equal(ends[0][0], ends[1][0]), skips)


def _watched(
    model: nn.Module, spec: ModelSpec, held: float | None
) -> tuple[torch.Tensor, set[str], bool, list[str]]:
    """Run one forward pass; return its output, where it drew, if a private generator did, and the
    modules that ran.

    Where no blocks are known, the whole model counts as between them.
    """
    place, left, ran = "before" if spec.blocks else "between", 0, list[str]()

    def enter(*_: Any) -> None:
        nonlocal place
        place = "block"

    def leave(*_: Any) -> None:
        nonlocal place, left
        left += 1
        place = "between" if left < len(spec.blocks) else "after"

    hooks = [
        module.register_forward_hook(lambda *_, name=name: ran.append(name))
        for name, module in model.named_modules()
    ]
    for name in spec.blocks:
        block = model.get_submodule(name)
        hooks += [block.register_forward_pre_hook(enter), block.register_forward_hook(leave)]
    ids = None if spec.tiny.input else row_of(spec)[None]
    run = (
        spec.tiny.input.output
        if spec.tiny.input
        else lambda model: model(input_ids=ids, use_cache=False).logits
    )
    seed_generators(1)
    try:
        with (
            torch.no_grad(),
            DrawWatch(lambda: place, {"between": held} if held is not None else {}) as watch,
        ):
            output = run(model)
    finally:
        for hook in hooks:
            hook.remove()
    return output, watch.places, watch.private, ran


class DrawWatch(TorchDispatchMode):
    """A dispatch mode that notes where random numbers are drawn, and in places of `held` sets them
    to its value.
    """

    def __init__(self, place: Callable[[], str], held: Mapping[str, float] | None = None) -> None:
        super().__init__()
        self.places: set[str] = set()
        self.private = False
        self._place = place
        self._held = held or {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        before = torch.get_rng_state()
        result = func(*args, **kwargs)
        generators = [v for v in (*args, *kwargs.values()) if isinstance(v, torch.Generator)]
        if any(generator is not torch.default_generator for generator in generators):
            self.private = True
        elif not torch.equal(before, torch.get_rng_state()):
            self.places.add(self._place())
            if self._place() in self._held and torch.is_tensor(result):
                result.fill_(self._held[self._place()])
        return result


def _outside_torch() -> tuple[Any, ...]:
    numpy = np.random.get_state(legacy=False)["state"]
    return random.getstate(), numpy["key"].tobytes(), numpy["pos"]
