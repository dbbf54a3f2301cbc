"""The model at the end of a run: exported, merged, and shown to the user."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from trainer import checkpoint
from trainer.config.sections.trainer import TrainerSection
from trainer.distributed.ranks import Ranks
from trainer.engines import Engine
from trainer.models.spec import given_tensors, stored
from trainer.recipe import Subject
from trainer.run.start.folder import FINAL

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
    entries = stored(spec, engine.state_tensors())
    model = checkpoint.ModelFolder(partial(subject.save, dtype=form.dtype), form)
    checkpoint.export(final, entries, model, ranks)
    if merges and spec.files.merged is not None:
        merged = spec.files.merged(final)
        files = partial(replace(subject, spec=merged).save, dtype=form.dtype)
        entries = given_tensors(merged, ranks)
        form = checkpoint.ModelForm(form.dtype, hash=form.hash)
        checkpoint.export(folder / MERGED, entries, checkpoint.ModelFolder(files, form), ranks)


def show(
    subject: Subject, section: TrainerSection, folder: Path, say: Callable[[str], None]
) -> None:
    """Show a sample of the trained model, and say where it is."""
    if (text := subject.example(folder / FINAL, section)) is not None:
        say("sample  " + "\n        ".join(text.splitlines()))
    say(f"done: {folder / FINAL} opens with {subject.spec.files.opens}")
    if subject.spec.files.merged is not None:
        say(f"merged: {folder / MERGED} opens with AutoModelForCausalLM.from_pretrained")
