"""`certify` runs the layout and the one process and has them compared; the table and its file."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from trainer.certify.comparison import (
    TOLERANCES,
    Finding,
    Order,
    compare_counts,
    compare_held_out,
    compare_initial,
    compare_resumed,
    compare_rounded,
    compare_schedule,
    compare_step,
    compare_update,
)
from trainer.certify.language_case import LanguageCase
from trainer.certify.pairs_case import image_case, module_case
from trainer.certify.patches import constant
from trainer.certify.recording import Recording, Sources, engine_of, record, shared_folder
from trainer.certify.reference import Expected, Reference
from trainer.certify.text_reference import LanguageReference
from trainer.certify.tiny_run import CLIPPED_STEPS, UNKNOWN_STEPS, Tiny, clipping
from trainer.engines import Machine
from trainer.models.spec import ModelSpec
from trainer.parallel import float8
from trainer.parallel.checks import checked
from trainer.run.describe import versions
from trainer.run.subject import Given, ImageSubject, LanguageSubject, Subject, subject_class
from trainer.supervise.phase import Phase
from trainer.trial.setup import Alone


class Case(Protocol):
    """A subject to certify, as it is trained in the tiny run."""

    small: Tiny
    subject: Subject

    def rehearse(self, spec: ModelSpec) -> tuple[Sources, Callable[[Tiny], Reference]]:
        """Return the samples of the run, and what makes the one process that trains on them.

        `spec` is the subject's, once it was checked. Collective.
        """


CASES: dict[type[Subject], Callable[[Tiny, Given, Machine, Path], Case]] = {
    LanguageSubject: LanguageCase,
    ImageSubject: image_case,
    Subject: module_case,
}


@dataclass(frozen=True)
class Certificate:
    """The worst finding of each check, and the first that failed."""

    layout: str
    engine: str
    changes: tuple[str, ...]
    findings: tuple[Finding, ...]
    first_failure: Finding | None

    @property
    def passed(self) -> bool:
        return self.first_failure is None


def certify(small: Tiny, machine: Machine, given: Given | None = None) -> Certificate:
    """Certify what the config names, on made-up samples, or what a script hands in. Collective.

    Raises ConfigError if no engine can run the layout, and ConfigError or DataError for an unfit
    model or data.
    """
    section, ranks = small.config.trainer, machine.ranks
    given = Given.by_task(section, given)
    with shared_folder(ranks) as folder, constant(float8, "LEAST", float8.MULTIPLE):
        kind = CASES[subject_class(section, given)]
        case = kind(small, given or Given(), machine, folder)
        small, subject = case.small, case.subject
        spec, _ = checked(subject.spec, subject.task, small.layout, ranks, subject.packed)
        sources, reference = case.rehearse(spec)
        norms = ranks.on_first(Alone()(lambda: reference(small).norms(CLIPPED_STEPS)))
        small = clipping(small, norms)
        task = subject.trained(spec, small.config.trainer).task
        run, resumed = record(small, spec, task, sources, machine, folder)
        return compare(small, spec, run, resumed, machine, lambda: reference(small))


def compare(
    small: Tiny,
    spec: ModelSpec,
    run: Recording,
    resumed: Recording,
    machine: Machine,
    make_reference: Callable[[], Reference],
) -> Certificate:
    """Compare the recordings of all ranks with one process, which runs on the first. Collective."""
    found: list[Finding] = []
    ranks = machine.ranks
    machine.watch.at(Phase.FINISHING)

    def one_process() -> tuple[list[Expected], Order]:
        reference = make_reference()
        order = Order(reference.order, spec.blocks)
        own = small.own.config
        found.append(compare_initial(run, reference.weights(), order, reference.held))
        found.append(compare_schedule(own, own.trainer.steps or UNKNOWN_STEPS))
        expected = list[Expected]()
        if found[0].error == float("inf"):  # other tensors: nothing else can be compared
            return expected, order
        for step, gradients in enumerate(run.gradients):
            machine.watch.moves()
            expected.append(reference.step(step, run.states[step], gradients, run.norms[step]))
            found.extend(compare_update(run, step, expected[-1], order))
            if step + 1 in run.held_out:
                theirs = reference.held_out(run.states[step + 1])
                found.extend(compare_held_out(run, step, theirs, expected[-1]))
        found.extend(compare_resumed(resumed, run, small.middle, order))
        if run.rounded is not None and isinstance(reference, LanguageReference):
            projected = reference.projected(run.states[-1], len(run.losses))
            found.extend(compare_rounded(run, *projected))
        return [replace(one, state={}) for one in expected], order

    expected, order = ranks.on_first(Alone()(one_process))
    for step, one in enumerate(expected):
        found.extend(compare_step(run, step, one, order, ranks.rank))
        so_far = sum(other.targets for other in expected[: step + 1])
        found.append(compare_counts(run, step, one.targets, so_far, ranks.rank))
    findings = [finding for theirs in ranks.gather(found) for finding in theirs]
    sequence = {check: index for index, check in enumerate(TOLERANCES)}
    failures = (finding for finding in findings if not finding.passed)
    first = min(failures, key=lambda f: (f.step, sequence[f.check], f.rank), default=None)
    of_check = [[f for f in findings if f.check == check] for check in TOLERANCES]
    worst = tuple(max(some, key=lambda f: f.severity) for some in of_check if some)
    engine = engine_of(small, machine.device.type)
    return Certificate(small.layout.describe(), engine, small.changes, worst, first)


def table(certificate: Certificate) -> str:
    """Format the certificate as a table for the user."""
    lines = [f"{certificate.layout} (engine {certificate.engine})"]
    lines += [f"  {change}" for change in certificate.changes]
    lines.append(f"{'check':<16}{'largest relative error':>24}{'tolerance':>11}        step  where")
    for finding in certificate.findings:
        verdict = "ok" if finding.passed else "FAIL"
        numbers = f"{finding.error:>24.1e}{finding.tolerance:>11.0e}"
        row = f"{finding.check:<16}{numbers}  {verdict:<4}  {finding.step:>4}  {finding.where}"
        lines.append(row.rstrip())
    if (first := certificate.first_failure) is None:
        return "\n".join([*lines, "PASS: trains as one process does"])
    what = f"{first.check} {first.where}".rstrip()
    failed = f"FAIL: first differs at step {first.step}, on rank {first.rank}: {what}"
    return "\n".join([*lines, f"{failed}, by {first.error:.1e}"])


def write(certificate: Certificate, path: Path, config: Any) -> None:
    """Write the certificate as JSON, with the config as it was given, for which it was made."""
    content: dict[str, Any] = asdict(certificate)
    for finding in (*content["findings"], content["first_failure"] or {}):
        finding["error"] = repr(finding.get("error"))  # JSON has no infinity
    content = {"passed": certificate.passed, "versions": versions(), "config": config, **content}
    path.write_text(json.dumps(content, indent=2) + "\n")
