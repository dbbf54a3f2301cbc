"""The comparison of a step: loss, gradients, norm, update, counts; and of an evaluation."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch

from trainer.certify.comparisons.differences import (
    BAND,
    distance,
    exact_value,
    first_finding,
    one_sided,
    states_finding,
    tolerance_of,
    wrong,
)
from trainer.certify.finding import TOLERANCES, CheckResult, Order
from trainer.certify.one_process.cancelled import largest_in_layers
from trainer.certify.one_process.expected import (
    Expected,
    Judged,
    largest_value,
    norm_of,
    relative_error,
)
from trainer.certify.outputs import Outputs, differences, scales
from trainer.certify.recording import Recording, Tensors
from trainer.state import MASTER, WEIGHT

LEAST_SHARE = 1e-2
"""The least scale that a gradient's error is relative to, as a share of its layer's largest entry.

A gradient that is zero by symmetry is rounding alone, and its scale is that largest entry: of a
key's bias without rotary positions, or of the last bias before scores if the loss does not change
when all of them are shifted."""


def compare_step(
    run: Recording, step: int, one: Expected, order: Order, rank: int
) -> Iterator[CheckResult]:
    """Compare a step's outputs, loss, gradients and norm, as `rank` recorded them."""
    norm = run.norms[step]
    rounding = one.rounding
    if one.overflows:
        if math.isfinite(norm) and not run.skipped[step]:
            yield wrong("overflow", step, f"(a norm of {norm:.3g})", rank)
        else:
            yield CheckResult("overflow", step, 0.0, 0.0, "", rank)
        return
    yield compare_outputs(step, run.outputs[step], one, rank)
    most = tolerance_of("loss", rounding.loss, one)
    yield CheckResult("loss", step, relative_error(run.losses[step], one.loss), most, "", rank)
    yield compare_gradients(step, run.gradients[step], one, order, rank)
    most = tolerance_of("norm", rounding.norm, one)
    yield CheckResult("norm", step, relative_error(norm, one.norm), most, "", rank)
    if run.gradients[step]:  # the norm is that of these gradients, however they were rounded
        own = relative_error(norm, norm_of(run.gradients[step]))
        yield CheckResult(
            "norm", step, own, TOLERANCES["norm"], "(of the run's own gradients)", rank
        )


def compare_outputs(step: int, ours: Outputs, one: Expected, rank: int) -> CheckResult:
    """Compare the modules' outputs; the finding is the first wrong one in order of execution.

    Of a module, its feature that is worst for its tolerance. In 16 bits the tolerance of a feature
    far smaller than others of its module may be all of it; its part in losses and gradients is
    compared apart.
    """
    errors = dict[str, float]()
    tolerances = dict[str, float]()
    common = [key for key, value in ours.items() if _alike(value, one.outputs.get(key))]
    scale = {key: scales(one.outputs[key]) for key in common}
    bands = {key: one.rounding.outputs.get(key, 0.0) / scale[key] for key in common}
    usual = sum(float(band.min()) for band in bands.values()) / max(len(bands), 1)
    least = tolerance_of("output", usual, one)
    for key in common:
        relative = differences(ours[key], one.outputs[key]) / scale[key]
        allowed = (BAND * bands[key]).clamp_min(least)
        worst = int((relative / allowed).argmax())
        label = f"{key[2]}, micro-batch {key[1]}"
        errors[label] = float(relative[worst])
        tolerances[label] = float(allowed[worst])
    return first_finding("output", step, errors, tolerances, errors, rank)


def _alike(ours: torch.Tensor, theirs: torch.Tensor | None) -> bool:
    return theirs is not None and ours.shape == theirs.shape


