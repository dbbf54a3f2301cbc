"""Folders of runs whose checkpoints are uploaded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tests.support.checkpoint_pieces import ALONE, DESCRIPTION, MODEL_FOLDER, STATE, live
from trainer.checkpoint import save
from trainer.checkpoint.copies.upload import Upload


def checkpoints(folder: Path, *steps: int) -> Path:
    for step in steps:
        state = replace(STATE, step=step)
        save(
            folder / "checkpoints", state, live().state_tensors(), DESCRIPTION, MODEL_FOLDER, ALONE
        )
    return folder


def begun_at(tmp_path: Path, *steps: int) -> Path:
    folder = checkpoints(tmp_path / "job", *steps)
    for name in ("config.json", "environment.json"):
        (folder / name).write_text("{}")
    return folder


def settled(upload: Upload) -> None:
    """Wait for the thread that copies."""
    while (thread := upload._thread) is not None:
        thread.join()
