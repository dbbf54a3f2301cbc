"""Folders of runs that died or ended, without the runs."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.support.checkpoint_pieces import ALONE, DESCRIPTION, MODEL_FOLDER, STATE, live
from trainer.checkpoint import save
from trainer.config import Config


def begun(config: Config, *steps: int, name: str = "job", request: Any = None) -> Path:
    """The folder of a run that saved at `steps` and then died."""
    folder = Path(config.trainer.run.folder) / name
    for step in steps:
        state = replace(STATE, step=step)
        save(
            folder / "checkpoints", state, live().state_tensors(), DESCRIPTION, MODEL_FOLDER, ALONE
        )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "environment.json").write_text(json.dumps({"request": request or config.raw}))
    (folder / "config.json").write_text("{}")
    return folder


def finish(folder: Path, later: float) -> None:
    """A final model that was written `later` seconds after the run's last start."""
    (folder / "final").mkdir()
    started = (folder / "environment.json").stat().st_mtime
    os.utime(folder / "final", (started + later, started + later))
