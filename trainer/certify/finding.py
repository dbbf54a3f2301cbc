"""A finding of the certificate: the error of a check, and its tolerance."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# check -> largest error allowed: for most, the relative error that float32 arithmetic in another
# order may leave
TOLERANCES = {
    "initial": 0.0,
    "output": 1e-4,
    "loss": 1e-5,
    "gradient": 1e-4,
    "norm": 1e-5,
    "option": 0.1,
    "projection": 1e-3,
    "rounding": 1.5,
    "sum": 1e-5,
    "moment": 2e-5,  # DeepSpeed's Adam on the host has 1 - 0.999 in float32: 1.3e-5 less
    "update": 2e-5,
    "overflow": 0.0,
    "counts": 0.0,
    "schedule": 1e-9,
    "held-out loss": 1e-5,
    "accuracy": 0.0,
    "figures": 1e-5,
    "loaded state": 0.0,
    "resumed loss": 0.0,
    "resumed state": 0.0,
    "saved adapter": 0.0,
    "merged": 1e-3,
}
"""The checks in the order of a step: the first that fails shows where the error arises."""

OPTION = "option"
"""The check that an option is on; the table has a line for each option."""


@dataclass(frozen=True)
class CheckResult:
    """The relative error of one check at one step: the largest, or the first that is too large."""

    check: str
    step: int
    error: float
    tolerance: float
    where: str = ""
    rank: int = 0

    @property
    def passed(self) -> bool:
        return self.error <= self.tolerance  # NaN fails

    @property
    def severity(self) -> float:
        return math.inf if math.isnan(self.error) else self.error / max(self.tolerance, 1e-300)


@dataclass(frozen=True)
class Order:
    """The place of each parameter in the forward pass, and the names of the blocks."""

    places: Mapping[str, int]
    blocks: tuple[str, ...]

    def place(self, name: str) -> tuple[int, str]:
        """Return a sort key; buffers, and tensors that one process lacks, come first."""
        return self.places.get(name, -1), name

    def layer(self, name: str) -> str:
        """Return the block that a parameter is in; all outside the blocks are one layer, ""."""
        return next((block for block in self.blocks if name.startswith(f"{block}.")), "")


def shown_of(findings: Sequence[CheckResult]) -> tuple[CheckResult, ...]:
    """Return a finding of each check, and of each option, in the order of a step.

    It is the first that failed, by step and rank, as that of the verdict is; of a check that
    passed, the worst.
    """
    sequence = list(TOLERANCES)
    shown = dict[tuple[str, str], CheckResult]()
    for finding in sorted(findings, key=lambda finding: sequence.index(finding.check)):
        each = finding.check, finding.where if finding.check == OPTION else ""
        if each not in shown or _comes_before(finding, shown[each]):
            shown[each] = finding
    return tuple(shown.values())


def _comes_before(one: CheckResult, other: CheckResult) -> bool:
    """Return True if `one` is shown for a check in the place of `other`."""
    if one.passed and other.passed:
        return one.severity > other.severity
    if one.passed or other.passed:
        return other.passed
    return (one.step, one.rank) < (other.step, other.rank)
