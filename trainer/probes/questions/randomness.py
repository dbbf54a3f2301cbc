"""Where does the model draw random numbers?"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.distributed.seeding import seed_generators
from trainer.models.spec import ModelSpec
from trainer.probes.dispatch_modes import Alone
from trainer.probes.findings import Draws
from trainer.probes.inputs import trial_of
from trainer.probes.probe import Finding
from trainer.probes.question import Probed, Question
from trainer.probes.questions.can_run import ALL

if TYPE_CHECKING:
    from torch._ops import OpOverload


def observe_draws(model: nn.Module, spec: ModelSpec) -> Draws:
    """Find where the model draws random numbers in a training forward pass."""
    model.train()
    outside = _outside_torch()
    first = watched_pass(model, spec)
    private = first.watch.private or _outside_torch() != outside
    if "between" not in first.watch.places:
        return Draws(any=bool(first.watch.places), private=private)
    low = watched_pass(model, spec, 0.0)
    high = watched_pass(model, spec, 1.0 - 2.0**-24)
    skips = low.modules != high.modules
    between = skips or not torch.equal(low.output, high.output)
    return Draws(True, between, skips, private)


@dataclass(frozen=True)
class WatchedPass:
    """A forward pass: where it drew random numbers, what it gave, and which modules ran."""

    watch: DrawWatch
    output: torch.Tensor
    modules: list[str]


def watched_pass(model: nn.Module, spec: ModelSpec, drawn: float | None = None) -> WatchedPass:
    """Run one forward pass, and watch it.

    All numbers drawn between blocks are `drawn` unless that is None. Where no blocks are known, the
    whole model counts as between them.
    """
    place = "before" if spec.blocks else "between"
    left = 0
    ran = list[str]()

    def enter(*_: object) -> None:
        nonlocal place
        place = "block"

    def leave(*_: object) -> None:
        nonlocal place, left
        left += 1
        place = "between" if left < len(spec.blocks) else "after"

    trial = trial_of(spec)
    watch = DrawWatch(lambda: place, {} if drawn is None else {"between": drawn})
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
    return WatchedPass(watch, output, ran)


class DrawWatch(TorchDispatchMode):
    """A dispatch mode that notes where random numbers are drawn, or sets those of some places."""

    def __init__(self, place: Callable[[], str], drawn: Mapping[str, float] | None = None) -> None:
        super().__init__()
        self.places: set[str] = set()
        self.private = False
        self._place = place
        self._drawn = drawn or {}

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        before = torch.get_rng_state()
        result = func(*args, **kwargs)
        generators = [v for v in (*args, *kwargs.values()) if isinstance(v, torch.Generator)]
        if any(generator is not torch.default_generator for generator in generators):
            self.private = True
        elif not torch.equal(before, torch.get_rng_state()):
            place = self._place()
            self.places.add(place)
            if place in self._drawn and torch.is_tensor(result):
                result.fill_(self._drawn[place])
        return result


def _outside_torch() -> tuple[object, ...]:
    numpy = np.random.get_state(legacy=False)["state"]
    return random.getstate(), numpy["key"].tobytes(), numpy["pos"]


def _ask(about: Probed) -> Finding | None:
    small, model = about.tiny
    if about.is_language:
        draws = observe_draws(model, small)
    else:
        with Alone():
            draws = observe_draws(model, small)
    about.learn(draws=draws)
    if not draws.private:
        return None
    source = "draws random numbers from Python, NumPy or a generator of its own"
    return Finding(f"{source}: no other layout could replay them", "torch's default generator")


QUESTION = Question(
    name="where it draws random numbers",
    key="trainer.model",
    need=ALL,
    ask=_ask,
    holds="Random numbers come from torch's default generator",
    otherwise=(
        "error: nothing could replay the random numbers of Python, NumPy or a generator of the "
        "model's own"
    ),
    cost="0.01 s",
)
