"""The model at the end of a run: exported, merged, and shown to the user."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from trainer import checkpoint
from trainer.config.sections.trainer import TrainerSection
from trainer.distributed.ranks import Ranks
from trainer.engines import Engine
from trainer.models.spec import exported, given_tensors, stored
from trainer.recipe import Subject
from trainer.run.start.folder import FINAL
from trainer.state import StateTensor

MERGED = "final-merged"


def export(
    subject: Subject,
    engine: Engine,
    folder: Path,
    ranks: Ranks,
    form: checkpoint.ModelForm,
    merges: bool = True,
) -> None:
    """Write the trained model to `final/`; an adapter merged, to `final-merged/`. Collective."""
    spec = subject.spec
    final = folder / FINAL
    _write(subject, stored(spec, engine.state_tensors()), final, ranks, form)
    if merges and spec.files.merged is not None:
        merged = replace(subject, spec=spec.files.merged(final))
        form = checkpoint.ModelForm(form.dtype, hash=form.hash)
        _write(merged, given_tensors(merged.spec, ranks), folder / MERGED, ranks, form)


def _write(
    subject: Subject,
    entries: Sequence[StateTensor],
    folder: Path,
    ranks: Ranks,
    form: checkpoint.ModelForm,
) -> None:
    """Write tensors and files as the base's folder has them. Collective."""
    spec = subject.spec
    whole = replace(subject, spec=replace(spec, files=spec.files.exported()))
    model = checkpoint.ModelFolder(partial(whole.save, dtype=form.dtype), form)
    checkpoint.export(folder, exported(spec, entries, ranks), model, ranks)


def show(
    subject: Subject, section: TrainerSection, folder: Path, say: Callable[[str], None]
) -> None:
    """Show a sample of the trained model, and say where it is."""
    if (text := subject.example(folder / FINAL, section)) is not None:
        say("sample  " + "\n        ".join(text.splitlines()))
    say(f"done: {folder / FINAL} opens with {subject.spec.files.exported().opens}")
    if subject.spec.files.merged is not None:
        merged = subject.spec.files.merged(folder / FINAL)
        say(f"merged: {folder / MERGED} opens with {merged.files.exported().opens}")
