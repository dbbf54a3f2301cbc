"""Runs that hang, each for a reason of its own: the run ends, and names the rank and the reason."""

from __future__ import annotations

import datetime
import fcntl
import json
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support import warm
from tests.support.commands import ROOT, run, warm_server, write_job
from tests.support.messages import shows
from tests.support.run.interruptions import command, environment, nothing_left
from trainer.data.progress import Progress
from trainer.distributed.flight_record import Entered
from trainer.supervise.meeting import reach, serve
from trainer.supervise.stall import Beat, Phase, behind, diagnosis, elsewhere, straggler
from trainer.supervise.watchdog import beat_store
from trainer.supervise.watchdog import watch as watching
from trainer.supervise.watchdog.watch import Watch, WatchReports
from trainer.supervise.world import environment_of, free_port

AT_STEP_3 = """
import trainer.engines.torch.engine as m
real = m.TorchEngine.step
def step(self, number, *rest):
    if number == 2 and rank == {rank}:
        {what}
    return real(self, number, *rest)
m.TorchEngine.step = step
"""
SLOW = """
import trainer.supervise.watchdog.watch as w, trainer.engines.torch.engine as m
w.SAMPLES, w.BEAT_SECONDS = 10, 0.2  # many in the six seconds for which it sleeps, however fast the rest is
real = m.TorchEngine.step
def step(*given):
    if rank == 1:
        time.sleep(1.0)
    return real(*given)
m.TorchEngine.step = step
"""
IN_DATA = """
import threading, trainer.recipes.causal_lm.task as m
real, calls = m.CausalLM.collate, []
def collate(self, *rest):
    calls.append(1)
    if len(calls) > 8 and rank == 1:
        threading.Event().wait()
    return real(self, *rest)
m.CausalLM.collate = collate
"""
OTHER_COLLECTIVES = """
import torch, trainer.engines.torch.engine as m
real = m.TorchEngine.step
def step(self, number, *rest):
    if number == 2 and rank == 0:
        torch.distributed.barrier()
    elif number == 2:
        torch.distributed.all_reduce(torch.zeros(1))
    return real(self, number, *rest)
m.TorchEngine.step = step
"""
STOP = "os.kill(os.getpid(), 19)"
BARRIER = "import torch; torch.distributed.barrier(self.job.machine.ranks.on_host().group)"
RANK_0, RANK_1 = r"rank 0 on HOST \(process \d+\) ", r"rank 1 on HOST \(process \d+\) "
DISK_HANGS = """
import trainer.checkpoint.faults as m
def test_disk_hangs(phase):
    if phase == "rename" and rank == 0:
        time.sleep(600)
m.at = test_disk_hangs
"""
IN_PREPARING = (
    "import trainer.data.text.preparation as m; m.prepare = lambda *given: os.kill(os.getpid(), 19)"
)
STANDS = {
    "a rank that stops over what the others wait for": (
        IN_PREPARING,
        r"in preparing, rank 0 on HOST \(process \d+\) is stopped \(SIGSTOP\)",
    ),
    "a stopped rank": (AT_STEP_3.format(rank=1, what=STOP), RANK_1 + r"is stopped \(SIGSTOP\)"),
    "a stopped first rank": (  # before any beat
        "import trainer.supervise.watchdog.watch as w; w.BEAT_SECONDS = 4.0"
        + AT_STEP_3.format(rank=0, what=STOP),
        r"rank 0 on HOST \(process \d+\) is stopped \(SIGSTOP\)",
    ),
    "an endless read": (IN_DATA, RANK_1 + r"is behind, at step \d, waiting for data"),
    "another collective": (
        AT_STEP_3.format(rank=1, what=BARRIER),
        RANK_1 + "is outside the collective that the others wait in, at .*barrier",
    ),
    "another collective of the same group": (  # each waits for the other: neither is more wrong
        OTHER_COLLECTIVES,
        r"rank 0 on HOST \(process \d+\) .*barrier and rank 1 on HOST \(process \d+\) ",
    ),
    "a barrier too many on the first": (  # the others have begun their sum, and gather already
        AT_STEP_3.format(rank=0, what="import torch; torch.distributed.barrier()"),
        RANK_0 + "is outside the collective that the others wait in, at .*barrier",
    ),
    "an endless loop": (
        AT_STEP_3.format(rank=1, what="while True: pass"),
        RANK_1 + "is outside the collective",
    ),
    "an endless loop of the first": (
        AT_STEP_3.format(rank=0, what="while True: pass"),
        RANK_0 + "is outside the collective",
    ),
    "an endless wait of the first": (
        AT_STEP_3.format(rank=0, what="import threading; threading.Event().wait()"),
        RANK_0 + "is outside the collective",
    ),
    "the first one's disk, in a save beside the training": (
        DISK_HANGS,
        RANK_0 + r".*its thread \"checkpoint_0\" .*test_disk_hangs",
    ),
}


