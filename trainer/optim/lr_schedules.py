"""Learning-rate schedules as pure functions of the step, without a state to save.

DeepSpeed steps its schedulers after each update, so update `step` (from 0) runs at the rate that
the scheduler computes for iteration `step - 1`, and update 0 at the start value. The schedules with
its names return those very numbers (`deepspeed/runtime/lr_schedules.py`). Those with the names of
transformers run update `step` at the rate of `step`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from trainer.storage import Json


@dataclass(frozen=True)
class Update:
    """The values for one optimizer step; `betas` is None if the schedule does not change them."""

    learning_rate: float
    betas: tuple[float, float] | None = None


LRSchedule = Callable[[int], Update]


def schedule_of(settings: Json) -> LRSchedule:
    """Return the schedule of a config's resolved DeepSpeed JSON."""
    base = float(settings["optimizer"]["params"]["lr"])
    if (scheduler := settings.get("scheduler")) is None:
        return lambda step: Update(base)
    return SCHEDULES[scheduler["type"]](base, **scheduler.get("params", {}))


def warmup(
    base: float,
    *,
    warmup_min_lr: float = 0.0,
    warmup_max_lr: float | None = None,
    warmup_num_steps: int = 1000,
    warmup_type: str = "log",
    after: Callable[[int, int], float] = lambda iteration, warmup_steps: 1.0,
) -> LRSchedule:
    """Build WarmupLR; `after(iteration, warmup_steps)`: the share of the maximum from then on."""
    top = base if warmup_max_lr is None else warmup_max_lr
    steps = max(2, warmup_num_steps)

    def at(step: int) -> Update:
        past = step - 1
        if step == 0:
            return Update(warmup_min_lr)
        share = _warmup_share(past, steps, warmup_type) if past < steps else after(past, steps)
        return Update(warmup_min_lr + (top - warmup_min_lr) * share)

    return at


def warmup_decay(
    base: float, *, total_num_steps: int, warmup_max_lr: float = 0.001, **params: Any
) -> LRSchedule:
    """Build WarmupDecayLR: linear to zero at `total_num_steps`."""

    def after(iteration: int, warmup_steps: int) -> float:
        return max(0.0, (total_num_steps - iteration) / max(1.0, total_num_steps - warmup_steps))

    return warmup(base, warmup_max_lr=warmup_max_lr, after=after, **params)


def warmup_cosine(
    base: float,
    *,
    total_num_steps: int,
    warmup_min_ratio: float = 0.0,
    warmup_num_steps: int = 1000,
    cos_min_ratio: float = 0.0001,
    warmup_type: str = "log",
) -> LRSchedule:
    """Build WarmupCosineLR: a half cosine down to `cos_min_ratio` of the optimizer's rate."""
    steps = max(2, warmup_num_steps)

    def at(step: int) -> Update:
        iteration = step - 1
        if step == 0:
            return Update(0.0)
        if iteration < steps:
            share = _warmup_share(iteration, steps, warmup_type)
            return Update(base * (warmup_min_ratio + (1.0 - warmup_min_ratio) * share))
        progress = min(1.0, (iteration - steps + 1) / max(1, total_num_steps - steps))
        cosine = (1 + math.cos(math.pi * progress)) / 2
        return Update(base * max(0.0, cos_min_ratio + (1.0 - cos_min_ratio) * cosine))

    return at


def of_transformers(
    base: float,
    *,
    after: Callable[[float], float],
    warmup_num_steps: int = 0,
    total_num_steps: int = 0,
    cos_min_ratio: float = 0.0,
) -> LRSchedule:
    """Build a schedule of `transformers/optimization.py`: a linear warm-up, then `after(progress)`.

    `after` returns the share of the maximum; `progress` goes from 0 to 1.
    """

    def at(step: int) -> Update:
        if step < warmup_num_steps:
            return Update(base * step / warmup_num_steps)
        progress = min(1.0, (step - warmup_num_steps) / max(1, total_num_steps - warmup_num_steps))
        return Update(base * (cos_min_ratio + (1.0 - cos_min_ratio) * after(progress)))

    return at


