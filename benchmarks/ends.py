"""What the watcher costs, and how soon after a fault a run says what it was.

    python benchmarks/ends.py overhead [--steps 4000]
    python benchmarks/ends.py faults [--times 3] [--minutes 60]

`--smoke` shows that it runs: a few steps, one kind of fault, and no figure.

overhead: one run of a tiny Llama in two processes, in which the watcher's threads are there for
BLOCK steps and away for as many, in turn; the ratio is that of the mean step with it to the mean
step without it, of neighbouring blocks. Then what a call costs that tells it a phase. faults: each
kind of benchmarks/soak.py that ends a run, by three launchers in turn, in a run of two processes;
seconds from the fault to the first line that names it, and to the end of the last process of the
run. `trainer.patience` is 4 s in these.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.soak import KINDS, LAUNCHERS, Soak, steps
from tests.support.commands import write_job
from tests.support.marked import ended, sweep
from trainer.supervise.stall import Phase
from trainer.supervise.watchdog.watch import Watch

BLOCK = WARM_UP = int(os.environ.get("ENDS_BLOCK", 200))
"""Steps: of a block, which takes longer than the second between two beats; and before the first."""
NAMED = re.compile(r"rank \d+ on |stopped by|stalled|ended the run at once")
"""Ours: what torchrun and deepspeed say of signals does not count."""
TEMPORARY = ("a flipped bit", "a truncated file", "a lost file")
"""Kinds that show at the next start, not at the end of the run."""


class Alternating(Watch):
    """A watcher whose threads come and go with the steps."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.last, self.times = 0.0, defaultdict[int, list[float]](list)

    def at(self, phase: Phase, step: int | None = None) -> None:
        super().at(phase, step)
        if phase is not Phase.TRAINING or step is None:
            return
        now, block = time.perf_counter(), (step - WARM_UP) // BLOCK
        if self.last and step > WARM_UP:
            self.times[block].append(now - self.last)
        self.last = now
        if (step - WARM_UP) % BLOCK == BLOCK - 1 and step > WARM_UP:
            self._turn(on=block % 2 == 1)
            self.last = 0.0

    def _turn(self, on: bool) -> None:
        if not on:
            self._closed.set()
            return
        self._closed = threading.Event()
        self._answered = time.monotonic()
        for work in (self._beat, self._judge):
            threading.Thread(target=work, daemon=True).start()

    def close(self) -> None:
        self._turn(on=True)
        begun = time.perf_counter()
        for step in range(100_000):
            super().at(Phase.TRAINING, step)
        mark = (time.perf_counter() - begun) / 100_000
        if self._rank == 0:
            means = [statistics.fmean(self.times[block]) for block in sorted(self.times)]
            Path(os.environ["ENDS_FOUND"]).write_text(json.dumps({"means": means, "mark": mark}))
        super().close()


def as_rank(arguments: list[str]) -> int:
    """A rank of the run with such a watcher."""
    from unittest.mock import patch

    from trainer.command.train import main

    with patch("trainer.supervise.ending.Watch", Alternating):
        return main(arguments, "benchmarks/ends.py")


def overhead(folder: Path, count: int) -> str:
    job = write_job(folder, steps=count, engine="mesh", log={"every": 100})
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ENDS_FOUND": str(folder / "found.json")}
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--standalone",
    ]
    words = [*launcher, __file__, "rank", "--config", str(job)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((folder / "found.json").read_text())
    pairs = list(zip(found["means"][::2], found["means"][1::2], strict=False))
    ratios = sorted(on / off for on, off in pairs)
    low, middle, high = statistics.quantiles(ratios, n=4)
    step = statistics.median(off for _, off in pairs) * 1e3
    return (
        f"{len(pairs)} pairs of blocks of {os.environ.get('ENDS_BLOCK', BLOCK)} steps, {step:.1f} "
        "ms a step without: "
        f"with / without {middle:.3f} in "
        f"the median, quartiles {low:.3f} and {high:.3f}; {found['mark'] * 1e6:.2f} us for each "
        "phase that is told"
    )


def strike(soak: Soak, kind: str, launcher: str, number: int) -> tuple[float | None, float, str]:
    """Seconds to the first line that names it, if any does, and to the last process's end; and that
    line.
    """
    run = soak.folder / f"run-{number}"
    process, mark = soak.start(launcher, ("mesh", 2), run)
    said: list[tuple[float, str]] = []

    def listen() -> None:
        assert process.stdout is not None
        said.extend((time.monotonic(), line.strip()) for line in process.stdout)

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    deadline = time.monotonic() + 240
    while steps(run) < 20 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert process.poll() is None and steps(run) >= 20, said
    begun = time.monotonic()
    KINDS[kind](soak, process, mark, run)
    gone = ended(mark, 120)
    took = time.monotonic() - begun
    sweep(mark)
    process.wait()
    listener.join(5)
    named = next(((at, line) for at, line in said if at > begun and NAMED.search(line)), None)
    line = named[1] if named else "nothing: " + (said[-1][1] if said else "")
    return (named[0] - begun if named else None), took if gone else float("inf"), line


def faults(folder: Path, times: int, minutes: float, smoke: bool) -> None:
    soak, begun = Soak(folder, random.Random(0)), time.monotonic()
    soak.job(steps=1_000_000, every=1_000_000)
    found = defaultdict(list)
    kinds = [kind for kind in KINDS if kind not in TEMPORARY][: 1 if smoke else None]
    for number in range(times * len(kinds)):
        if time.monotonic() - begun > 60 * minutes:
            break
        again, at = divmod(number, len(kinds))
        launcher = list(LAUNCHERS)[(again + at) % len(LAUNCHERS)]
        found[kinds[at]].append(strike(soak, kinds[at], launcher, number))
        named, took, line = found[kinds[at]][-1]
        shown = "never" if named is None else f"{named:.1f} s"
        print(
            f"{kinds[at]} ({launcher}): named after {shown}, gone after {took:.1f} s: {line[:160]}",
            flush=True,
        )
    print(
        "| fault | times | named | s to the name, median | longest | s to the last process's end, "
        "median | longest |"
    )
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for kind, all in found.items():
        named = [seconds for seconds, _, _ in all if seconds is not None]
        ends = [took for _, took, _ in all]
        shown = f"{statistics.median(named):.1f} | {max(named):.1f}" if named else "- | -"
        print(
            f"| {kind} | {len(all)} | {len(named)} | {shown} | {statistics.median(ends):.1f} | "
            f"{max(ends):.1f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["overhead", "faults"])
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="begin no fault later than that"
    )
    parser.add_argument(
        "--smoke", action="store_true", help="that it runs: a few steps, one kind, no figure"
    )
    given = parser.parse_args()
    if given.smoke:
        os.environ["ENDS_BLOCK"], given.steps, given.times = "5", 30, 1
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
        if given.what == "overhead":
            print(overhead(Path(temporary), given.steps))
        else:
            faults(Path(temporary), given.times, given.minutes, given.smoke)
    print(f"load {os.getloadavg()[0]:.0f} on {os.cpu_count()} cores")


if __name__ == "__main__":
    sys.exit(as_rank(sys.argv[2:]) if sys.argv[1:2] == ["rank"] else main())