def job(folder: Path, **trainer: Any) -> Path:
    return write_job(folder, steps=6, engine="mesh", evaluation={}, **{"patience": 3} | trainer)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.mark.more
@pytest.mark.parametrize("reason", STANDS)
def test_what_holds_a_run_is_named(tmp_path: Path, cache: Path, reason: str) -> None:
    code, expected = STANDS[reason]
    saves = {"every": 2, "asynchronous": code == DISK_HANGS}
    results = job(tmp_path, checkpoint=saves, patience=1 if code == DISK_HANGS else 3)
    result = run(*command(tmp_path, results, code), timeout=120, **environment(cache))
    assert result.code == 77, result.output
    assert re.search(expected.replace("HOST", re.escape(socket.gethostname())), result.output), (
        result.output
    )
    shows(result.output, "stalled", "no progress")
    assert len(result.lines) <= 20 + 5, result.output
    assert nothing_left(tmp_path)


@pytest.mark.more
def test_the_last_collectives_of_all_ranks_are_left_for_pytorch_to_compare(
    tmp_path: Path, cache: Path
) -> None:
    """Three ranks wait for the fourth, which the analyser of PyTorch finds from what they left."""
    code = AT_STEP_3.format(rank=1, what="threading.Event().wait()")
    words = command(tmp_path, job(tmp_path), f"import threading\n{code}", ranks=4)
    result = run(*words, timeout=120, **environment(cache))
    assert result.code == 77, result.output
    message = re.search(r"the last collectives: torchfrtrace (\S+) -p rank-\n", result.output)
    assert message, result.output
    assert sorted(path.name for path in Path(message[1]).iterdir()) == [
        f"rank-{n}" for n in range(4)
    ]
    if torch.__version__ >= "2.15":  # the analyser of older ones knows NCCL alone
        analyser = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace"]
        results = run(*analyser, message[1], "-p", "rank-", timeout=60).output
        shows(results, "ranks joining")
        assert "missing ranks: {1}" in results, results


@pytest.mark.more
def test_what_holds_a_certificate_is_named(tmp_path: Path, cache: Path) -> None:
    code, expected = STANDS["another collective"]
    code = f"import trainer.supervise.watchdog.watch as w; w.LEAST_SECONDS = 3.0\n{code}"
    verify = command(tmp_path, job(tmp_path), code, str(ROOT / "launch" / "verify.py"))
    result = run(*verify, timeout=120, **environment(cache))
    assert result.code == 77, result.output
    assert re.search(expected.replace("HOST", re.escape(socket.gethostname())), result.output), (
        result.output
    )
    assert nothing_left(tmp_path)


@pytest.mark.more
def test_a_full_pipe_ends_it_too(tmp_path: Path, cache: Path) -> None:
    """Whoever reads the output has stopped to read: no rank can print any more."""
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
    os.write(writing, b"." * 4096)
    words = command(tmp_path, job(tmp_path, patience=2))
    inherited = {**os.environ, "OMP_NUM_THREADS": "1", **environment(cache)}
    process = subprocess.Popen(words, stdout=writing, stderr=writing, cwd=ROOT, env=inherited)
    assert process.wait(timeout=200) == 77
    assert nothing_left(tmp_path)
    logs = (tmp_path / "runs" / "job" / "logs" / "rank-0.log").read_text()
    assert "in print" in logs or "_write" in logs, logs
    os.close(reading)
    os.close(writing)


@pytest.mark.first("1")
@pytest.mark.parametrize("rank", [0, 1])
def test_a_lost_rank_is_named_last(tmp_path: Path, cache: Path, rank: int) -> None:
    """With the step and the phase in which it died, not those of its last beat."""
    code = AT_STEP_3.format(rank=rank, what="os.kill(os.getpid(), 9)")
    result = run(*command(tmp_path, job(tmp_path), code), timeout=120, **environment(cache))
    assert result.code == 128 + 9, result.output
    where = rf"rank {rank} on {re.escape(socket.gethostname())} \(process \d+, step 3, training\)"
    assert re.match(where, result.output.splitlines()[-1]), result.output
    shows(result.output.splitlines()[-1], f"rank {rank}", "SIGKILL")
    assert "Traceback" not in result.output and "internal error" not in result.output
    assert nothing_left(tmp_path)


