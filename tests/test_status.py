"""`meshloom status`: what a run does, by what its first rank wrote last."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from trainer.command.status import main
from trainer.run import status

RUNS: dict[str, Any] = {
    "host": socket.gethostname(), "process": os.getpid(), "phase": "training", "step": 120, "still": 2.2, "busy": None,
    "place": "step 120, training", "steps": 500, "ranks": 4, "limit": 120.0,
    "waits_for": [{"rank": 3, "host": "node-2", "place": "step 120, waiting for data", "still": 2.4}],
}  # fmt: skip


def shown(folder: Path, capsys: pytest.CaptureFixture[str], **found: Any) -> tuple[int, list[str]]:
    status.write(folder, RUNS | found)
    return main([str(folder)], "meshloom status"), capsys.readouterr().out.splitlines()


def test_a_run_that_lives(tmp_path, capsys):
    (tmp_path / "checkpoints" / "step-000100").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step-000100" / "manifest.json").touch()
    assert shown(tmp_path, capsys) == (0, [
        "step 120 of 500, training",
        f"ranks   4, the first is process {os.getpid()} on {socket.gethostname()}, last seen 0 s ago",
        "still   2 s, of at most 120 s",
        "waits   for rank 3 on node-2: step 120, waiting for data, for 2 s",
        "saved   step-000100, 0 min ago",
    ])  # fmt: skip


def test_before_its_first_step(tmp_path, capsys):
    code, lines = shown(tmp_path, capsys, step=0, place="preparing", steps=None, waits_for=[])
    assert (code, lines[0], lines[-1]) == (0, "preparing", "saved   nothing yet")


@pytest.mark.parametrize(
    ("found", "code", "first"),
    [
        ({"process": 2**22 + 1}, 1, "no sign of life: step 120 of 500, training"),
        ({"ended": 0}, 0, "finished: step 120 of 500, training"),
        ({"ended": 75}, 1, "ended: step 120 of 500, training"),
    ],
)
def test_one_that_does_not(tmp_path, capsys, found, code, first):
    ended, lines = shown(tmp_path, capsys, **found)
    assert (ended, lines[0]) == (code, first)
    assert not any(line.startswith(("still", "waits")) for line in lines)


def test_one_of_another_machine_is_known_by_its_age(tmp_path, capsys):
    assert shown(tmp_path, capsys, host="elsewhere")[0] == 0
    path = tmp_path / status.NAME
    path.write_text(json.dumps(json.loads(path.read_text()) | {"time": 0.0}))
    assert main([str(tmp_path)], "meshloom status") == 1


@pytest.mark.parametrize("content", [None, "", "[]", "{"])
def test_what_is_no_run(tmp_path, capsys, content):
    if content is not None:
        (tmp_path / status.NAME).write_text(content)
    assert main([str(tmp_path)], "meshloom status") == 64
    assert "no status.json in it; expected the folder of a run that has begun" in capsys.readouterr().err
