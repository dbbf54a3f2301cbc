"""`meshloom status`: what a run does, by what its first rank wrote last."""

from __future__ import annotations

import io
import json
import os
import socket
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.messages import shows, shows_each
from trainer.command.status import main
from trainer.supervise import status_files
from trainer.supervise.ending import Ending
from trainer.supervise.stall import Beat
from trainer.supervise.world import World

RUNS: dict[str, Any] = {
    "host": socket.gethostname(), "process": os.getpid(), "phase": "training", "step": 120, "still": 2.2, "busy": None,
    "place": "step 120, training", "steps": 500, "ranks": 4, "limit": 120.0,
    "waits_for": [{"rank": 3, "host": "node-2", "place": "step 120, waiting for data", "still": 2.4}],
}  # fmt: skip


def shown(folder: Path, capsys: pytest.CaptureFixture[str], **found: Any) -> tuple[int, list[str]]:
    status_files.write(folder, RUNS | found)
    return main([str(folder)], "meshloom status"), capsys.readouterr().out.splitlines()


def test_a_run_that_lives(tmp_path, capsys):
    (tmp_path / "checkpoints" / "step-000100").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step-000100" / "manifest.json").touch()
    code, lines = shown(tmp_path, capsys)
    assert code == 0
    shows_each(
        lines,
        ("step 120 of 500", "training"),
        ("ranks   4", str(os.getpid()), socket.gethostname(), "0 s"),
        ("still   2 s", "120 s"),
        ("waits", "rank 3 on node-2", "step 120", "2 s"),
        ("saved   step-000100", "0 min"),
    )


def test_before_its_first_step(tmp_path, capsys):
    code, lines = shown(tmp_path, capsys, step=0, place="preparing", steps=None, waits_for=[])
    assert (code, lines[0]) == (0, "preparing")
    shows(lines[-1], "saved", "nothing")


@pytest.mark.parametrize(
    ("found", "code", "first"),
    [
        ({"process": 2**22 + 1}, 1, "no sign of life: step 120 of 500, training"),
        ({"ended": 0}, 0, "finished: step 120 of 500"),
        ({"ended": 75}, 1, "ended: step 120 of 500, training"),
        (
            {"ended": 0, "step": 501, "place": "step 501, finishing"},
            0,
            "finished: step 500 of 500",
        ),
    ],
)
def test_one_that_does_not(tmp_path, capsys, found, code, first):
    ended, lines = shown(tmp_path, capsys, **found)
    assert (ended, lines[0]) == (code, first)
    assert not any(line.startswith(("still", "waits")) for line in lines)


def test_the_end_is_that_of_the_cause_and_not_of_the_first_rank(tmp_path, capsys):
    reasons = ("rank 3 was ended by SIGKILL\nby the kernel", "rank 0 lost its connection")
    assert status_files.end(tmp_path, 137, reasons[0])
    assert not status_files.end(tmp_path, 70, reasons[1])
    code, lines = shown(tmp_path, capsys, ended=70)
    assert (code, lines[1].split()) == (1, ["exit", "137"])
    shows_each(lines[-2:], ("because rank 3 was", "SIGKILL"), "kernel")
    assert not any(
        "because" in line for line in shown(tmp_path, capsys)[1]
    )  # one that lives has another end
    shows(shown(tmp_path, capsys, host="elsewhere")[1][1], "exit", "137")
    status_files.begin(tmp_path)
    shows(shown(tmp_path, capsys, ended=75)[1][1], "exit", "75")


def test_a_first_rank_without_a_word_has_the_launchers(tmp_path, capsys):
    status_files.end(tmp_path, 137, "rank 0 was ended by SIGKILL")
    code, lines = shown(tmp_path, capsys, process=2**22 + 1)
    assert code == 1
    shows(lines[0], "ended", "step 120 of 500")
    shows(lines[-1], "because rank 0", "SIGKILL")


class Lost:
    """A watch whose store is gone: it can't know that another rank has spoken."""

    place, fails_first, somebody_failed = "step 5, training", lambda self: True, lambda self: False

    def gone(self) -> list[Beat]:
        return [Beat(0, "node-1", 17, "training", 5, 1.0)]

    def close(self) -> None: ...