@pytest.mark.more
def test_without_our_launcher_a_death_is_named_with_its_phase_too(
    tmp_path: Path, cache: Path
) -> None:
    """As under srun, which tells no rank that another one is gone."""
    words = AT_STEP_3.format(rank=1, what="os.kill(os.getpid(), 9)")
    python = command(tmp_path, job(tmp_path), words)[0]
    one = f"{python} {tmp_path / 'script.py'} --config {tmp_path / 'job.json'}"
    port = free_port()
    ranks = " & ".join(
        " ".join(f"{name}={value}" for name, value in environment_of(rank, 2, port).items())
        + f" {one}"
        for rank in (0, 1)
    )
    result = run("bash", "-c", f"{ranks}; wait", timeout=120, **environment(cache))
    where = rf"rank 1 on {re.escape(HERE)} \(process \d+\) is gone, at step 3, training: "
    assert re.search(where, result.output), result.output


@pytest.mark.more
def test_a_crash_leaves_where_it_stood(tmp_path: Path, cache: Path) -> None:
    code = AT_STEP_3.format(rank=1, what="import ctypes; ctypes.string_at(0)")
    result = run(*command(tmp_path, job(tmp_path), code), timeout=120, **environment(cache))
    assert result.code == 128 + signal.SIGSEGV, result.output
    last = result.output.splitlines()[-1]
    message = re.search(
        (
            r"was ended by SIGSEGV: a crash or an abort in native code; the end of "
            r"(\S+) has the stacks$"
        ),
        last,
    )
    assert message and "Traceback" not in result.output, result.output
    log = Path(message[1]).read_text()
    assert re.search(r"Segmentation fault.*script\.py.* in step", log, re.DOTALL), log
    assert nothing_left(tmp_path)


@pytest.mark.more
def test_a_rank_that_leaves_with_0_before_the_run_is_over_is_named(
    tmp_path: Path, cache: Path
) -> None:
    code = AT_STEP_3.format(rank=1, what="os._exit(0)")
    result = run(*command(tmp_path, job(tmp_path), code), timeout=120, **environment(cache))
    assert result.code == 70, result.output
    where = rf"rank 1 on {re.escape(HERE)} \(process \d+, step 3, training\)"
    assert re.match(where, result.lines[-1]), result.output
    shows(result.lines[-1], "rank 1", "exit code 0")
    assert "internal error" not in result.output and nothing_left(tmp_path)


STUCK = """
import trainer.supervise.ending as m  # as where the folder's file system hangs
real = m.Ending.beat
m.Ending.beat = lambda self, seen: time.sleep(600) if "ended" in seen and rank in {ranks} else real(self, seen)
"""


@pytest.mark.more
@pytest.mark.parametrize("ranks", ["(1,)", "(0, 1)"])
def test_a_rank_that_does_not_end_after_the_run_is_named_and_killed(
    tmp_path: Path, cache: Path, ranks: str
) -> None:
    words = command(tmp_path, job(tmp_path), STUCK.format(ranks=ranks))
    words[2] = f"import trainer.supervise.launcher as l; l.LEAVE_SECONDS = 3.0; {words[2]}"
    result = run(*words, timeout=120, **environment(cache))
    assert result.code == 77, result.output
    where = (
        rf"stalled: rank [01] on {re.escape(HERE)} \(process \d+, step \d, leaving\) had not "
        r"ended 3 s after"
    )
    assert re.match(where, result.lines[-1]), result.output
    assert (tmp_path / "runs" / "job" / "final" / "config.json").exists() and nothing_left(tmp_path)


@pytest.mark.more
def test_one_without_a_launcher_ends_by_itself_and_leaves_where_it_stood(
    tmp_path: Path, cache: Path
) -> None:
    words = command(tmp_path, job(tmp_path), STUCK.format(ranks="(0,)") + "m.LEAVE_SECONDS = 2.0")
    script, results = str(tmp_path / "script.py"), str(tmp_path / "job.json")
    result = run(words[0], script, "--config", results, timeout=120, RANK="0", **environment(cache))
    assert result.code == 77 and "done: " in result.output, result.output
    assert re.search(r"in end\n", (tmp_path / "runs" / "job" / "logs" / "rank-0.log").read_text())


