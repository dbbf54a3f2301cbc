"""The findings that a certificate shows: the worst of a check, or the first that failed."""

from __future__ import annotations

import math

from trainer.certify.finding import CheckResult, shown_of


def test_a_check_that_failed_is_shown_by_its_first_failure():
    first = CheckResult("gradient", 1, 0.5, 1e-4, "first", rank=1)
    findings = [
        CheckResult("gradient", 0, 1e-9, 1e-4, "exact"),
        CheckResult("gradient", 2, 9.0, 1e-4, "larger"),
        CheckResult("gradient", 1, 3.0, 1e-4, "of a later rank", rank=2),
        first,
        CheckResult("loss", 3, math.nan, 1e-5, "later"),
        CheckResult("loss", 2, 1.0, 1e-5, "first"),
    ]
    for order in (findings, findings[::-1]):
        assert [one.where for one in shown_of(order)] == ["first", "first"]
        assert first in shown_of(order)


def test_a_check_that_passed_is_shown_by_its_worst_finding():
    findings = [CheckResult("loss", step, 1e-9 * step, 1e-5) for step in (1, 3, 2)]
    assert shown_of(findings) == (findings[1],)
