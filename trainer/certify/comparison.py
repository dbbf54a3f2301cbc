"""The checks: a run against one process, a finding for each check and step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from trainer.certify.case import MakeReference
from trainer.certify.comparisons.runs import (
    compare_initial,
    compare_option,
    compare_published,
    compare_resumed,
    compare_rounded,
    compare_schedule,
)
from trainer.certify.comparisons.steps import (
    compare_counts,
    compare_held_out,
    compare_step,
    compare_update,
)
from trainer.certify.finding import TOLERANCES, CheckResult, Order, shown_of
from trainer.certify.one_process.edges import Edge
from trainer.certify.one_process.expected import Expected, MicroBatch
from trainer.certify.one_process.options import Option, share_of, share_of_precision
from trainer.certify.recording import Recording
from trainer.certify.reference import Reference
from trainer.certify.tiny_run import UNKNOWN_STEPS, Tiny
from trainer.engines import Machine
from trainer.models.spec import ModelSpec
from trainer.probes.dispatch_modes import Alone
from trainer.supervise.stall import Phase

UNSURE = 1e-2
"""The relative error below which a difference may be float32's rounding, which is then measured."""


@dataclass(frozen=True)
class Comparison:
    """A tiny run, and the one process with which it is compared."""

    small: Tiny
    spec: ModelSpec
    machine: Machine
    options: Sequence[Option]
    """The options that are on, each of which must show in the run."""
    edges: Sequence[Edge]
    make: MakeReference

    def findings(
        self, run: Recording, resumed: Recording
    ) -> tuple[tuple[CheckResult, ...], CheckResult | None]:
        """Compare every rank's recordings of the run and of the resumed run with one process.

        Collective; the first rank runs the one process. Returns a finding of each check and
        each option, as `shown_of` does, and the first that failed, or None.
        """
        ranks = self.machine.ranks
        self.machine.watch.at(Phase.FINISHING)
        results: list[CheckResult] = []  # filled on the first rank alone
        expected, order = ranks.on_first(Alone()(lambda: self._one_process(run, resumed, results)))
        steps = self._steps(run, expected, order)
        if unsure := self._unsure(steps):
            expected = ranks.on_first(Alone()(lambda: self._with_rounding(run, expected, unsure)))
            steps = self._steps(run, expected, order)
        findings = [finding for theirs in ranks.gather(results + steps) for finding in theirs]
        sequence = {check: index for index, check in enumerate(TOLERANCES)}
        failures = (finding for finding in findings if not finding.passed)
        first = min(failures, key=lambda f: (f.step, sequence[f.check], f.rank), default=None)
        return shown_of(findings), first

    def _steps(self, run: Recording, expected: list[Expected], order: Order) -> list[CheckResult]:
        """Compare each step as this rank recorded it."""
        rank = self.machine.ranks.rank
        results: list[CheckResult] = []
        for step, one in enumerate(expected):
            results.extend(compare_step(run, step, one, order, rank))
            if step < self.small.total:
                so_far = sum(other.targets for other in expected[: step + 1])
                results.append(compare_counts(run, step, one.targets, so_far, rank))
        return results

    def _unsure(self, results: list[CheckResult]) -> set[int]:
        """Return the steps whose errors on some rank may be the rounding of float32. Collective."""
        layout = self.small.layout
        if self.small.low_precision or layout.float8 != "none":
            return set()  # their rounding is measured in every step
        own = {result.step for result in results if not result.passed and result.error < UNSURE}
        return set().union(*self.machine.ranks.gather(own))

    def _with_rounding(
        self, run: Recording, expected: list[Expected], unsure: set[int]
    ) -> list[Expected]:
        """Return `expected`, with the rounding of one process measured in the `unsure` steps."""
        reference = self.make(self.small)
        measured = list(expected)
        for step in unsure:
            self.machine.watch.moves()
            parts = micro_batches_of(reference, self.small, self.edges, step)
            rounding = reference.rounding_of_float32(step, run.states[step], parts)
            measured[step] = replace(expected[step], rounding=rounding)
        return [light(one) for one in measured]

    def _one_process(
        self, run: Recording, resumed: Recording, results: list[CheckResult]
    ) -> tuple[list[Expected], Order]:
        """Add findings on the whole run to `results`; return what is expected of each step."""
        small = self.small
        reference = self.make(small)
        order = Order(reference.order, self.spec.blocks)
        own = small.own.config
        results.append(compare_initial(run, reference.weights(), order, reference.frozen))
        results.append(compare_schedule(own, own.trainer.steps or UNKNOWN_STEPS))
        expected = list[Expected]()
        if results[0].error == float("inf"):  # other tensors: nothing else can be compared
            return expected, order
        for one, findings in one_by_one(run, reference, small, self.edges, order):
            self.machine.watch.moves()
            expected.append(one)
            results.extend(findings)
        results.extend(self._of_options(run, expected))
        results.extend(compare_resumed(resumed, run, small.middle, order))
        if run.written.exported is not None and reference.published is not None:
            opened = reference.published(run.written.exported)
            results.extend(compare_published(run, opened, reference.frozen, order))
        if run.rounded is not None:
            projected = reference.projected(run.states[-1], len(run.losses))
            results.extend(compare_rounded(run, *projected))
        return [light(one) for one in expected], order

    def _of_options(self, run: Recording, expected: list[Expected]) -> Iterator[CheckResult]:
        """Yield a finding for the run's precision, if it is low, and for each option."""
        if self.small.low_precision:
            rounding = share_of_precision(run, expected)
            yield compare_option(self.small.layout.precision, run, rounding)
        for option in self.options:
            self.machine.watch.moves()
            without = self.make(option.without, option.amend)
            share = share_of(option, run, expected, without)
            yield compare_option(option.name, run, share)


def light(one: Expected) -> Expected:
    """Return the part that every rank needs: without the state and the gradients of repetitions."""
    return replace(one, state={}, rounding=replace(one.rounding, runs=()))


def micro_batches_of(
    reference: Reference, small: Tiny, edges: Sequence[Edge], step: int
) -> list[MicroBatch]:
    """Return all micro-batches of a step; the steps after the run's last are those of `edges`."""
    if step < small.total:
        return reference.whole_step(step)
    return reference.parts_at(edges[step - small.total], step)


def one_by_one(
    run: Recording, reference: Reference, small: Tiny, edges: Sequence[Edge], order: Order
) -> Iterator[tuple[Expected, list[CheckResult]]]:
    """Yield what is expected of each step, with findings on its update and its evaluation."""
    for step, gradients in enumerate(run.gradients):
        if step >= small.total:
            parts = micro_batches_of(reference, small, edges, step)
            yield reference.computed(step, run.states[step], parts), []
            continue
        one = reference.step(step, run.states[step], gradients, run.norms[step])
        findings = list(compare_update(run, step, one, order))
        if step + 1 in run.held_out:
            theirs = reference.held_out(run.states[step + 1])
            findings.extend(compare_held_out(run, step, theirs, one))
        yield one, findings
