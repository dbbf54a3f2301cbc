"""The comparison of a whole run: initial values, schedule, options, resumed run, saved adapter."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterator

import torch

from trainer.certify.comparisons.differences import (
    exact_value,
    first_finding,
    one_sided,
    states_finding,
    wrong,
)
from trainer.certify.finding import OPTION, TOLERANCES, CheckResult, Order
from trainer.certify.one_process.expected import largest_value, relative_error
from trainer.certify.one_process.optimizers import scheduler_of
from trainer.certify.one_process.options import ShownEffect
from trainer.certify.parameters import Published
from trainer.certify.recording import Recording, Tensors
from trainer.certify.rounding import coefficients
from trainer.config import Config
from trainer.optim.lr_schedules import schedule_of
from trainer.state import WEIGHT

MOST_STEPS = 200_000
"""The most steps of a schedule that are compared, which takes a few seconds."""


def compare_initial(
    run: Recording, weights: Tensors, order: Order, frozen: Collection[str] = ()
) -> CheckResult:
    """Compare the initial weights in float32: masters, if there are any, must not start rounded.

    The `frozen` weights need no master: they may be kept in 16 bits alone.
    """
    state = run.states[0]
    theirs = {(name, WEIGHT): value for name, value in weights.items()}
    for key in theirs.keys() & {(name, WEIGHT) for name in frozen} & state.keys():
        theirs[key] = theirs[key].to(state[key].dtype).to(theirs[key].dtype)
    ours = {
        key: exact_value(state, key[0], value) for key, value in state.items() if key[1] == WEIGHT
    }
    return states_finding("initial", 0, ours, theirs, order)


def compare_resumed(
    resumed: Recording, whole: Recording, middle: int, order: Order
) -> Iterator[CheckResult]:
    """Compare a run that resumed at step `middle` with the whole run, bit for bit."""
    yield states_finding("loaded state", middle, resumed.states[0], whole.states[middle], order)
    positions = (resumed.written.position, whole.written.position)
    ours, theirs = (vars(position) | position.engine for position in positions)
    for name in [name for name in theirs if name != "engine" and ours.get(name) != theirs[name]]:
        where = f"{name} ({ours.get(name)} in place of {theirs[name]})"
        yield wrong("loaded state", middle, where)
    for index, loss in enumerate(resumed.losses):
        step = middle + index
        expected = whole.losses[step]
        if not (math.isnan(loss) and math.isnan(expected)):  # both overflowed
            error = 0.0 if loss == expected else relative_error(loss, expected)
            yield CheckResult("resumed loss", step, error, 0.0)
        after = resumed.states[index + 1], whole.states[step + 1]
        yield states_finding("resumed state", step, *after, order)


def compare_published(
    run: Recording, theirs: Published, frozen: Collection[str], order: Order
) -> Iterator[CheckResult]:
    """Compare the adapter that PEFT opens with the trained one, and the merged model with PEFT's.

    The merged model's error is what exceeds the rounding of its dtype, relative to the adapter's
    effect.
    """
    step = len(run.losses)
    state = run.states[-1]
    names = {name for name in order.places if name not in frozen}
    names |= {name for name in {*theirs.adapted, *(of for of, _ in state)} if ".lora_" in name}
    ours = {(n, WEIGHT): state[n, WEIGHT].float() for n in names if (n, WEIGHT) in state}
    shown = {(n, WEIGHT): theirs.adapted[n] for n in names if n in theirs.adapted}
    yield states_finding("saved adapter", step, ours, shown, order)
    if theirs.ours is None:
        return
    if odd := sorted(theirs.ours.keys() ^ theirs.merged.keys()):
        yield one_sided("merged", step, odd[0], odd[0] in theirs.ours)
        return
    errors = dict[str, float]()
    for name, value in theirs.merged.items():
        slack = theirs.eps * value.abs()
        beyond = largest_value(((theirs.ours[name] - value).abs() - slack).clamp_min(0))
        errors[name] = beyond / max(largest_value(value - theirs.base[name]), 1e-30)
    yield first_finding("merged", step, errors, {}, sorted(errors, key=order.place))


def compare_option(name: str, run: Recording, shown: ShownEffect | None) -> CheckResult:
    """Compare the effect of an option on the run with that on one process."""
    step = len(run.losses) - 1
    if shown is None:
        where = f"{name}: not shown, as its effect here is within rounding"
        return CheckResult(OPTION, step, 0.0, TOLERANCES[OPTION], where)
    place = f" on {shown.tensor}" if shown.tensor else ""
    where = f"{name}: {shown.share:.1%} of its effect{place}"
    return CheckResult(OPTION, step, abs(shown.share - 1), shown.allowed, where)


def compare_rounded(
    run: Recording, exact: list[Tensors], low: list[Tensors]
) -> Iterator[CheckResult]:
    """Compare the run's gradients of many sequences in low precision with those of one process.

    `exact` and `low` are one process's gradients in float32 and in low precision. Those of the run
    and `low` are projected on `exact`: the mean coefficients must agree up to TOLERANCES, or two
    standard errors of one process, and the residuals' norms are compared.
    """
    assert run.rounded is not None
    step = len(run.losses)
    rounded = run.rounded
    (ours, rest), (theirs, noise) = (coefficients(of, exact) for of in (rounded.projected, low))
    apart = abs(statistics.fmean(ours) - statistics.fmean(theirs))
    sure = max(TOLERANCES["projection"], 2 * statistics.stdev(theirs) / len(theirs) ** 0.5)
    yield CheckResult("projection", step, apart, sure, "(of gradients on those in float32)")
    most = TOLERANCES["rounding"]
    yield CheckResult("rounding", step, rest / noise, most, "(x that of one process)")
    most = rounded.allowed or TOLERANCES["sum"]
    yield CheckResult("sum", step, rounded.added, most, rounded.where)


def compare_schedule(own: Config, steps: int) -> CheckResult:
    """Compare each step's learning rate and betas with DeepSpeed's or transformers' scheduler."""
    base = float(own.optimizer.params["lr"])
    ours = schedule_of(own.settings)
    optimizer = torch.optim.AdamW([torch.zeros(1)], lr=base)
    theirs = scheduler_of(optimizer, own)
    most = TOLERANCES["schedule"]
    worst = CheckResult("schedule", 0, 0.0, most, f"(the first {steps:,} steps)")
    for step in range(min(steps, MOST_STEPS)):
        update, [group] = ours(step), optimizer.param_groups
        rates = [(update.learning_rate, group["lr"])]
        if update.betas is not None and theirs is not None:
            rates += zip(update.betas, group["betas"], strict=True)
        for mine, expected in rates:
            error = abs(mine - expected) / max(abs(expected), 1e-6 * base, 1e-30)
            if not error <= worst.error:
                where = f"({mine:.6g} in place of {expected:.6g})"
                worst = CheckResult("schedule", step, error, most, where)
        if not worst.passed:
            return worst
        if theirs is not None:
            theirs.step()
    return worst
