"""The comparison of two traces, its table, and the file that keeps it."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from trainer.describe import versions
from trainer.models import huggingface
from trainer.models.shrink import shrink_model
from trainer.ranks import Ranks
from trainer.verify.shrink import STEPS, Small
from trainer.verify.traces import Tensors, Trace, by_engine, by_one_process

# check -> largest relative error that float32 arithmetic in another order may leave
TOLERANCES = {"loss": 1e-5, "gradient": 1e-4, "norm": 1e-4, "weight": 1e-4, "resumed loss": 0.0, "resumed weight": 0.0}
"""In the order in which a step makes them: the first that fails is where the error is born."""


@dataclass(frozen=True)
class Finding:
    """The largest relative error of one check at one step, and where it is."""

    check: str
    step: int
    error: float
    where: str
    rank: int

    @property
    def passed(self) -> bool:
        return self.error <= TOLERANCES[self.check]  # NaN fails


@dataclass(frozen=True)
class Certificate:
    """Whether a layout trains as one process does; one finding per check, the worst, and the first that failed."""

    layout: str
    engine: str
    changes: tuple[str, ...]
    findings: tuple[Finding, ...]
    first_failure: Finding | None

    @property
    def passed(self) -> bool:
        return self.first_failure is None


def certify(small: Small, ranks: Ranks) -> Certificate:
    """Run both and compare them on every rank. Collective; raises ConfigError where no engine can run the layout."""
    options = small.config.trainer.model
    # a block more than stages: they need not be equal
    architecture = shrink_model(huggingface.read_config(options), layers=max(2, small.layout.stages + 1))
    spec = huggingface.spec_of(architecture, options.model_copy(update={"name_or_path": None}))
    folder = Path(ranks.on_first(lambda: tempfile.mkdtemp(prefix="meshloom-verify-")))
    try:
        trace, resumed = by_engine(small, spec, ranks, folder)
    finally:
        if ranks.first:
            shutil.rmtree(folder, ignore_errors=True)
    mine = list(compare(trace, by_one_process(small, spec), ranks.rank)) + list(
        compare_resumed(resumed, trace, ranks.rank)
    )
    findings = [finding for theirs in ranks.gather(mine) for finding in theirs]
    order = {check: index for index, check in enumerate(TOLERANCES)}
    failures = sorted((f for f in findings if not f.passed), key=lambda f: (f.step, order[f.check], f.rank))
    worst = tuple(max((f for f in findings if f.check == check), key=_severity) for check in TOLERANCES)
    return Certificate(
        small.layout.describe(), small.config.trainer.engine, small.changes, worst, failures[0] if failures else None
    )


def compare(ours: Trace, reference: Trace, rank: int) -> Iterator[Finding]:
    for step in range(STEPS):
        yield Finding("loss", step, _relative(ours.losses[step], reference.losses[step]), "", rank)
        yield _tensors("gradient", step, ours.gradients[step], reference.gradients[step], rank)
        yield Finding("norm", step, _relative(ours.norms[step], reference.norms[step]), "", rank)
        yield _tensors("weight", step, ours.weights[step], reference.weights[step], rank)


def compare_resumed(resumed: Trace, whole: Trace, rank: int) -> Iterator[Finding]:
    for index, step in enumerate(range(STEPS - len(resumed.losses), STEPS)):
        error = _relative(resumed.losses[index], whole.losses[step])
        yield Finding("resumed loss", step, error, "", rank)
        yield _tensors("resumed weight", step, resumed.weights[index], whole.weights[step], rank)


def table(certificate: Certificate) -> str:
    """For a person."""
    lines = [certificate.layout, *(f"  {change}" for change in certificate.changes)]
    lines.append(f"{'check':<16}{'largest relative error':>24}{'tolerance':>11}        step  where")
    for finding in certificate.findings:
        verdict = "ok" if finding.passed else "FAIL"
        numbers = f"{finding.error:>24.1e}{TOLERANCES[finding.check]:>11.0e}"
        lines.append(f"{finding.check:<16}{numbers}  {verdict:<4}  {finding.step:>4}  {finding.where}".rstrip())
    first = certificate.first_failure
    if first is None:
        return "\n".join([*lines, "PASS: trains as one process does"])
    what = f"{first.check} {first.where}".rstrip()
    lines.append(f"FAIL: first apart at step {first.step}, on rank {first.rank}: {what}, by {first.error:.1e}")
    return "\n".join(lines)


def write(certificate: Certificate, path: Path) -> None:
    content: dict[str, Any] = asdict(certificate)
    for finding in content["findings"]:
        finding["tolerance"] = TOLERANCES[finding["check"]]
        finding["error"] = repr(finding["error"])  # JSON has no infinity
    if content["first_failure"]:
        content["first_failure"]["error"] = repr(content["first_failure"]["error"])
    path.write_text(json.dumps({"passed": certificate.passed, "versions": versions(), **content}, indent=2) + "\n")


def _severity(finding: Finding) -> float:
    return float("inf") if finding.error != finding.error else finding.error / max(TOLERANCES[finding.check], 1e-300)


def _relative(ours: float, theirs: float) -> float:
    return abs(ours - theirs) / max(abs(theirs), 1e-12)


def _tensors(check: str, step: int, ours: Tensors, theirs: Tensors, rank: int) -> Finding:
    """The worst tensor, relative to its own largest entry; a name that one side lacks is infinitely wrong."""
    odd = sorted(ours.keys() ^ theirs.keys())
    if odd:
        return Finding(
            check, step, float("inf"), f"{odd[0]} (only {'here' if odd[0] in ours else 'in one process'})", rank
        )
    errors = {name: _error(ours[name], value) for name, value in theirs.items()}
    name = max(errors, key=lambda name: float("inf") if errors[name] != errors[name] else errors[name])
    return Finding(check, step, errors[name], name, rank)


def _error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours.reshape(theirs.shape) - theirs).abs().max() / theirs.abs().max().clamp_min(1e-12))