@pytest.mark.more
def test_a_slow_rank_is_named_while_the_run_goes_on(tmp_path: Path, cache: Path) -> None:
    results = job(tmp_path, patience=None)
    result = run(*command(tmp_path, results, SLOW), "--fresh", timeout=120, **environment(cache))
    assert result.code == 0, result.output
    named = (
        rf"^note: the others wait for rank 1 on {re.escape(socket.gethostname())} \(process "
        r"\d+\) most of the time"
    )
    assert len(re.findall(named, result.output, re.MULTILINE)) == 1, result.output


# The diagnosis, from the beats of the ranks


def beats(
    *places: tuple[Phase, int], stacks: dict[int, tuple[str, ...]] | None = None
) -> list[Beat]:
    stacks = stacks or {}
    return [
        Beat(rank, "other", 100 + rank, phase, step, 130.0, stack=stacks.get(rank, ("a.py:1 f",)))
        for rank, (phase, step) in enumerate(places)
    ]


def test_the_one_that_is_behind():
    result = beats(
        (Phase.TRAINING, 7), (Phase.TRAINING, 7), (Phase.WAITING, 7), (Phase.TRAINING, 7)
    )
    assert [beat.rank for beat in behind(result)] == [2]
    lines = diagnosis(result, lambda beat: False)
    shows(lines[0], "2 on", "102", "step 7, waiting")
    shows(lines, "ranks 0, 1, 3", "step 7, training", "130 s")
    shows(lines[-1], "a.py:1")


def test_nobody_is_behind():
    result = beats(
        (Phase.SAVING, 7),
        (Phase.SAVING, 7),
        (Phase.SAVING, 7),
        stacks={1: ("a.py:1 f", "b.py:2 g")},
    )
    assert behind(result) == []
    assert [beat.rank for beat in elsewhere(result)] == [1]
    shows(diagnosis(result, lambda _: False)[0], "1 on", "101) waits elsewhere", "b.py:2")
    shows(diagnosis(beats((Phase.SAVING, 7)), lambda _: False)[0], "step 7, saving")


def test_of_two_that_stand_apart_the_one_outside_the_collective_is_named():
    inside = "torch/distributed/distributed_c10d.py:9 all_reduce"
    waits, joined = Entered("0", 5, 4, "gloo:all_reduce"), Entered("0", 4, 4, "gloo:all_reduce")

    def named(*ranks: tuple[tuple[str, ...], tuple[Entered, ...]]) -> str:
        results = [
            replace(beat, stack=stack, groups=groups)
            for beat, (stack, groups) in zip(
                beats(*[(Phase.TRAINING, 7)] * len(ranks)), ranks, strict=True
            )
        ]
        return diagnosis(results, lambda _: False)[0].partition("s: ")[2]

    loop, native = ("own.py:1 loop",), ("torch/autograd/graph.py:3 _engine_run_backward",)
    # by the stacks alone
    assert named((loop, ()), ((inside,), ())).startswith("rank 0 ")
    assert named(((inside,), ()), (loop, ())).startswith("rank 1 ")
    # most stand outside, and those are named all the same
    shows(named((loop, ()), (native, ()), ((inside,), ())), "rank 0 on", "100", "1 more")
    # by the record, where no stack shows it: as in DDP's backward pass
    assert named((native, (joined,)), (native, (waits,))).startswith("rank 0 ")
    assert named((native, (waits,)), (native, (joined,))).startswith("rank 1 ")
    # a chain: rank 1 waits for rank 2, which waits for nobody
    other = waits._replace(group="1"), joined._replace(group="1")
    chain = named((native, (waits,)), (native, (joined, other[0])), (native, (other[1],)))
    assert chain.startswith("rank 2 ")
    # another collective of the same group: neither is more wrong
    barrier = waits._replace(last="gloo:barrier")
    both = named((("a.py:1 f", inside), (waits,)), (("b.py:1 g", inside), (barrier,)))
    assert "rank 0 " in both and "rank 1 " in both and "a.py:1 f" in both and "b.py:1 g" in both


