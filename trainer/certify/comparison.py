"""The checks: a run against one process, a finding for each check and step."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from trainer.certify.finding import OPTION, TOLERANCES, Finding, Order, worst_of
from trainer.certify.one_process.edges import Edge
from trainer.certify.one_process.optimizers import scheduler_of
from trainer.certify.one_process.options import Option, Seen, share_of, share_of_precision
from trainer.certify.outputs import Outputs, apart
from trainer.certify.parameters import Published
from trainer.certify.recording import Recording, State, Tensors
from trainer.certify.reference import Expected, Judged, Reference, norm_of
from trainer.certify.rounding import coefficients
from trainer.certify.tiny_run import UNKNOWN_STEPS, Tiny
from trainer.config import Config
from trainer.engines import Machine
from trainer.models.spec import ModelSpec
from trainer.optim.lr_schedules import schedule_of
from trainer.state import MASTER, WEIGHT
from trainer.supervise.stall import Phase
from trainer.trial.setup import Alone

LEAST_SHARE = 1e-2
"""The share of its layer's largest entry below which a gradient is not measured against its own:
one that is zero by symmetry (a key's bias without rotary positions) is rounding alone."""

BAND = 3.0
"""The factor by which a layout's rounding in low precision may exceed that of one process."""

MOST_STEPS = 200_000
"""The most steps that are compared, in a few seconds."""


Errors = Mapping[str, float]
"""Relative errors, or those allowed, by the name of what is compared."""


def compare(
    small: Tiny,
    spec: ModelSpec,
    recordings: tuple[Recording, Recording],
    machine: Machine,
    options: Sequence[Option],
    edges: Sequence[Edge],
    make_reference: Callable[..., Reference],
) -> tuple[tuple[Finding, ...], Finding | None]:
    """Compare the recordings of all ranks, of the run and of the resumed one, with one process,
    which runs on the first. Collective.

    Returns the worst finding of each check, one for each option, and the first that failed.
    """
    found: list[Finding] = []
    run, resumed = recordings
    ranks = machine.ranks
    machine.watch.at(Phase.FINISHING)

    def one_process() -> tuple[list[Expected], Order]:
        reference = make_reference(small)
        order = Order(reference.order, spec.blocks)
        own = small.own.config
        found.append(compare_initial(run, reference.weights(), order, reference.held))
        found.append(compare_schedule(own, own.trainer.steps or UNKNOWN_STEPS))
        expected = list[Expected]()
        if found[0].error == float("inf"):  # other tensors: nothing else can be compared
            return expected, order
        for one, findings in one_by_one(run, reference, small, edges, order):
            machine.watch.moves()
            expected.append(one)
            found.extend(findings)
        if small.low_precision:
            rounding = share_of_precision(run, expected)
            found.append(compare_option(small.layout.precision, run, rounding))
        for option in options:
            machine.watch.moves()
            without = make_reference(option.without, option.amend)
            seen = share_of(option, run, expected, without)
            found.append(compare_option(option.name, run, seen))
        found.extend(compare_resumed(resumed, run, small.middle, order))
        if run.exported is not None and reference.published is not None:
            opened = reference.published(run.exported)
            found.extend(compare_published(run, opened, reference.held, order))
        if run.rounded is not None:
            projected = reference.projected(run.states[-1], len(run.losses))
            found.extend(compare_rounded(run, *projected))
        return [light(one) for one in expected], order

    expected, order = ranks.on_first(Alone()(one_process))
    for step, one in enumerate(expected):
        found.extend(compare_step(run, step, one, order, ranks.rank))
        if step < small.total:
            so_far = sum(other.targets for other in expected[: step + 1])
            found.append(compare_counts(run, step, one.targets, so_far, ranks.rank))
    findings = [finding for theirs in ranks.gather(found) for finding in theirs]
    sequence = {check: index for index, check in enumerate(TOLERANCES)}
    failures = (finding for finding in findings if not finding.passed)
    first = min(failures, key=lambda f: (f.step, sequence[f.check], f.rank), default=None)
    return worst_of(findings), first


def light(one: Expected) -> Expected:
    """Return what every rank compares with: without the state and the runs in low precision."""
    return replace(one, state={}, rounding=replace(one.rounding, runs=()))


def one_by_one(
    run: Recording, reference: Reference, small: Tiny, edges: Sequence[Edge], order: Order
) -> Iterator[tuple[Expected, list[Finding]]]:
    """Yield what each step is expected to give, and findings on the update that it made."""
    for step, gradients in enumerate(run.gradients):
        if step >= small.total:
            parts = reference.parts_at(edges[step - small.total], step)
            yield reference.computed(step, run.states[step], parts), []
            continue
        one = reference.step(step, run.states[step], gradients, run.norms[step])
        found = list(compare_update(run, step, one, order))
        if step + 1 in run.held_out:
            theirs = reference.held_out(run.states[step + 1])
            found.extend(compare_held_out(run, step, theirs, one))
        yield one, found


def compare_initial(
    run: Recording, weights: Tensors, order: Order, held: Collection[str] = ()
) -> Finding:
    """Compare the initial weights, by float32 masters if any, which must not start rounded.

    Frozen weights, `held`, need no master: they may be kept in 16 bits alone.
    """
    state = run.states[0]
    theirs = {(name, WEIGHT): value for name, value in weights.items()}
    for key in theirs.keys() & {(name, WEIGHT) for name in held} & state.keys():
        theirs[key] = theirs[key].to(state[key].dtype).to(theirs[key].dtype)
    ours = {key: _exact(state, key[0], value) for key, value in state.items() if key[1] == WEIGHT}
    return _states("initial", 0, ours, theirs, order)


def compare_step(
    run: Recording, step: int, one: Expected, order: Order, rank: int
) -> Iterator[Finding]:
    """Compare the loss, every gradient and the norm of a step, as each rank has seen them."""
    norm, rounding = run.norms[step], one.rounding
    if one.overflows:
        if math.isfinite(norm) and not run.skipped[step]:
            yield _wrong("overflow", step, f"(a norm of {norm:.3g})", rank)
        else:
            yield Finding("overflow", step, 0.0, 0.0, "", rank)
        return
    yield compare_outputs(step, run.outputs[step], one, rank)
    most = _tolerance("loss", rounding.loss, one)
    yield Finding("loss", step, _relative(run.losses[step], one.loss), most, "", rank)
    yield compare_gradients(step, run.gradients[step], one, order, rank)
    most = _tolerance("norm", rounding.norm, one)
    yield Finding("norm", step, _relative(norm, one.norm), most, "", rank)
    if run.gradients[step]:  # whatever they are rounded to, the norm is theirs
        own = _relative(norm, norm_of(run.gradients[step]))
        yield Finding("norm", step, own, TOLERANCES["norm"], "(of the run's own gradients)", rank)


def compare_outputs(step: int, ours: Outputs, one: Expected, rank: int) -> Finding:
    """Return the first module, in order of execution, that gives something else."""
    errors, tolerances, bands = dict[str, float](), dict[str, float](), one.rounding.outputs
    usual = sum(bands.values()) / max(len(bands), 1)
    for key, value in ours.items():
        other = one.outputs.get(key)
        if other is not None and value.shape == other.shape:
            label = f"{key[2]}, micro-batch {key[1]}"
            errors[label] = apart(value, other)
            tolerances[label] = _tolerance("output", max(bands.get(key, 0.0), usual), one)
    return _first("output", step, errors, tolerances, errors, rank)


def compare_gradients(step: int, ours: Tensors, one: Expected, order: Order, rank: int) -> Finding:
    """Compare the gradients; the finding is the last wrong one forward, where backward begins.

    A gradient that one side lacks may be zeros on the other.
    """
    every = {**one.gradients, **ours}
    if odd := [n for n in ours.keys() ^ one.gradients.keys() if bool(every[n].any())]:
        last = max(odd, key=order.place)
        return _one_sided("gradient", step, last, last in ours, rank)
    theirs = {name: value for name, value in one.gradients.items() if name in ours}
    of_layer: dict[str, float] = {}
    for name, value in theirs.items():
        layer = order.layer(name)
        of_layer[layer] = max(of_layer.get(layer, 0.0), _largest(value))
    errors, bands = dict[str, float](), dict[str, float]()
    for name, value in theirs.items():
        scale = max(_largest(value), LEAST_SHARE * of_layer[order.layer(name)], 1e-30)
        errors[name] = _apart(ours[name], value) / scale
        bands[name] = one.rounding.gradients.get(name, 0.0) / scale
    usual = sum(bands.values()) / max(len(bands), 1)
    tolerances = {n: _tolerance("gradient", max(band, usual), one) for n, band in bands.items()}
    backward = sorted(errors, key=order.place, reverse=True)
    return _first("gradient", step, errors, tolerances, backward, rank)


def compare_update(run: Recording, step: int, one: Expected, order: Order) -> Iterator[Finding]:
    """Compare the optimizer's state, and each weight's change, beyond its own rounding."""
    before, after = run.states[step], run.states[step + 1]
    if one.overflows:
        kept = {key: after[key] for key in one.state.keys() & after.keys()}
        yield _states("overflow", step, kept, one.state, order)
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
        yield _wrong("update", step, "(skipped: a gradient that is not finite)")
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
    ours = run.targets[step], run.tokens[step]
    if ours == (targets, so_far):
        return Finding("counts", step, 0.0, 0.0, "", rank)
    where = f"({ours[0]} targets, {ours[1]} so far, in place of {targets} and {so_far})"
    return _wrong("counts", step, where, rank)


def compare_held_out(run: Recording, step: int, theirs: Judged, one: Expected) -> Iterator[Finding]:
    ours = run.held_out[step + 1]
    if ours.targets != theirs.targets:
        where = f"({ours.targets} targets in place of {theirs.targets})"
        yield _wrong("held-out loss", step, where)
        return
    rounding = max(one.rounding.loss, theirs.rounding)
    tolerance = _tolerance("held-out loss", rounding, one)
    yield Finding("held-out loss", step, _relative(ours.loss, theirs.loss), tolerance)
    for (name, share), right in zip(ours.measures.items(), theirs.right, strict=True):
        off = max(0.0, abs(share * ours.targets - right) - theirs.unsure - 1e-6) / ours.targets
        where = f"({name} {share:.3g}, {right / ours.targets:.3g} in one process)"
        yield Finding("accuracy", step, off, 0.0, where)


def compare_resumed(
    resumed: Recording, whole: Recording, middle: int, order: Order
) -> Iterator[Finding]:
    """Compare a resumed run with the whole one, bit for bit."""
    yield _states("loaded state", middle, resumed.states[0], whole.states[middle], order)
    ours, theirs = (vars(of.position) | of.position.engine for of in (resumed, whole))
    for name in [name for name in theirs if name != "engine" and ours.get(name) != theirs[name]]:
        where = f"{name} ({ours.get(name)} in place of {theirs[name]})"
        yield _wrong("loaded state", middle, where)
    for index, loss in enumerate(resumed.losses):
        step = middle + index
        expected = whole.losses[step]
        if not (math.isnan(loss) and math.isnan(expected)):  # not where it overflowed in both
            error = 0.0 if loss == expected else _relative(loss, expected)
            yield Finding("resumed loss", step, error, 0.0)
        after = resumed.states[index + 1], whole.states[step + 1]
        yield _states("resumed state", step, *after, order)


def compare_published(
    run: Recording, theirs: Published, held: Collection[str], order: Order
) -> Iterator[Finding]:
    """Compare the adapter that PEFT opens with the one that was trained, and the merged model with
    PEFT's merge: the error beyond the rounding of its dtype, relative to the adapter's effect.
    """
    step, state = len(run.losses), run.states[-1]
    names = {name for name in order.places if name not in held}
    names |= {name for name in {*theirs.adapted, *(of for of, _ in state)} if ".lora_" in name}
    ours = {(n, WEIGHT): state[n, WEIGHT].float() for n in names if (n, WEIGHT) in state}
    shown = {(n, WEIGHT): theirs.adapted[n] for n in names if n in theirs.adapted}
    yield _states("saved adapter", step, ours, shown, order)
    if theirs.ours is None:
        return
    if odd := sorted(theirs.ours.keys() ^ theirs.merged.keys()):
        yield _one_sided("merged", step, odd[0], odd[0] in theirs.ours)
        return
    errors = dict[str, float]()
    for name, value in theirs.merged.items():
        slack = theirs.eps * value.abs()
        beyond = _largest(((theirs.ours[name] - value).abs() - slack).clamp_min(0))
        errors[name] = beyond / max(_largest(value - theirs.base[name]), 1e-30)
    yield _first("merged", step, errors, {}, sorted(errors, key=order.place))


def compare_option(name: str, run: Recording, share: Seen | None) -> Finding:
    """Compare the effect of an option on the run with that on one process."""
    step = len(run.losses) - 1
    if share is None:
        where = f"{name}: not shown, as its effect here is within rounding"
        return Finding(OPTION, step, 0.0, TOLERANCES[OPTION], where)
    place = f" on {share.tensor}" if share.tensor else ""
    where = f"{name}: {share.found:.1%} of its effect{place}"
    return Finding(OPTION, step, abs(share.found - 1), share.allowed, where)


def compare_rounded(run: Recording, exact: list[Tensors], low: list[Tensors]) -> Iterator[Finding]:
    """Project gradients of many rows in low precision, of both, on those in float32.

    The coefficients must agree up to TOLERANCES, or two standard errors of one process; the rest is
    measured by its noise.
    """
    assert run.rounded is not None
    step, rounded = len(run.losses), run.rounded
    (ours, rest), (theirs, noise) = (coefficients(of, exact) for of in (rounded.projected, low))
    apart = abs(statistics.fmean(ours) - statistics.fmean(theirs))
    sure = max(TOLERANCES["projection"], 2 * statistics.stdev(theirs) / len(theirs) ** 0.5)
    yield Finding("projection", step, apart, sure, "(of gradients on those in float32)")
    most = TOLERANCES["rounding"]
    yield Finding("rounding", step, rest / noise, most, "(x that of one process)")
    most = rounded.allowed or TOLERANCES["sum"]
    yield Finding("sum", step, rounded.added, most, rounded.where)


def compare_schedule(own: Config, steps: int) -> Finding:
    """Compare the optimizer settings of each step of the run with DeepSpeed's scheduler."""
    base = float(own.optimizer.params["lr"])
    ours = schedule_of(own.settings)
    optimizer = torch.optim.AdamW([torch.zeros(1)], lr=base)
    theirs = scheduler_of(optimizer, own)
    most = TOLERANCES["schedule"]
    worst = Finding("schedule", 0, 0.0, most, f"(the first {steps:,} steps)")
    for step in range(min(steps, MOST_STEPS)):
        update, [group] = ours(step), optimizer.param_groups
        found = [(update.learning_rate, group["lr"])]
        if update.betas is not None and theirs is not None:
            found += zip(update.betas, group["betas"], strict=True)
        for mine, expected in found:
            error = abs(mine - expected) / max(abs(expected), 1e-6 * base, 1e-30)
            if not error <= worst.error:
                where = f"({mine:.6g} in place of {expected:.6g})"
                worst = Finding("schedule", step, error, most, where)
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
    check: str, step: int, errors: Errors, tolerances: Errors, ranked: Iterable[str], rank: int = 0
) -> Finding:
    """Return the first error that is too large; if none is, the nearest to its tolerance."""
    usual = TOLERANCES[check]
    found = [Finding(check, step, errors[n], tolerances.get(n, usual), n, rank) for n in ranked]
    failed = next((finding for finding in found if not finding.passed), None)
    nothing = Finding(check, step, 0.0, usual, "", rank)
    return failed or max(found, key=lambda finding: finding.severity, default=nothing)


def _tolerance(check: str, band: float, one: Expected) -> float:
    """Return the tolerance; in low precision a multiple of the rounding of one process."""
    return max(TOLERANCES[check], BAND * max(band, one.rounding.least))


def _one_sided(check: str, step: int, name: str, here: bool, rank: int = 0) -> Finding:
    return _wrong(check, step, f"{name} (only {'here' if here else 'in one process'})", rank)


def _wrong(check: str, step: int, where: str, rank: int = 0) -> Finding:
    return Finding(check, step, math.inf, TOLERANCES[check], where, rank)


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
        return math.inf
    return _largest(ours.reshape(theirs.shape).double() - theirs)


def _largest(values: torch.Tensor) -> float:
    return float(values.abs().max()) if values.numel() else 0.0
