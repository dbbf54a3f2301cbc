"""The rank that the launcher names as the cause, and its exit code, in any order of ends."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.commands import ROOT, run
from trainer.supervise import status_files
from trainer.supervise.stall import is_gone

RANK = """
import os, sys, time
from pathlib import Path
sys.path.insert(0, {root!r})
from trainer.supervise.notes import notes_of
rank, notes = int(os.environ["RANK"]), notes_of(os.environ)
notes.write_place(rank, "step 3, saving")
if rank == 0:
    notes.write_folder(Path({folder!r}))
came = Path(os.environ["MESHLOOM_LAUNCHER"]) / "came-1"
if rank == 1:
    came.touch()
while not came.exists():
    time.sleep(0.01)
def says(text, code, follows=False):
    notes.write_end(rank, text, code, follows)
    os._exit(code)
if rank == 0:
    {first}
time.sleep({later})
{second}
"""
LOST = "says('rank 0 lost its connection', 70, follows=True)"
KILLED = "os.kill(os.getpid(), 9)"
ABORTED = "os.kill(os.getpid(), 6)"
RANK_1 = r"rank 1 on \S+ \(process \d+, step 3, saving\) "
RANK_0 = RANK_1.replace("rank 1", "rank 0")
FULL = "says('rank 1: disk is full', 74)"


@pytest.mark.first(
    "a lost connection before a kill",
    "a lost connection before its cause",
    "an abort before a kill",
    "an abort before its cause",
    "a kill before its consequence",
    "an error before a kill",
)
@pytest.mark.parametrize(
    ("first", "later", "second", "code", "last"),
    [
        (LOST, 0.5, KILLED, 128 + 9, RANK_1 + "was ended by SIGKILL"),
        (LOST, 3.0, KILLED, 128 + 9, RANK_1 + "was ended by SIGKILL"),
        (LOST, 0.5, FULL, 74, "rank 1: disk is full"),
        (LOST, 0.5, "os._exit(3)", 3, RANK_1 + "ended with exit code 3"),
        (
            LOST,
            0.5,
            FULL.replace("says", "notes.write_end").replace("(", "(1, ", 1) + "; time.sleep(600)",
            74,
            "rank 1:",
        ),
        (ABORTED, 0.5, KILLED, 128 + 9, RANK_1 + "was ended by SIGKILL"),
        (ABORTED, 0.5, FULL, 74, "rank 1: disk is full"),
        (KILLED, 0.5, "says('rank 1: who knows', 70)", 128 + 9, RANK_0 + "was ended by SIGKILL"),
        ("says('rank 0 failed', 70)", 0.5, KILLED, 70, "rank 0 failed"),
        (LOST, 600, "", 70, "rank 0 lost its connection"),
    ],
    ids=[
        "a lost connection before a kill",
        "and the process takes long to end",
        "a lost connection before its cause",
        "and that has no words",
        "and that does not end",
        "an abort before a kill",
        "an abort before its cause",
        "a kill before its consequence",
        "an error before a kill",
        "a lost connection and no end",
    ],
)
def test_the_cause_is_named_whatever_ends_first(
    tmp_path: Path, first: str, later: float, second: str, code: int, last: str
) -> None:
    rank = RANK.format(
        root=str(ROOT), first=first, later=later, second=second, folder=str(tmp_path)
    )
    launch = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); from trainer.supervise.launcher "
        "import start; "
    )
    result = run(sys.executable, "-c", f"{launch}sys.exit(start(2, ['-c', {rank!r}]))", timeout=60)
    assert result.code == code, result.output
    assert re.match(last, result.output.splitlines()[-1]), result.output
    left = status_files.read_end(tmp_path)
    assert left is not None and left["code"] == code and re.match(last, left["text"]), left


@pytest.mark.more
@pytest.mark.parametrize(
    ("first", "second", "code", "last"),
    [
        (LOST, FULL, 74, "rank 1: disk is full"),
        (ABORTED, KILLED, 128 + 9, RANK_1 + "was ended by SIGKILL"),
        ("time.sleep(600)", "os._exit(3)", 3, RANK_1 + "ended with exit code 3"),
        (
            "os.kill(os.getppid(), 15); time.sleep(600)",
            "time.sleep(600)",
            75,
            "stopped by SIGTERM before",
        ),
    ],
    ids=["an error", "a kill", "a code", "a signal to the launcher"],
)
def test_forked_ranks_end_like_those_that_are_started(
    tmp_path: Path, first: str, second: str, code: int, last: str
) -> None:
    """`meshloom verify` forks its ranks; each has a session of its own."""
    rank = RANK.format(root=str(ROOT), first=first, later=0.5, second=second, folder=str(tmp_path))
    rank = rank.replace("came.touch()", "assert os.getsid(0) == os.getpid(); came.touch()")
    launch = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); from trainer.supervise.launcher "
        "import start; "
    )
    result = run(
        sys.executable,
        "-c",
        f"{launch}sys.exit(start(2, lambda: exec({rank!r}, {{}})))",
        timeout=60,
    )
    assert result.code == code, result.output
    assert re.match(last, result.output.splitlines()[-1]), result.output


FORKS = """
import os, sys, time
sys.path.insert(0, {root!r})
from pathlib import Path
from trainer.supervise.launcher import start
def rank():
    Path({folder!r}, "started-" + os.environ["RANK"]).write_text(str(os.getpid()))
    time.sleep(600)
start(2, rank)
"""


@pytest.mark.more
def test_forked_ranks_leave_once_their_launcher_is_killed(tmp_path: Path) -> None:
    script = FORKS.format(root=str(ROOT), folder=str(tmp_path))
    launcher = subprocess.Popen([sys.executable, "-c", script])
    files = [tmp_path / f"started-{rank}" for rank in range(2)]
    assert soon(lambda: all(file.exists() and file.read_text() for file in files))
    launcher.kill()
    launcher.wait()
    assert soon(lambda: all(is_gone(int(file.read_text())) for file in files))


def soon(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.1)
    return condition()


@pytest.mark.more
def test_a_hang_up_that_nohup_ignores_is_ignored_to_the_end() -> None:
    code = (
        f"import signal, sys; sys.path.insert(0, {str(ROOT)!r}); "
        "from trainer.supervise.signals import StopSignals; "
        "signal.signal(signal.SIGHUP, signal.SIG_IGN); StopSignals().release(); "
        "sys.exit(signal.getsignal(signal.SIGHUP) != signal.SIG_IGN)"
    )
    assert run(sys.executable, "-c", code).code == 0