@dataclass(frozen=True, kw_only=True)
class CycledMomentum:
    """The first beta under OneCycle: between its bounds within the cycle, and then growing."""

    cycle_momentum: bool = True
    """False if the schedule leaves the betas alone."""
    cycle_min_mom: float = 0.8
    cycle_max_mom: float = 0.9
    decay_mom_rate: float = 0.0


@dataclass(frozen=True)
class OneCycle(CycledMomentum):
    """The schedule OneCycle (arXiv 1803.09820), by the names of its parameters in the JSON.

    The rate goes up and down once, the first beta down and up; then both decay.
    """

    base: float
    """The optimizer's rate, in whose place this schedule has its own."""
    cycle_min_lr: float
    cycle_max_lr: float
    decay_lr_rate: float = 0.0
    cycle_first_step_size: int = 2000
    cycle_second_step_size: int | None = None
    cycle_first_stair_count: int = 0
    cycle_second_stair_count: int | None = None
    decay_step_size: int = 0

    def __call__(self, step: int) -> Update:
        past = step - self.cycle_first_step_size - self._second  # updates since the cycle ended
        if past < 1:
            rate, momentum = self._within_cycle(step)
        else:
            rate = self.cycle_min_lr / self._growth(self.decay_lr_rate, past)
            momentum = self.cycle_max_mom * self._growth(self.decay_mom_rate, past)
        return Update(rate, (momentum, 0.99) if self.cycle_momentum else None)

    @property
    def _second(self) -> int:
        size = self.cycle_second_step_size
        return self.cycle_first_step_size if size is None else size

    def _within_cycle(self, step: int) -> tuple[float, float]:
        height = self._height(step)
        rate = self.cycle_min_lr + (self.cycle_max_lr - self.cycle_min_lr) * height
        if step == 0:
            return rate, self.cycle_min_mom
        return rate, self.cycle_max_mom - (self.cycle_max_mom - self.cycle_min_mom) * height

    def _height(self, step: int) -> float:
        """Return the share of the way from the lowest to the highest rate."""
        first = self.cycle_first_step_size
        second = self._second
        place = step % (first + second)
        stairs = self.cycle_first_stair_count
        if place <= first:
            share = place / first
        else:
            share = (first + second - place) / second
            if self.cycle_second_stair_count is not None:
                stairs = self.cycle_second_stair_count
        return math.floor(share * stairs) / stairs if stairs else share

    def _growth(self, rate: float, past: float) -> float:
        if self.decay_step_size == 0 or math.isclose(rate, 0):
            return 1
        return 1 + rate * past / self.decay_step_size


def range_test(
    base: float,
    *,
    lr_range_test_min_lr: float = 1e-3,
    lr_range_test_step_size: int = 2000,
    lr_range_test_step_rate: float = 1.0,
    lr_range_test_staircase: bool = False,
) -> LRSchedule:
    """Build LRRangeTest: the rate grows without bound, to find where training breaks."""

    def at(step: int) -> Update:
        interval = step / lr_range_test_step_size
        grown = math.floor(interval) if lr_range_test_staircase else interval
        return Update(lr_range_test_min_lr * (1 + lr_range_test_step_rate * grown))

    return at


def _warmup_share(iteration: int, steps: int, kind: str) -> float:
    return iteration / steps if kind == "linear" else math.log(iteration + 1) / math.log(steps)


SCHEDULES: dict[str, Callable[..., LRSchedule]] = {
    "WarmupLR": warmup,
    "WarmupDecayLR": warmup_decay,
    "WarmupCosineLR": warmup_cosine,
    "OneCycle": OneCycle,
    "LRRangeTest": range_test,
    "linear": partial(of_transformers, after=lambda progress: 1.0 - progress),
    "cosine": partial(
        of_transformers, after=lambda progress: (1.0 + math.cos(math.pi * progress)) / 2
    ),
    "constant_with_warmup": partial(of_transformers, after=lambda progress: 1.0),
}