def test_the_thread_that_a_rank_waits_for_is_named():
    main, writer = ("a.py:1 f", "lib/python3.11/threading.py:327 wait"), ("b.py:3 write",)
    results = [
        replace(beats((Phase.SAVING, 7))[0], stack=main, threads=(("checkpoint_0", writer),))
    ]
    lines = diagnosis(results, lambda _: False)
    shows(lines[0], 'thread "checkpoint_0"', "b.py:3")
    busy = [replace(results[0], stack=("a.py:1 f",))]
    assert "checkpoint_0" not in diagnosis(busy, lambda _: False)[0]


def test_who_is_slow():
    def busy(*shares: float | None) -> list[Beat]:
        return [
            replace(beat, busy=share)
            for beat, share in zip(beats(*[(Phase.TRAINING, 3)] * 4), shares, strict=True)
        ]

    assert (result := straggler(busy(0.3, 0.4, 0.95, 0.2))) and result.rank == 2
    assert straggler(busy(0.9, 0.9, 0.95, 0.9)) is None
    assert straggler(busy(0.3, 0.4, None, 0.2)) is None
    assert straggler(busy(0.3, 0.4, 0.7, 0.2)) is None


@pytest.mark.more
def test_preparing_tells_that_it_goes_on():
    messages: list[float] = []
    progress = Progress(None, messages.append)
    progress.begin("x")
    progress.at(0.5, 10, 100)
    progress.waits()
    progress.moves(5.0)
    assert messages == [0.0, 0.0, 5.0]


@pytest.mark.more
def test_its_readers_hear_of_it_from_its_first_beat() -> None:
    """Before the run's folder is known, too: the launcher has to say where a rank was."""
    heard: queue.Queue[Any] = queue.Queue()
    watch = Watch(0, [("here", 1)], None, 100.0, WatchReports(print, heard.put))
    watch.plan(5)
    first = heard.get(timeout=20)
    watch.close()
    assert (first["place"], first["steps"]) == ("preparing", 5)


@pytest.mark.more
def test_each_phase_is_one_that_the_watchdog_and_its_readers_know() -> None:
    """A phase that a table lacked was a KeyError in the watchdog's thread, which then ended."""
    for phase in Phase:
        result = beats((phase, 1), (Phase.LEAVING, 1))
        assert phase.patience >= 1.0
        assert [beat.rank for beat in behind(result)] == ([0] if phase is not Phase.LEAVING else [])
        sent = json.loads(json.dumps(asdict(result[0])))
        assert sent["phase"] == phase.value and Phase(sent["phase"]) is phase


def test_what_may_take_long_is_not_still():
    ended: list[list[str]] = []
    watch = Watch(0, [("here", 1)], None, 0.2, WatchReports(ended.append))
    watch.at(Phase.TRAINING, 3)
    watch.moves(100.0)
    actual = watch.status()
    watch.close()
    result = actual["still"], actual["limit"], actual["place"], actual["waits_for"]
    assert result == (0.0, 0.2, "step 3, training", [])
    assert ended == []


# Ranks that never beat


SERVES = """
import os, sys, time
sys.path.insert(0, {root!r})
from datetime import timedelta
from trainer.supervise.meeting import serve
store = serve("127.0.0.1", 0, timedelta(seconds=20))
print(os.getpid(), store.port, flush=True)
time.sleep(600)
"""


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> queue.Queue[str]:
    """The diagnosis of a watchdog, then the code with which it would end its process."""
    message: queue.Queue[str] = queue.Queue()

    def leave(code: int) -> None:
        message.put(str(code))
        threading.Event().wait()

    for name, seconds in {
        "BEAT_SECONDS": 0.5,
        "DOUBTFUL_SECONDS": 1.0,
        "SILENT_SECONDS": 2.0,
    }.items():
        monkeypatch.setattr(watching, name, seconds)
    monkeypatch.setattr(watching.os, "_exit", leave)
    return message


def watch(
    ended: queue.Queue[str],
    rank: int,
    store: Any,
    *processes: tuple[str, int],
    patience: float = 0.1,
) -> Watch:
    reports = WatchReports(lambda lines: ended.put("\n".join(lines)))
    return Watch(rank, processes, store, patience, reports)


