"""Differences as findings: relative errors, and the tolerances that rounding allows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch

from trainer.certify.finding import TOLERANCES, CheckResult, Order
from trainer.certify.one_process.expected import Expected, largest_value
from trainer.certify.recording import State
from trainer.state import MASTER, WEIGHT

BAND = 3.0
"""The factor by which a layout's rounding may exceed the measured rounding of one process."""

Errors = Mapping[str, float]
"""Relative errors, or tolerances, by the name of what is compared."""


def states_finding(check: str, step: int, ours: State, theirs: State, order: Order) -> CheckResult:
    """Compare tensors, each relative to its largest entry.

    A tensor that only one side has is an infinite error.
    """
    if odd := ours.keys() ^ theirs.keys():
        first = min(odd, key=lambda key: order.place(key[0]))
        return one_sided(check, step, label_of(first), first in ours)
    ranked = sorted(theirs, key=lambda key: order.place(key[0]))
    errors = {
        label_of(key): distance(ours[key], theirs[key]) / max(largest_value(theirs[key]), 1e-30)
        for key in ranked
    }
    return first_finding(check, step, errors, {}, errors)


def first_finding(
    check: str, step: int, errors: Errors, tolerances: Errors, ranked: Iterable[str], rank: int = 0
) -> CheckResult:
    """Return the first error that is too large; if none is, the nearest to its tolerance."""
    usual = TOLERANCES[check]
    results = [
        CheckResult(check, step, errors[n], tolerances.get(n, usual), n, rank) for n in ranked
    ]
    failed = next((finding for finding in results if not finding.passed), None)
    nothing = CheckResult(check, step, 0.0, usual, "", rank)
    return failed or max(results, key=lambda finding: finding.severity, default=nothing)


def tolerance_of(check: str, band: float, one: Expected) -> float:
    """Return a check's tolerance, or BAND times the rounding of one process if that is larger.

    `band` is the rounding of what is compared: relative, and 0 if it was not measured.
    """
    return max(TOLERANCES[check], BAND * max(band, one.rounding.least))


def one_sided(check: str, step: int, name: str, here: bool, rank: int = 0) -> CheckResult:
    """Return the finding of something that only the run (`here`) or only one process has."""
    return wrong(check, step, f"{name} (only {'here' if here else 'in one process'})", rank)


def wrong(check: str, step: int, where: str, rank: int = 0) -> CheckResult:
    return CheckResult(check, step, math.inf, TOLERANCES[check], where, rank)


def exact_value(state: State, name: str, like: torch.Tensor) -> torch.Tensor:
    """Return the weight in float32: the master if there is one; NaN if there is neither."""
    value = state.get((name, MASTER), state.get((name, WEIGHT)))
    return torch.full_like(like, torch.nan) if value is None else value.reshape(like.shape)


def label_of(key: tuple[str, str]) -> str:
    return key[0] if key[1] == WEIGHT else f"{key[0]} ({key[1]})"


def distance(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    if ours.numel() != theirs.numel():
        return math.inf
    return largest_value(ours.reshape(theirs.shape).double() - theirs)
