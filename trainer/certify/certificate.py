"""`certify` runs the layout and the one process and has them compared; the table and its file."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trainer.certify.cases.language_case import LanguageCase
from trainer.certify.cases.pairs_case import PairsCase, image_case, module_case
from trainer.certify.comparison import compare
from trainer.certify.finding import Finding
from trainer.certify.one_process.options import options_of
from trainer.certify.patches import constant
from trainer.certify.recording import engine_of, record, shared_folder
from trainer.certify.tiny_run import CLIPPED_STEPS, Tiny, clipping
from trainer.engines import Machine
from trainer.parallel import float8
from trainer.parallel.checks import checked
from trainer.run.describe import versions
from trainer.run.subject import Given, ImageSubject, LanguageSubject, Subject, subject_class
from trainer.trial.setup import Alone

Case = LanguageCase | PairsCase
"""A subject to certify, as it is trained in the tiny run."""
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
        run, resumed = record(small, spec, task, sources, machine, folder, case.edges)
        options = options_of(small, case.architecture)
        findings, first = compare(
            small, spec, (run, resumed), machine, options, case.edges, reference
        )
        layout, engine = small.layout.describe(), engine_of(small, machine.device.type)
        if (base := case.base) is not None:
            findings = (base, *findings)
            first = first if base.passed else base
        return Certificate(layout, engine, small.changes, findings, first)


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