@pytest.fixture
def first_rank() -> Iterator[tuple[int, Any]]:
    """A first rank's process, which has met the others and serves the store but never beats."""
    words = [str(warm.PYTHON), "-c", SERVES.format(root=str(ROOT))]
    inherited = {**os.environ, warm.SOCKET: warm_server()}
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=inherited, cwd=ROOT)
    assert process.stdout is not None
    number, port = map(int, process.stdout.readline().split())
    yield number, reach("127.0.0.1", port, 1, datetime.timedelta(seconds=20), print)
    with suppress(ProcessLookupError):
        os.kill(number, signal.SIGKILL)
    process.wait()


HERE = socket.gethostname()


@pytest.mark.more
def test_a_first_rank_that_stops_before_it_was_heard(
    ended: queue.Queue[str], first_rank: tuple[int, Any]
) -> None:
    process, store = first_rank
    watcher = watch(ended, 1, store, (HERE, process), (HERE, os.getpid()))
    os.kill(process, signal.SIGSTOP)
    watcher.at(Phase.TRAINING, 3)
    message, code = ended.get(timeout=30), ended.get(timeout=30)
    watcher.close()
    assert (
        f"rank 0 on {HERE} (process {process}) is stopped (SIGSTOP)" in message and code == "77"
    ), message


@pytest.mark.more
def test_another_rank_that_stops_before_it_was_heard(ended: queue.Queue[str]) -> None:
    stopped = subprocess.Popen(["sleep", "600"])
    stopped.send_signal(signal.SIGSTOP)
    store = serve("127.0.0.1", 0, datetime.timedelta(seconds=20))
    watcher = watch(ended, 0, store, (HERE, os.getpid()), (HERE, stopped.pid))
    message, code = ended.get(timeout=30), ended.get(timeout=30)
    watcher.close()
    stopped.kill()
    stopped.wait()
    assert (
        f"rank 1 on {HERE} (process {stopped.pid}) is stopped (SIGSTOP)" in message and code == "77"
    ), message


@pytest.mark.more
def test_a_beat_from_before_it_stood_does_not_make_a_verdict(ended: queue.Queue[str]) -> None:
    """It tells no place yet, and all would seem to stand where those stand that do."""
    other = subprocess.Popen(["sleep", "600"])
    store = serve("127.0.0.1", 0, datetime.timedelta(seconds=20))
    watcher = watch(ended, 0, store, (HERE, os.getpid()), (HERE, other.pid))
    watcher.at(Phase.TRAINING, 3)
    for number in range(1, 25):
        assert number > 10 or ended.empty(), ended.get()
        stack = ("elsewhere.py:1 f",) if number > 10 else ()
        beat = Beat(1, HERE, other.pid, Phase.TRAINING, 3, 100.0, number, stack=stack)
        store.set(f"{beat_store.KEY}/1", json.dumps(asdict(beat)))
        time.sleep(0.3)
    message, code = ended.get(timeout=30), ended.get(timeout=30)
    watcher.close()
    other.kill()
    other.wait()
    assert f"rank 1 on {HERE} (process {other.pid}) at elsewhere.py:1 f" in message and code == "77"


@pytest.mark.more
@pytest.mark.parametrize("moves", [False, True], ids=["all wait for it", "the others go on"])
def test_who_falls_silent_has_no_more_time_than_a_step(
    ended: queue.Queue[str], moves: bool
) -> None:
    """Whatever its last phase was, even one that may take fifteen times as long."""
    other = subprocess.Popen(["sleep", "600"])
    store = serve("127.0.0.1", 0, datetime.timedelta(seconds=20))
    watcher = watch(ended, 0, store, (HERE, os.getpid()), (HERE, other.pid), patience=3.0)
    watcher.at(Phase.FINISHING, 6)
    for number in range(1, 4):
        beat = Beat(1, HERE, other.pid, Phase.FINISHING, 6, 0.0, number)
        store.set(f"{beat_store.KEY}/1", json.dumps(asdict(beat)))
        time.sleep(0.5)
    other.send_signal(signal.SIGSTOP)
    if moves:
        watcher.moves(600.0)
        time.sleep(8)
        message = None if ended.empty() else ended.get()
    else:
        message, _ = ended.get(timeout=20), ended.get(timeout=20)
    watcher.close()
    other.kill()
    other.wait()
    named = f"in step 6, finishing, rank 1 on {HERE} (process {other.pid}) is stopped (SIGSTOP)"
    assert message is None if moves else (message and named in message), message


