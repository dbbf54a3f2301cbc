"""The comparison of a run with one process: one finding for each check of each step."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from trainer.certify.outputs import Outputs, apart
from trainer.certify.recording import Recording, State, Tensors
from trainer.certify.reference import Expected, Judged, scheduler_of
from trainer.certify.rounding import coefficients
from trainer.config import Config
from trainer.optim.lr_schedules import schedule_of
from trainer.state import MASTER, WEIGHT

# check -> largest relative error that float32 arithmetic in another order may leave
TOLERANCES = {
    "initial": 0.0,
    "output": 1e-4,
    "loss": 1e-5,
    "gradient": 1e-4,
    "norm": 1e-4,
    "projection": 1e-3,
    "rounding": 1.5,
    "sum": 1e-5,
    "moment": 1e-5,
    "update": 2e-5,
    "overflow": 0.0,
    "counts": 0.0,
    "schedule": 1e-9,
    "held-out loss": 1e-5,
    "accuracy": 0.0,
    "loaded state": 0.0,
    "resumed loss": 0.0,
    "resumed state": 0.0,
}
"""The checks in the order of a step: the first that fails shows where the error arises."""

LEAST_SHARE = 1e-2
"""The share of its layer's largest entry below which a gradient is not measured against its own:
one that is zero by symmetry (a key's bias without rotary positions) is rounding alone."""

BAND = 3.0
"""The factor by which a layout's rounding in low precision may exceed that of one process."""

MOST_STEPS = 200_000
"""The most steps that are compared, in a few seconds."""


@dataclass(frozen=True)
class Finding:
    """The relative error of one check at one step: the largest, or the first that is too large."""

    check: str
    step: int
    error: float
    tolerance: float
    where: str
    rank: int

    @property
    def passed(self) -> bool:
        return self.error <= self.tolerance  # NaN fails

    @property
    def severity(self) -> float:
        return (
            float("inf") if self.error != self.error else self.error / max(self.tolerance, 1e-300)
        )


@dataclass(frozen=True)
class Order:
    """The place of each parameter in the forward pass, and the blocks."""

    places: Mapping[str, int]
    blocks: tuple[str, ...]

    def place(self, name: str) -> tuple[int, str]:
        """Return a sort key; buffers, and what one process lacks, are wrong from the start."""
        return self.places.get(name, -1), name

    def layer(self, name: str) -> str:
        return next((block for block in self.blocks if name.startswith(f"{block}.")), "")


def compare_initial(
    run: Recording, weights: Tensors, order: Order, held: Collection[str] = ()
) -> Finding:
    """Compare the initial weights, exact ones where there are: float32 masters must not start from
    rounded values.

    Frozen weights, `held`, need no master: they may be kept in 16 bits alone.
    """
    for name in set(held) & weights.keys():
        if (kept := run.states[0].get((name, WEIGHT))) is not None:
            weights = {**weights, name: weights[name].to(kept.dtype).to(weights[name].dtype)}
    ours = {
        key: _exact(run.states[0], key[0], value)
        for key, value in run.states[0].items()
        if key[1] == WEIGHT
    }
    return _states(
        "initial", 0, ours, {(name, WEIGHT): value for name, value in weights.items()}, order
    )


def compare_step(
    run: Recording, step: int, one: Expected, order: Order, rank: int
) -> Iterator[Finding]:
    """Compare the loss, every gradient and the norm of a step, as each rank has seen them."""
    if one.overflows:
        finite = math.isfinite(run.norms[step]) and not run.skipped[step]
        where = f"(a norm of {run.norms[step]:.3g})" if finite else ""
        yield Finding("overflow", step, float("inf") if finite else 0.0, 0.0, where, rank)
        return
    loss, norm = (
        _relative(of[step], by) for of, by in ((run.losses, one.loss), (run.norms, one.norm))
    )
    bands = (
        (one.rounding.loss / one.loss, one.rounding.norm / one.norm) if one.rounding else (0.0, 0.0)
    )
    yield compare_outputs(step, run.outputs[step], one, rank)
    yield Finding("loss", step, loss, _tolerance("loss", bands[0], one), "", rank)
    yield compare_gradients(step, run.gradients[step], one, order, rank)
    yield Finding("norm", step, norm, _tolerance("norm", bands[1], one), "", rank)


def compare_outputs(step: int, ours: Outputs, one: Expected, rank: int) -> Finding:
    """Return the first module, in order of execution, that gives something else."""
    both = {key: (value, one.outputs[key]) for key, value in ours.items() if key in one.outputs}
    bands = one.rounding.outputs if one.rounding else {}
    usual, errors, tolerances = sum(bands.values()) / max(len(bands), 1), {}, {}
    for key, (value, other) in both.items():
        if value.shape == other.shape:
            label = f"{key[2]}, micro-batch {key[1]}"
            errors[label] = apart(value, other)
            tolerances[label] = _tolerance("output", max(bands.get(key, 0.0), usual), one)
    return _first("output", step, errors, tolerances, errors, rank)


def compare_gradients(step: int, ours: Tensors, one: Expected, order: Order, rank: int) -> Finding:
    """Compare the gradients; the first finding is the last wrong one of the forward pass, where
    backward passes begin.

    A gradient that one side lacks may be zeros on the other.
    """
    odd = {
        n
        for a, b in ((ours, one.gradients), (one.gradients, ours))
        for n in a
        if n not in b and bool(a[n].any())
    }
    if odd:
        last = max(odd, key=order.place)
        return _one_sided("gradient", step, last, last in ours, rank)
    theirs = {name: value for name, value in one.gradients.items() if name in ours}
    of_layer: dict[str, float] = {}
    for name, value in theirs.items():
        of_layer[order.layer(name)] = max(of_layer.get(order.layer(name), 0.0), _largest(value))
    scales = {
        name: max(_largest(value), LEAST_SHARE * of_layer[order.layer(name)], 1e-30)
        for name, value in theirs.items()
    }
    errors = {name: _apart(ours[name], value) / scales[name] for name, value in theirs.items()}
    bands = {
        name: (one.rounding.gradients[name] if one.rounding else 0.0) / scales[name]
        for name in theirs
    }
    usual = sum(bands.values()) / max(len(bands), 1)
    tolerances = {
        name: _tolerance("gradient", max(band, usual), one) for name, band in bands.items()
    }
    return _first(
        "gradient", step, errors, tolerances, sorted(errors, key=order.place, reverse=True), rank
    )


def compare_update(run: Recording, step: int, one: Expected, order: Order) -> Iterator[Finding]:
    """Compare the optimizer's state, and each weight's change, beyond its own rounding."""
    before, after = run.states[step], run.states[step + 1]
    if one.overflows:
        yield _states(
            "overflow",
            step,
            {key: after[key] for key in one.state.keys() & after.keys()},
            one.state,
            order,
        )
        return
    ours = {key: value for key, value in after.items() if key[1] not in (WEIGHT, MASTER)}
    # counts may be kept for all parameters together, and moments without a gradient as zeros
    theirs = {
        key: v
        for key, v in one.state.items()
        if key[1] != WEIGHT and (key in ours or v.ndim and bool(v.any()))
    }
    ours = {key: value for key, value in ours.items() if key in theirs or bool(value.any())}
    yield _states("moment", step, ours, theirs, order)
    if run.skipped[step]:
        yield Finding(
            "update", step, float("inf"), 0.0, "(skipped: a gradient that is not finite)", 0
        )
        return
    errors = {}
    for (name, part), value in one.state.items():
        if part == WEIGHT:
            end, start = (_exact(state, name, value).double() for state in (after, before))
            slack = 2 * torch.finfo(torch.float32).eps * torch.maximum(end.abs(), start.abs())
            beyond = _largest(((end - value).abs() - slack).clamp_min(0))
            errors[name] = beyond / max(_largest(value - start), 1e-30)
    yield _first("update", step, errors, {}, sorted(errors, key=order.place))


def compare_counts(run: Recording, step: int, targets: int, so_far: int, rank: int) -> Finding:
    """Compare the targets of a step, and of all steps so far."""
    ours, theirs = (run.targets[step], run.tokens[step]), (targets, so_far)
    where = (
        ""
        if ours == theirs
        else f"({ours[0]} targets, {ours[1]} so far, in place of {targets} and {so_far})"
    )
    return Finding("counts", step, float("inf") if where else 0.0, 0.0, where, rank)


def compare_held_out(run: Recording, step: int, theirs: Judged, one: Expected) -> Iterator[Finding]:
    ours = run.held_out[step + 1]
    if ours.targets != theirs.targets:
        where = f"({ours.targets} targets in place of {theirs.targets})"
        yield Finding("held-out loss", step, float("inf"), 0.0, where, 0)
        return
    band = one.rounding.loss / one.loss if one.rounding else 0.0
    error, tolerance = _relative(ours.loss, theirs.loss), _tolerance("held-out loss", band, one)
    yield Finding("held-out loss", step, error, tolerance, "", 0)
    for (name, share), right in zip(ours.measures.items(), theirs.right, strict=True):
        off = max(0.0, abs(share * ours.targets - right) - theirs.unsure - 1e-6) / ours.targets
        yield Finding(
            "accuracy",
            step,
            off,
            0.0,
            f"({name} {share:.3g}, {right / ours.targets:.3g} in one process)",
            0,
        )


def compare_resumed(
    resumed: Recording, whole: Recording, middle: int, order: Order
) -> Iterator[Finding]:
    """Compare a resumed run with the whole one, bit for bit."""
    yield _states("loaded state", middle, resumed.states[0], whole.states[middle], order)
    ours, theirs = (vars(of.position) | of.position.engine for of in (resumed, whole))
    for name in [name for name in theirs if name != "engine" and ours.get(name) != theirs[name]]:
        where = f"{name} ({ours.get(name)} in place of {theirs[name]})"
        yield Finding("loaded state", middle, float("inf"), 0.0, where, 0)
    for index, loss in enumerate(resumed.losses):
        step = middle + index
        if (
            loss == loss or whole.losses[step] == whole.losses[step]
        ):  # not where it overflowed in both
            error = 0.0 if loss == whole.losses[step] else _relative(loss, whole.losses[step])
            yield Finding("resumed loss", step, error, 0.0, "", 0)
        yield _states(
            "resumed state", step, resumed.states[index + 1], whole.states[step + 1], order
        )


def compare_rounded(run: Recording, exact: list[Tensors], low: list[Tensors]) -> Iterator[Finding]:
    """Project gradients of many rows, the run's and one process's in low precision, on float32
    ones.

    The coefficients must agree up to TOLERANCES, or two standard errors of one process; the rest is
    measured by its noise.
    """
    assert run.rounded is not None
    step, rounded = len(run.losses), run.rounded
    (ours, rest), (theirs, noise) = (coefficients(of, exact) for of in (rounded.projected, low))
    apart = abs(statistics.fmean(ours) - statistics.fmean(theirs))
    sure = max(TOLERANCES["projection"], 2 * statistics.stdev(theirs) / len(theirs) ** 0.5)
    yield Finding("projection", step, apart, sure, "(of gradients on those in float32)", 0)
    yield Finding(
        "rounding", step, rest / noise, TOLERANCES["rounding"], "(x that of one process)", 0
    )
    yield Finding(
        "sum", step, rounded.added, rounded.allowed or TOLERANCES["sum"], rounded.where, 0
    )


def compare_schedule(own: Config, steps: int) -> Finding:
    """Compare the optimizer settings of each step of the run with DeepSpeed's scheduler."""
    base, scheduler = float(own.optimizer.params["lr"]), own.scheduler
    ours = schedule_of(vars(own.optimizer), None if scheduler is None else vars(scheduler))
    optimizer = torch.optim.AdamW([torch.zeros(1)], lr=base)
    theirs = scheduler_of(optimizer, own)
    worst = Finding("schedule", 0, 0.0, TOLERANCES["schedule"], f"(the first {steps:,} steps)", 0)
    for step in range(min(steps, MOST_STEPS)):
        update, [group] = ours(step), optimizer.param_groups
        found = [(update.learning_rate, group["lr"])]
        if update.betas is not None and theirs is not None:
            found += zip(update.betas, group["betas"], strict=True)
        for mine, expected in found:
            error = abs(mine - expected) / max(abs(expected), 1e-6 * base, 1e-30)
            if not error <= worst.error:
                worst = Finding(
                    "schedule",
                    step,
                    error,
                    worst.tolerance,
                    f"({mine:.6g} in place of {expected:.6g})",
                    0,
                )
        if not worst.passed:
            return worst
        if theirs is not None:
            theirs.step()
    return worst


def _states(check: str, step: int, ours: State, theirs: State, order: Order) -> Finding:
    """Compare tensors, each relative to its largest entry; one that one side lacks is infinite."""
    if odd := ours.keys() ^ theirs.keys():
        first = min(odd, key=lambda key: order.place(key[0]))
        return _one_sided(check, step, _label(first), first in ours)
    ranked = sorted(theirs, key=lambda key: order.place(key[0]))
    errors = {
        _label(key): _apart(ours[key], theirs[key]) / max(_largest(theirs[key]), 1e-30)
        for key in ranked
    }
    return _first(check, step, errors, {}, errors)


def _first(
    check: str,
    step: int,
    errors: Mapping[str, float],
    tolerances: Mapping[str, float],
    ranked: Iterable[str],
    rank: int = 0,
) -> Finding:
    """Return the first error that is too large; if none is, the nearest to its tolerance."""
    found = [
        Finding(check, step, errors[n], tolerances.get(n, TOLERANCES[check]), n, rank)
        for n in ranked
    ]
    failed = next((finding for finding in found if not finding.passed), None)
    nothing = Finding(check, step, 0.0, TOLERANCES[check], "", rank)
    return failed or max(found, key=lambda finding: finding.severity, default=nothing)


def _tolerance(check: str, band: float, one: Expected) -> float:
    """Return the tolerance; in low precision a multiple of the rounding of one process."""
    return BAND * max(band, one.rounding.least) if one.rounding else TOLERANCES[check]


def _one_sided(check: str, step: int, name: str, here: bool, rank: int = 0) -> Finding:
    where = f"{name} (only {'here' if here else 'in one process'})"
    return Finding(check, step, float("inf"), TOLERANCES[check], where, rank)


def _exact(state: State, name: str, like: torch.Tensor) -> torch.Tensor:
    """Return the weight in float32: the master if there is one; NaN if there is neither."""
    value = state.get((name, MASTER), state.get((name, WEIGHT)))
    return torch.full_like(like, torch.nan) if value is None else value.reshape(like.shape)


def _label(key: tuple[str, str]) -> str:
    return key[0] if key[1] == WEIGHT else f"{key[0]} ({key[1]})"


def _relative(ours: float, theirs: float) -> float:
    return abs(ours - theirs) / max(abs(theirs), 1e-12)


def _apart(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    if ours.numel() != theirs.numel():
        return float("inf")
    return _largest(ours.reshape(theirs.shape).double() - theirs)


def _largest(values: torch.Tensor) -> float:
    return float(values.abs().max()) if values.numel() else 0.0
