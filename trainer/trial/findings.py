"""Findings of the trials of a model, where it draws random numbers, and the spec that follows."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.distributed.seeding import seed_generators
from trainer.errors import ConfigError, Problem
from trainer.models.cut import of_tokens
from trainer.models.names import in_short, pattern_of
from trainer.models.spec import ModelSpec


@dataclass(frozen=True)
class Draws:
    """The places in a training forward pass that draw random numbers which change its result."""

    any: bool = False
    between: bool = False
    """True if it draws outside the blocks, after the first."""
    skips: bool = False
    """True if the numbers drawn decide which blocks run."""


def observe_draws(model: nn.Module, spec: ModelSpec) -> Draws:
    """Find where the model draws random numbers.

    Raises ConfigError if they are not from torch's default generator.
    """
    model.train()
    outside = _outside_torch()
    watch, *_ = observe(model, spec)
    if watch.private or _outside_torch() != outside:
        source = "draws random numbers from Python, NumPy or a generator of its own"
        seen, expected = f"{source}: no other layout could replay them", "torch's default generator"
        raise ConfigError(Problem(f"trainer.model: {spec.name}", seen, expected))
    if "between" not in watch.places:
        return Draws(any=bool(watch.places))
    _, low, ran_low = observe(model, spec, 0.0)
    _, high, ran_high = observe(model, spec, 1.0 - 2.0**-24)
    skips = ran_low != ran_high
    return Draws(True, skips or not torch.equal(low, high), skips)


def observe(
    model: nn.Module, spec: ModelSpec, held: float | None = None
) -> tuple[DrawWatch, torch.Tensor, list[str]]:
    """Run one forward pass; return where it drew random numbers, its output, the modules that ran.

    Numbers drawn between blocks are `held` unless that is None. Where no blocks are known, the
    whole model counts as between them.
    """
    place, left, ran = "before" if spec.blocks else "between", 0, list[str]()

    def enter(*_: Any) -> None:
        nonlocal place
        place = "block"

    def leave(*_: Any) -> None:
        nonlocal place, left
        left += 1
        place = "between" if left < len(spec.blocks) else "after"

    trial = spec.tiny.input or of_tokens(spec)
    watch = DrawWatch(lambda: place, {} if held is None else {"between": held})
    with ExitStack() as hooks:
        for name, module in model.named_modules():
            note = lambda *_, name=name: ran.append(name)  # noqa: E731
            hooks.enter_context(module.register_forward_hook(note))
        for name in spec.blocks:
            block = model.get_submodule(name)
            hooks.enter_context(block.register_forward_pre_hook(enter))
            hooks.enter_context(block.register_forward_hook(leave))
        seed_generators(1)
        with torch.no_grad(), watch:
            output = trial.output(model)
    return watch, output, ran


class DrawWatch(TorchDispatchMode):
    """A dispatch mode that notes where random numbers are drawn; places of `held` get its value."""

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


@dataclass(frozen=True)
class Findings:
    unused: tuple[str, ...] = ()
    """Patterns of the names of parameters that get no gradient, numbers replaced by `*`."""
    sparse: tuple[str, ...] = ()
    """Patterns of the names of parameters that only some rows leave without a gradient."""
    draws: Draws = Draws()
    blocks: bool = True
    """True if the spec's blocks run once each, in their order."""
    moves_buffers: str = ""
    """The buffer, no running statistic, that a forward pass in training changes; else empty."""
    normalises: str = ""
    """The module that keeps running statistics of its input (batch norm); else empty."""
    unproven: str = ""
    """Why nothing could be tried; every other field is then a guess."""
    notes: tuple[str, ...] = ()
    """Notes for the user, a line each."""


def applied(spec: ModelSpec, findings: Findings) -> ModelSpec:
    """Return the spec with unused parameters frozen, and no blocks if they do not run in order."""
    if findings.unused:
        spec = spec.with_frozen(_matching(spec, findings.unused).keys())
    blocks = spec.blocks if findings.blocks else ()
    draws = findings.draws.any or bool(findings.unproven)
    training = replace(spec.training, sparse=findings.sparse, draws=draws)
    return replace(spec, blocks=blocks, training=training)


def _matching(spec: ModelSpec, patterns: Sequence[str]) -> dict[str, nn.Parameter]:
    named = spec.build().named_parameters()
    return {name: parameter for name, parameter in named if pattern_of(name) in patterns}


def say_unused(spec: ModelSpec, patterns: Sequence[str]) -> Iterator[str]:
    """Yield a line on the parameters that match, if there are some: they get no gradient."""
    if found := _matching(spec, patterns):
        values = sum(parameter.numel() for parameter in found.values()) / 1e6
        others = {name for name, _ in spec.build().named_parameters()} - found.keys()
        where = in_short(found, others)
        count = f"{len(found)} parameters ({values:,.1f} M values)"
        source = " from text" if spec.tiny.input is None else ""
        yield f"{count} get no gradient{source}, and are frozen: {where}"
