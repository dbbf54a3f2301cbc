"""Random faults, one after another: does each run end in time and leave nothing, and does it come
to the same end?

    python benchmarks/soak.py --faults 200 [--minutes 60]
    python benchmarks/soak.py --smoke               # that it runs: one fault in one layout, no line in results/

A tiny Llama is trained for STEPS steps in two or four processes, by three launchers in turn. A
fault of a random kind strikes at a random moment; then the run has to end with a last line, leave
no process, and resume, in the same layout or with another number of processes and another engine, to
the weights of an undisturbed run: bit by bit in the same layout, to 1e-5 of a weight's scale for
each step in others. It has dropout, but where the number of data ranks changes, each of which draws
its own. Nothing is done by hand. One line a fault, then a table by kind.

Each fault is a line of results/soak.jsonl, and depends on its number and the seed alone: the same
command continues after the last one, and the table is of all. What is struck starts as a user's run
does; what resumes after it, where nothing strikes, in processes that have imported PyTorch already
(tests/support/warm.py).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

import torch
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.support.commands import TRAIN
from tests.support.commands import start as started
from tests.support.marked import MARK, processes, ranks, sweep
from trainer.supervise.world import free_port

LOG = ROOT / "benchmarks" / "results" / "soak.jsonl"
STEPS, EVERY = 60, 5
END_SECONDS, LEFT_SECONDS = 90.0, 10.0
MODEL = {
    "model_type": "llama", "vocab_size": 4096, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
LAUNCHERS = {
    "meshloom": lambda n: [sys.executable, TRAIN, "--processes", n],
    "torchrun": lambda n: [
        "torchrun",
        "--nproc-per-node",
        n,
        "--master-port",
        str(free_port()),
        TRAIN,
    ],
    "deepspeed": lambda n: ["deepspeed", "--num_gpus", n, "--master_port", str(free_port()), TRAIN],
}
DROPOUT = 0.1
Layout = tuple[str, int]
"""An engine, and how many processes."""
LAYOUTS: list[Layout] = [("mesh", 2), ("mesh", 4), ("accelerate", 2), ("deepspeed", 2)]
References = dict[tuple[Layout, float], dict[str, torch.Tensor]]
"""The weights of the undisturbed runs, by their layout and dropout."""


@dataclass(frozen=True)
class Struck:
    """What a fault came to."""

    number: int
    kind: str
    launcher: str
    layouts: str
    """Before and after it."""
    seconds: float
    """To the end of the last process."""
    wrong: str
    """Empty: it was survived."""


@dataclass
class Soak:
    folder: Path
    chance: random.Random

    def job(self, steps: int = STEPS, every: int = EVERY) -> Path:
        text = self.folder / "text.jsonl"
        text.write_text(
            "".join(json.dumps({"text": f"def f{i}(x): return x + {i}"}) + "\n" for i in range(999))
        )
        path = self.folder / "job.json"
        path.write_text(json.dumps({
            "train_batch_size": 8, "gradient_clipping": 0.5, "zero_optimization": {"stage": 2},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "trainer": {
                "model": {"config": MODEL}, "data": {"path": str(text), "sequence_length": 16}, "steps": steps,
                "seed": 3, "checkpoint": {"every": every, "keep_last": 3}, "evaluation": {"samples": 4},
                "log": {"every": 1}, "patience": 4,
            },
        }))  # fmt: skip
        return path

    def start(
        self, launcher: str, layout: Layout, run: Path, dropout: float = DROPOUT, cold: bool = True
    ) -> tuple[subprocess.Popen[str], str]:
        engine, count = layout
        mark = uuid.uuid4().hex
        words = [
            *LAUNCHERS[launcher](str(count)),
            "--config",
            str(self.folder / "job.json"),
            "--resume",
            "auto",
        ]
        overrides = [f"trainer.engine={engine}", f"trainer.run.folder={run}"]
        overrides.append(f"trainer.model.config.attention_dropout={dropout}")
        return started(*words, *overrides, cold=cold, **{MARK: mark}), mark

    def finish(self, launcher: str, layout: Layout, run: Path, dropout: float) -> tuple[int, str]:
        process, mark = self.start(launcher, layout, run, dropout, cold=False)
        try:
            output, _ = process.communicate(timeout=300)
        finally:
            sweep(mark)
        return process.returncode, output

    def strike(self, kind: str, number: int, references: References) -> Struck:
        """One fault from start to end."""
        launcher, first = self.chance.choice(list(LAUNCHERS)), self.chance.choice(LAYOUTS)
        second = first if self.chance.random() < 0.5 else self.chance.choice(LAYOUTS)
        dropout = DROPOUT if first[1] == second[1] else 0.0
        run = self.folder / f"run-{number}"
        process, mark = self.start(launcher, first, run, dropout)
        at = self.chance.randrange(
            2 * EVERY + 1, STEPS - 5
        )  # two are saved: a run whose one is damaged is refused
        deadline = time.monotonic() + 240
        while steps(run) < at and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(self.chance.random() / 4)
        begun = time.monotonic()
        if process.poll() is None:
            KINDS[kind](self, process, mark, run)
        else:
            kind = MISSED
        wrong, took = self._end(process, mark, begun)
        code, output = self.finish(launcher, second, run, dropout)
        if code != 0:
            wrong = wrong or f"did not go on: {code}: {output[-300:]}"
        wrong = wrong or difference(weights(run), references[second, dropout], same=first == second)
        if not wrong:
            shutil.rmtree(run)
        return Struck(
            number,
            kind,
            launcher,
            f"{first[0]} {first[1]} -> {second[0]} {second[1]}",
            round(took, 1),
            wrong,
        )

    def _end(self, process: subprocess.Popen[str], mark: str, begun: float) -> tuple[str, float]:
        """What was wrong with it, and the seconds from `begun` to the end of the last process."""
        wrong = ""
        try:
            output, _ = process.communicate(timeout=END_SECONDS)
        except subprocess.TimeoutExpired:
            wrong, output = f"no end in {END_SECONDS:.0f} s", ""
        deadline = time.monotonic() + END_SECONDS
        while not wrong and (left := processes(mark)) and time.monotonic() < deadline:
            time.sleep(0.1)
            if time.monotonic() > deadline - 0.5:
                wrong = f"left: {[one.cmdline()[:3] for one in left]}"
        took = time.monotonic() - begun
        sweep(mark)
        if not wrong and not output.strip():
            wrong = "it said nothing"
        return wrong, took


def difference(
    found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], *, same: bool
) -> str:
    """What is wrong with weights; `same`: they come of one layout alone."""
    if found.keys() != wanted.keys():
        return "other tensors"
    if same:
        return (
            ""
            if all(torch.equal(found[name], wanted[name]) for name in wanted)
            else "not bit-equal"
        )
    worst = max(float((found[n] - wanted[n]).abs().max() / wanted[n].abs().max()) for n in wanted)
    return "" if worst < 1e-5 * STEPS else f"differs by {worst:.1e}"


def steps(run: Path) -> int:
    path = run / "job" / "metrics.jsonl"
    return path.read_text().count('"loss"') if path.exists() else 0


def weights(run: Path) -> dict[str, torch.Tensor]:
    return {
        k: v
        for path in (run / "job" / "final").glob("*.safetensors")
        for k, v in load_file(path).items()
    }


def to_launcher(number: int) -> Callable[..., None]:
    return lambda soak, process, mark, run: process.send_signal(number)


def to_rank(number: int, first: bool = False) -> Callable[..., None]:
    def send(soak: Soak, process: subprocess.Popen[str], mark: str, run: Path) -> None:
        if found := ranks(mark):
            found[0 if first else soak.chance.randrange(1, len(found))].send_signal(number)

    return send


def to_all(number: int) -> Callable[..., None]:
    return lambda soak, process, mark, run: [one.send_signal(number) for one in processes(mark)]


def then_damage(change: Callable[[Soak, Path], None]) -> Callable[..., None]:
    """All are killed, and the newest checkpoint is not what it was."""

    def strike(soak: Soak, process: subprocess.Popen[str], mark: str, run: Path) -> None:
        to_all(signal.SIGKILL)(soak, process, mark, run)
        process.wait()
        if saved := sorted(run.glob("job/checkpoints/step-*[0-9]")):
            change(soak, saved[-1])

    return strike


def flip(soak: Soak, saved: Path) -> None:
    path = soak.chance.choice(sorted(saved.rglob("*.safetensors")))
    content = bytearray(path.read_bytes())
    content[soak.chance.randrange(len(content))] ^= 1 << soak.chance.randrange(8)
    path.write_bytes(content)


def truncate(soak: Soak, saved: Path) -> None:
    path = soak.chance.choice(sorted(one for one in saved.rglob("*") if one.is_file()))
    os.truncate(path, soak.chance.randrange(path.stat().st_size))


def lose(soak: Soak, saved: Path) -> None:
    soak.chance.choice(sorted(one for one in saved.rglob("*") if one.is_file())).unlink()


KINDS = {
    "SIGTERM to the launcher": to_launcher(signal.SIGTERM),
    "SIGINT to the launcher": to_launcher(signal.SIGINT),
    "SIGHUP to the launcher": to_launcher(signal.SIGHUP),
    "SIGKILL to the launcher": to_launcher(signal.SIGKILL),
    "SIGTERM to a rank": to_rank(signal.SIGTERM),
    "SIGUSR1 to a rank": to_rank(signal.SIGUSR1),
    "SIGKILL to a rank": to_rank(signal.SIGKILL),
    "SIGKILL to the first rank": to_rank(signal.SIGKILL, first=True),
    "SIGABRT to a rank": to_rank(signal.SIGABRT),
    "SIGSTOP to a rank": to_rank(signal.SIGSTOP),
    "SIGSTOP to the first rank": to_rank(signal.SIGSTOP, first=True),
    "SIGTERM to all": to_all(signal.SIGTERM),
    "SIGKILL to all": to_all(signal.SIGKILL),
    "a flipped bit": then_damage(flip),
    "a truncated file": then_damage(truncate),
    "a lost file": then_damage(lose),
}


MISSED = "none: the run had ended before"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="begin no fault later than that"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--log", type=Path, default=LOG, metavar="PATH", help="go on behind its last fault"
    )
    parser.add_argument(
        "--smoke", action="store_true", help="that it runs: one fault in one layout, no log"
    )
    args = parser.parse_args()
    if args.smoke:
        del LAYOUTS[1:]
        args.faults, args.log = 1, Path(tempfile.mkdtemp(prefix="soak-")) / "log"
    log = (
        [Struck(**json.loads(line)) for line in args.log.read_text().splitlines()]
        if args.log.exists()
        else []
    )
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    soak, begun = Soak(folder, random.Random()), time.monotonic()
    soak.job()
    references: References = {}
    for number, (layout, dropout) in enumerate(product(LAYOUTS, (0.0, DROPOUT))):
        code, output = soak.finish("meshloom", layout, folder / f"whole-{number}", dropout)
        assert code == 0, output
        references[layout, dropout] = weights(folder / f"whole-{number}")
    while len(log) < args.faults and time.monotonic() - begun < 60 * args.minutes:
        number = len(log) + 1
        soak.chance = random.Random(f"{args.seed} {number}")
        struck = soak.strike(list(KINDS)[number % len(KINDS)], number, references)
        log.append(struck)
        with args.log.open("a") as file:
            file.write(json.dumps(asdict(struck)) + "\n")
        said = f"{struck.wrong or 'survived'}, {struck.seconds} s"
        print(f"{number} {struck.kind} ({struck.launcher}, {struck.layouts}): {said}", flush=True)
    print(table(log))
    return int(any(struck.wrong for struck in log))


def table(log: list[Struck]) -> str:
    kinds = defaultdict(list)
    for struck in log:
        kinds[struck.kind].append(struck)
    rows = [
        "| fault | times | survived | s to the end, median | longest |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for kind in (*KINDS, MISSED):
        if found := kinds.get(kind):
            took = [struck.seconds for struck in found]
            well = sum(not struck.wrong for struck in found)
            rows.append(
                f"| {kind} | {len(found)} | {well} | {statistics.median(took):.1f} | "
                f"{max(took):.1f} |"
            )
    well = sum(not struck.wrong for struck in log)
    return "\n".join([*rows, f"| all | {len(log)} | {well} | | |"])


if __name__ == "__main__":
    sys.exit(main())