def test_one_rank_tells_the_end_though_the_store_ended_with_rank_0(tmp_path):
    messages = []
    for rank in (0, 1, 2):
        terminal = io.StringIO()
        ending = Ending(World(rank, rank, 3, 3), terminal, None, lambda: None)
        ending.begin_in(tmp_path)
        ending.watch = Lost()
        ending.tell(
            "connection closed by peer" if rank else "rank 0: the disk is full",
            70,
            follows=rank > 0,
        )
        messages.append(terminal.getvalue())
    shows(messages[0], "rank 0", "disk")
    assert messages[1:] == ["", ""]


def test_one_whose_process_is_hidden_from_this_user_gives_no_sign_of_life(
    tmp_path, capsys, monkeypatch
):
    """As with /proc mounted with hidepid=1."""

    def hidden(process: psutil.Process) -> str:
        raise psutil.AccessDenied(process.pid)

    monkeypatch.setattr(psutil.Process, "status", hidden)
    code, lines = shown(tmp_path, capsys)
    assert code == 1
    shows(lines[0], "no sign of life", "step 120 of 500")


def test_one_of_another_machine_is_known_by_its_age(tmp_path, capsys):
    assert shown(tmp_path, capsys, host="elsewhere")[0] == 0
    path = tmp_path / status_files.NAME
    path.write_text(json.dumps(json.loads(path.read_text()) | {"time": 0.0}))
    assert main([str(tmp_path)], "meshloom status") == 1


@pytest.mark.parametrize("content", [None, "", "[]", "{"])
def test_what_is_no_run(tmp_path, capsys, content):
    if content is not None:
        (tmp_path / status_files.NAME).write_text(content)
    assert main([str(tmp_path)], "meshloom status") == 64
    actual = "no status.json in it" if content is None else "status.json is there, and damaged"
    shows(capsys.readouterr().err, f"{actual}", "begun")


def test_control_characters_are_shown_and_not_sent(tmp_path, capsys):
    waited = [{"rank": 3, "host": "n\x1b[2J", "place": "x\x9b", "still": 2}]
    code, lines = shown(tmp_path, capsys, place="step 120, tr\x1b]0;x\x07", waits_for=waited)
    assert code == 0 and all(line.isprintable() for line in lines) and r"\x1b[2J" in lines[3], lines
    status_files.end(tmp_path, 70, "rank 0\x1b[31m failed")
    assert shown(tmp_path, capsys, ended=70)[1][-1] == r"because rank 0\x1b[31m failed"


@pytest.mark.parametrize("found", [
    {"step": "x"}, {"process": float("inf")}, {"process": 10**400}, {"still": 10**400}, {"host": None}, {"ranks": []},
    {"waits_for": {}}, {"waits_for": [7]}, {"waits_for": [{"rank": 1}]}, {"time": "now"}, {"limit": float("nan")},
    {"ended": "x"}, {"place": 5}, {"time": True},
], ids=str)  # fmt: skip
def test_a_status_that_is_damaged_is_a_line(tmp_path, capsys, found):
    status_files.write(tmp_path, RUNS)
    path = tmp_path / status_files.NAME
    path.write_text(json.dumps(json.loads(path.read_text()) | found))
    assert main([str(tmp_path)], "meshloom status") == 64
    shows(capsys.readouterr().err, "status.json", "damaged")


@pytest.mark.parametrize("name", [status_files.NAME, status_files.END])
@pytest.mark.parametrize("kind", ["folder", "pipe", "binary", "numbers", "deep", "large"])
def test_what_stands_in_the_place_of_a_file_is_a_line(tmp_path, capsys, name, kind):
    status_files.write(tmp_path, RUNS | {"process": 2**22 + 1})
    path = tmp_path / name
    path.unlink(missing_ok=True)
    contents = {
        "binary": b"\xff\x00",
        "numbers": b"9" * 5000,
        "deep": b"[" * 10**5,
        "large": b" " * (1 << 26) + b"{}",
    }
    {"folder": path.mkdir, "pipe": lambda: os.mkfifo(path)}.get(
        kind, lambda: path.write_bytes(contents[kind])
    )()
    code, message = main([str(tmp_path)], "meshloom status"), capsys.readouterr()
    damaged = name == status_files.NAME
    assert code == (64 if damaged else 1)
    wanted = "status.json is there, and damaged" if damaged else "because end.json can't be read"
    assert wanted in message.out + message.err
