"""`certify` runs a layout and one process, and compares them; the result as a table and a file."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from trainer.certify.case import Case, Certified
from trainer.certify.comparison import Comparison
from trainer.certify.finding import CheckResult
from trainer.certify.patches import constant
from trainer.certify.recording import record
from trainer.certify.tiny_run import CLIPPED_STEPS, Tiny, clipping
from trainer.config import TrainerSection
from trainer.distributed.ranks import Ranks
from trainer.engines import Machine
from trainer.errors import ConfigError, Problem
from trainer.models.finetuning.changed import changed_spec
from trainer.parallel import float8
from trainer.parallel.checks import answers, checked
from trainer.probes.answers import Answer
from trainer.probes.dispatch_modes import Alone
from trainer.probes.question import Probed
from trainer.recipe import HandedIn, of_recipe, recipe_of
from trainer.run.describe import versions
from trainer.storage import Json
from trainer.supervise.output import Signs
from trainer.supervise.stall import Phase

WIDTH = 52
"""The width of the column of questions, in characters."""


@dataclass(frozen=True)
class Certificate:
    """A finding of each check, and the first that failed.

    A check that failed is shown by its first finding that is too large, any other by its worst.
    """

    layout: str
    engine: str
    changes: tuple[str, ...]
    findings: tuple[CheckResult, ...]
    first_failure: CheckResult | None
    probes: tuple[Answer, ...] = ()
    """The answer to each question that a model is asked before it is trained."""

    @property
    def passed(self) -> bool:
        return self.first_failure is None

    def __str__(self) -> str:
        return table(self)


def certify(small: Tiny, machine: Machine, handed_in: HandedIn | None = None) -> Certificate:
    """Certify a layout for the model that the config names, or a script hands in. Collective.

    Raises ConfigError if no engine can run the layout, and ConfigError or DataError for an unfit
    model or data.
    """
    section = small.config.trainer
    ranks = machine.ranks
    signs = machine.signs
    machine = replace(machine, signs=Signs())  # a run's own phases would hide these
    handed_in = HandedIn.by_task(section, handed_in)
    with shared_folder(ranks) as folder, constant(float8, "LEAST", float8.MULTIPLE):
        case = _case_of(section, handed_in, small, machine, folder)
        small = case.small
        subject = case.subject
        subject = replace(subject, spec=changed_spec(subject.spec, section, ranks))
        spec, _ = checked(subject.spec, subject.probed, small.layout, ranks, subject.packed)
        sources, reference = case.rehearse(spec)
        norms = ranks.on_first(Alone()(lambda: reference(small).norms(CLIPPED_STEPS)))
        small = clipping(small, norms)
        # a copy, because an engine sets this rank's place in the task itself
        about = Probed(subject.spec, copy(subject.probed), small.layout, packed=subject.packed)
        trained = subject.trained(spec, small.config.trainer)
        signs.at("training some steps of a small copy under the layout")
        recorded = record(small, trained, sources, machine, folder, case.edges)
        answered = _answers(about, machine)
        options = case.options(small)
        signs.at("computing the same steps in one process, and comparing them")
        comparison = Comparison(small, spec, machine, options, case.edges, reference)
        findings, first = comparison.findings(recorded.whole, recorded.resumed)
        layout = small.layout.describe()
        if (base := case.base) is not None:
            findings = (base, *findings)
            first = first if base.passed else base
        probes = ranks.send(ranks.world_size - 1, answered)
        return Certificate(layout, recorded.engine_name, small.changes, findings, first, probes)


def _answers(about: Probed, machine: Machine) -> tuple[Answer, ...]:
    """Answer all questions on the last rank, while the first runs one process; else return none."""
    if machine.ranks.rank < machine.ranks.world_size - 1:
        return ()
    machine.watch.at(Phase.FINISHING)
    return answers(about, machine.watch.moves)


def _case_of(
    section: TrainerSection,
    handed_in: HandedIn | None,
    small: Tiny,
    machine: Machine,
    folder: Path,
) -> Case:
    """Make the case of the config's recipe. Raises ConfigError for a recipe without one."""
    recipe = recipe_of(section, handed_in)
    if not isinstance(recipe, Certified):
        actual = f"{section.task}, whose recipe brings no certificate"
        raise ConfigError(Problem("trainer.task", actual, "a recipe with a `case`"))
    with of_recipe(section.task):
        case = recipe.case(small, handed_in or HandedIn(), machine, folder)
        if (other := small.with_blocks(case.subject.spec.blocks)) is not small:
            case = recipe.case(other, handed_in or HandedIn(), machine, folder)
        return case


def table(certificate: Certificate) -> str:
    """Format the certificate as a table for the user."""
    lines = [f"{certificate.layout} (engine {certificate.engine})"]
    lines += [f"  {change}" for change in certificate.changes]
    lines.append(f"{'check':<16}{'relative error':>24}{'tolerance':>11}        step  where")
    for finding in certificate.findings:
        verdict = "ok" if finding.passed else "FAIL"
        numbers = f"{finding.error:>24.1e}{finding.tolerance:>11.0e}"
        row = f"{finding.check:<16}{numbers}  {verdict:<4}  {finding.step:>4}  {finding.where}"
        lines.append(row.rstrip())
    lines += _of_probes(certificate.probes)
    if (first := certificate.first_failure) is None:
        return "\n".join([*lines, "PASS: trains as one process does"])
    what = f"{first.check} {first.where}".rstrip()
    failed = f"FAIL: first differs at step {first.step}, on rank {first.rank}: {what}"
    return "\n".join([*lines, f"{failed}, by {first.error:.1e}"])


def _of_probes(probes: Sequence[Answer]) -> Iterator[str]:
    """Yield a line for each question, under a heading."""
    if not probes:
        return
    yield f"{'probe, on a tiny copy of the model':<{WIDTH}}answer"
    for one in probes:
        yield f"{one.question:<{WIDTH}}{one.answer:<6}{one}".rstrip()


def write(certificate: Certificate, path: Path, config: object) -> None:
    """Write the certificate as JSON, with versions and the config as it was given."""
    content: Json = asdict(certificate)
    for finding in (*content["findings"], content["first_failure"] or {}):
        finding["error"] = repr(finding.get("error"))  # JSON has no infinity
    content = {"passed": certificate.passed, "versions": versions(), "config": config, **content}
    path.write_text(json.dumps(content, indent=2) + "\n")


@contextmanager
def shared_folder(ranks: Ranks) -> Iterator[Path]:
    """Make a temporary folder on the first rank, and remove it at the end. Collective."""
    folder = Path(ranks.on_first(lambda: tempfile.mkdtemp(prefix="meshloom-verify-")))
    try:
        yield folder
    finally:
        if ranks.first:
            shutil.rmtree(folder, ignore_errors=True)
