"""The comparison of a run with one process, its table, and its file."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from trainer.certify import samples
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
from trainer.certify.packed import CHANGE, PackedReference, check_nothing_drawn, without_dropout
from trainer.certify.parameters import initial, learner, opened, write_base
from trainer.certify.recording import Recording, Sources, engine_of, record, shared_folder
from trainer.certify.reference import Expected, Reference
from trainer.certify.samples import Documents
from trainer.certify.tiny_run import CLIPPED_STEPS, UNKNOWN_STEPS, Tiny, clipping
from trainer.config import TrainerSection
from trainer.data.text.token_files import PreparedSource
from trainer.engines import Machine
from trainer.models import huggingface
from trainer.models.spec import ModelSpec, TinyCopies
from trainer.parallel.checks import checked
from trainer.run.describe import versions
from trainer.run.subject import amended
from trainer.supervise.phase import Phase
from trainer.tasks.causal_lm import CausalLM
from trainer.trial.setup import Alone


@dataclass(frozen=True)
class Certificate:
    """The result of a comparison: a finding for each check, the worst, and the first that
    failed.
    """

    layout: str
    engine: str
    changes: tuple[str, ...]
    findings: tuple[Finding, ...]
    first_failure: Finding | None

    @property
    def passed(self) -> bool:
        return self.first_failure is None


def certify(small: Tiny, machine: Machine) -> Certificate:
    """Certify the config's language model, on a tiny copy and made-up documents.

    Collective; raises ConfigError if no engine can run the layout.
    """
    section, ranks = small.config.trainer, machine.ranks
    options, packed = section.model, section.data.packs
    architecture = huggingface.read_config(options)
    if packed:
        architecture, section = without_dropout(architecture, section)
        small = replace(small, changes=(*small.changes, CHANGE))
    plain = huggingface.spec_of(architecture, options.model_copy(update={"name_or_path": None}))
    small, copy = samples.with_copy(small, plain, packed)
    with shared_folder(ranks) as folder:
        made_up = options.name_or_path or section.adapter or small.layout.precision != "float32"
        base = folder / "base" if made_up else None
        if base is not None:
            ranks.on_first(lambda: write_base(copy, base))
            run = options.model_copy(update={"name_or_path": str(base)})  # opened as a run does
            copy = replace(copy, weights=huggingface.weights_of(copy.build(), run)[0])
        return _certified(small, section, (plain, copy), base, machine, folder)


def _certified(
    small: Tiny,
    section: TrainerSection,
    copied: tuple[ModelSpec, ModelSpec],
    base: Path | None,
    machine: Machine,
    folder: Path,
) -> Certificate:
    """Certify a model by its tiny copy; `copied` has both, without the config's changes."""
    (plain, copy), ranks, packed = copied, machine.ranks, section.data.packs
    whole = amended(replace(plain, tiny=TinyCopies(copy=lambda *_: copy)), section, ranks)
    assert whole.tiny.copy is not None
    spec = whole.tiny.copy(len(copy.blocks), small.layout.tensor)
    lacking = (f"the tiny copy lacks {what}: it proves less" for what in spec.tiny.lacks)
    small = replace(small, changes=(*small.changes, *lacking))
    task = CausalLM.of(spec)
    spec, _ = checked(spec, task, small.layout, ranks, packed)
    if packed:
        check_nothing_drawn(spec, ranks)

    def reference(small: Tiny, documents: Documents) -> Reference:
        model = initial(copy, section.seed) if base is None else opened(base, section.model)
        own = learner(model, section, copied)
        return (PackedReference if packed else Reference)(
            small, spec, own, documents, machine.device
        )

    def rehearsed() -> tuple[Documents, list[float]]:
        drawn = samples.documents_of(small, spec.language.vocabulary, packed)
        model = reference(small, drawn)
        documents = drawn._replace(held_out=model.continued(drawn.held_out))
        samples.write(documents, small.row, folder, packed)
        return documents, model.norms(CLIPPED_STEPS)

    documents, norms = ranks.on_first(rehearsed)
    clipped = clipping(small, norms)
    sources = Sources(PreparedSource(folder / "training"), PreparedSource(folder / "held_out"))
    trained = task.regularised(spec, section.label_smoothing, section.neftune_alpha)
    run, resumed = record(clipped, spec, trained, sources, machine, folder)
    return compare(clipped, spec, run, resumed, machine, lambda: reference(clipped, documents))


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
        found.append(compare_initial(run, reference.weights(), order, reference.held))
        expected = list[Expected]()
        found.append(
            compare_schedule(small.own.config, small.own.config.trainer.steps or UNKNOWN_STEPS)
        )
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
        if run.rounded is not None:
            found.extend(
                compare_rounded(run, *reference.projected(run.states[-1], len(run.losses)))
            )
        return [replace(one, state={}) for one in expected], order

    expected, order = ranks.on_first(Alone()(one_process))
    for step, one in enumerate(expected):
        found.extend(compare_step(run, step, one, order, ranks.rank))
        so_far = sum(other.targets for other in expected[: step + 1])
        found.append(compare_counts(run, step, one.targets, so_far, ranks.rank))
    findings = [finding for theirs in ranks.gather(found) for finding in theirs]
    sequence = {check: index for index, check in enumerate(TOLERANCES)}
    failures = sorted(
        (f for f in findings if not f.passed), key=lambda f: (f.step, sequence[f.check], f.rank)
    )
    of_check = [[f for f in findings if f.check == check] for check in TOLERANCES]
    worst = tuple(max(some, key=lambda f: f.severity) for some in of_check if some)
    return Certificate(
        small.layout.describe(),
        engine_of(small, machine.device.type),
        small.changes,
        worst,
        failures[0] if failures else None,
    )


def table(certificate: Certificate) -> str:
    """Format the certificate as a table for the user."""
    lines = [
        f"{certificate.layout} (engine {certificate.engine})",
        *(f"  {change}" for change in certificate.changes),
    ]
    lines.append(f"{'check':<16}{'largest relative error':>24}{'tolerance':>11}        step  where")
    for finding in certificate.findings:
        verdict = "ok" if finding.passed else "FAIL"
        numbers = f"{finding.error:>24.1e}{finding.tolerance:>11.0e}"
        row = f"{finding.check:<16}{numbers}  {verdict:<4}  {finding.step:>4}  {finding.where}"
        lines.append(row.rstrip())
    first = certificate.first_failure
    if first is None:
        return "\n".join([*lines, "PASS: trains as one process does"])
    what = f"{first.check} {first.where}".rstrip()
    lines.append(
        f"FAIL: first apart at step {first.step}, on rank {first.rank}: {what}, by "
        f"{first.error:.1e}"
    )
    return "\n".join(lines)


def write(certificate: Certificate, path: Path) -> None:
    content: dict[str, Any] = asdict(certificate)
    for finding in (*content["findings"], content["first_failure"] or {}):
        finding["error"] = repr(finding.get("error"))  # JSON has no infinity
    path.write_text(
        json.dumps({"passed": certificate.passed, "versions": versions(), **content}, indent=2)
        + "\n"
    )