@pytest.mark.more
def test_a_first_rank_that_falls_silent_is_seen_where_others_serve_the_store(
    ended: queue.Queue[str], first_rank: tuple[int, Any]
) -> None:
    process, store = first_rank
    watcher = watch(ended, 1, store, (HERE, process), (HERE, os.getpid()), patience=2.0)
    watcher.at(Phase.FINISHING, 6)
    message, _ = ended.get(timeout=22), ended.get(timeout=22)
    watcher.close()
    shows(message, "preparing", f"0 on {HERE}", f"{process}")


class CountingStore:
    """A store that counts what each rank's watchdog reads of the others."""

    def __init__(self, store: Any) -> None:
        self.store, self.read = store, 0

    def clone(self) -> CountingStore:
        return self

    def multi_get(self, keys: list[str]) -> Any:
        self.read += len(keys)
        return self.store.multi_get(keys)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)


@pytest.mark.more
@pytest.mark.parametrize("silent", [0, 12])
def test_a_rank_that_stands_still_does_not_read_all_others(
    ended: queue.Queue[str], monkeypatch: pytest.MonkeyPatch, silent: int
) -> None:
    """Of many that wait for one, each reads a few others each second, but those that report."""
    monkeypatch.setattr(watching, "SILENT_SECONDS", 4.0)
    # each of these ranks would list the threads of all, since they share a process
    monkeypatch.setattr(watching, "working_threads", lambda: ())
    ranks, stopped = 32, subprocess.Popen(["sleep", "600"])
    stopped.send_signal(signal.SIGSTOP)
    processes = [(HERE, stopped.pid if rank < silent else os.getpid()) for rank in range(ranks)]
    store = dist.HashStore()
    stores = [CountingStore(store) for _ in range(ranks)]
    watchers = [
        watch(ended, rank, stores[rank], *processes, patience=3.0) for rank in range(silent, ranks)
    ]
    for watcher in watchers:
        watcher.at(Phase.TRAINING, 3)
    message = "".join(ended.get(timeout=150) for _ in range(2 * len(watchers)))  # all of them end
    beats = max(watcher._number for watcher in watchers)
    for watcher in watchers:
        watcher.close()
    stopped.kill()
    stopped.wait()
    named = f"rank 0 on {HERE} (process {stopped.pid}) and 11 more is stopped (SIGSTOP)"
    assert (named if silent else "at the same place") in message, message
    often = {rank for rank in range(ranks) if stores[rank].read > (watching.NEIGHBOURS + 1) * beats}
    assert often == ({silent} if silent else set(watching.READERS))


class SlowStore(CountingStore):
    """A store in which a write takes a while, and which counts those that have not ended."""

    def __init__(self, store: Any) -> None:
        super().__init__(store)
        self.writing = 0
        self.begun = threading.Event()

    def set(self, key: str, value: str) -> None:
        self.writing += 1
        self.begun.set()
        time.sleep(0.3)
        self.writing -= 1


def test_nothing_is_on_its_way_once_a_watchdog_is_closed() -> None:
    """A thread in the store's code, when the interpreter ends, would abort the process."""
    store = SlowStore(dist.HashStore())
    watcher = Watch(0, [(HERE, os.getpid())] * 2, store, 60.0, WatchReports(print))
    store.begun.clear()
    assert store.begun.wait(20)
    watcher.close()
    assert store.writing == 0


def test_who_is_gone_before_it_was_heard(
    ended: queue.Queue[str], first_rank: tuple[int, Any]
) -> None:
    process, store = first_rank
    others = ((HERE, os.getpid()), (HERE, os.getppid()), ("elsewhere", 1))
    watcher = watch(ended, 1, store, (HERE, process), *others)
    watcher.moves(600.0)
    assert watcher.gone() == []
    os.kill(process, signal.SIGKILL)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and [beat.rank for beat in watcher.gone()] != [0]:
        time.sleep(0.1)
    time.sleep(2 * watching.SILENT_SECONDS)  # a rank elsewhere can't be heard without the store
    results = [(beat.rank, beat.process) for beat in watcher.gone()]
    watcher.close()
    assert results == [(0, process)]


def test_many_ranks_make_few_lines():
    result = beats(*[(Phase.TRAINING, 3)] * 999, (Phase.EVALUATING, 2))
    lines = diagnosis(result, lambda beat: beat.rank in (5, 17))
    shows(lines[0], "5 on", "105", "1 more", "sign")
    assert len(lines) <= 20 and all(len(line) < 200 for line in lines)