def compare_gradients(
    step: int, ours: Tensors, one: Expected, order: Order, rank: int
) -> CheckResult:
    """Compare the gradients; the finding is the first wrong one in order of the backward pass.

    A gradient that one side lacks has to be 0 on the other.
    """
    every = {**one.gradients, **ours}
    if odd := [n for n in ours.keys() ^ one.gradients.keys() if bool(every[n].any())]:
        last = max(odd, key=order.place)
        return one_sided("gradient", step, last, last in ours, rank)
    theirs = {name: value for name, value in one.gradients.items() if name in ours}
    of_layer = largest_in_layers(theirs, order)
    errors = dict[str, float]()
    bands = dict[str, float]()
    for name, value in theirs.items():
        share = 1.0 if name in one.cancelled else LEAST_SHARE
        scale = max(largest_value(value), share * of_layer[order.layer(name)], 1e-30)
        errors[name] = distance(ours[name], value) / scale
        bands[name] = one.rounding.gradients.get(name, 0.0) / scale
    usual = sum(bands.values()) / max(len(bands), 1)
    tolerances = {n: tolerance_of("gradient", max(band, usual), one) for n, band in bands.items()}
    backward = sorted(errors, key=order.place, reverse=True)
    return first_finding("gradient", step, errors, tolerances, backward, rank)


def compare_update(run: Recording, step: int, one: Expected, order: Order) -> Iterator[CheckResult]:
    """Compare the optimizer's state, and each weight's change.

    A change's error is what exceeds the rounding of the weight, relative to the tensor's largest
    change.
    """
    before = run.states[step]
    after = run.states[step + 1]
    if one.overflows:
        kept = {key: after[key] for key in one.state.keys() & after.keys()}
        yield states_finding("overflow", step, kept, one.state, order)
        return
    ours = {key: value for key, value in after.items() if key[1] not in (WEIGHT, MASTER)}
    # an engine may keep one count of steps for all parameters, and moments of 0 without a gradient
    theirs = {
        key: v
        for key, v in one.state.items()
        if key[1] != WEIGHT and (key in ours or v.ndim and bool(v.any()))
    }
    ours = {key: value for key, value in ours.items() if key in theirs or bool(value.any())}
    yield states_finding("moment", step, ours, theirs, order)
    if run.skipped[step]:
        yield wrong("update", step, "(skipped: a gradient that is not finite)")
        return
    errors = {}
    for (name, part), value in one.state.items():
        if part == WEIGHT:
            end, start = (exact_value(state, name, value).double() for state in (after, before))
            slack = 2 * torch.finfo(torch.float32).eps * torch.maximum(end.abs(), start.abs())
            beyond = largest_value(((end - value).abs() - slack).clamp_min(0))
            errors[name] = beyond / max(largest_value(value - start), 1e-30)
    yield first_finding("update", step, errors, {}, sorted(errors, key=order.place))


def compare_counts(run: Recording, step: int, targets: int, so_far: int, rank: int) -> CheckResult:
    """Compare the number of targets of a step, and of all steps so far."""
    ours = run.targets[step], run.tokens[step]
    if ours == (targets, so_far):
        return CheckResult("counts", step, 0.0, 0.0, "", rank)
    where = f"({ours[0]} targets, {ours[1]} so far, in place of {targets} and {so_far})"
    return wrong("counts", step, where, rank)


def compare_held_out(
    run: Recording, step: int, theirs: Judged, one: Expected
) -> Iterator[CheckResult]:
    """Compare the evaluation after a step: its number of targets, its loss and its measures."""
    ours = run.held_out[step + 1]
    if ours.targets != theirs.targets:
        where = f"({ours.targets} targets in place of {theirs.targets})"
        yield wrong("held-out loss", step, where)
        return
    rounding = max(one.rounding.loss, theirs.rounding)
    tolerance = tolerance_of("held-out loss", rounding, one)
    yield CheckResult("held-out loss", step, relative_error(ours.loss, theirs.loss), tolerance)
    if theirs.figures:
        yield from compare_figures(ours.measures, step, theirs, tolerance)
        return
    for (name, share), right in zip(ours.measures.items(), theirs.right, strict=True):
        off = max(0.0, abs(share * ours.targets - right) - theirs.unsure - 1e-6) / ours.targets
        where = f"({name} {share:.3g}, {right / ours.targets:.3g} in one process)"
        yield CheckResult("accuracy", step, off, 0.0, where)


def compare_figures(
    ours: Mapping[str, float], step: int, theirs: Judged, tolerance: float
) -> Iterator[CheckResult]:
    """Compare the measures of an evaluation that count no correct targets, each by its name."""
    for (name, mean), figure in zip(ours.items(), theirs.figures, strict=True):
        error = abs(mean * theirs.targets - figure.total) / max(figure.scale, 1e-30)
        yield CheckResult("figures", step, error, tolerance, name)
