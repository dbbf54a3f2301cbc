"""Runs of the real commands on a tiny model, for the tests of the command line."""

from __future__ import annotations

import atexit
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tests.support import warm

ROOT = Path(__file__).resolve().parent.parent.parent
BIN = Path(sys.executable).parent
TRAIN = str(ROOT / "launch" / "train.py")
SCRIPTS = ("deepspeed", "torchrun", "accelerate", "meshloom")
PROGRESS = re.compile(r"^step \d+|^Epoch \[|^start   .* \(\d+ s\)$")
"""The lines of steps, and those of a start on a slow machine: how many depends on the time."""


@dataclass(frozen=True)
class Result:
    code: int
    output: str
    """Return standard output and error, as a terminal shows them."""

    @property
    def lines(self) -> list[str]:
        """The output besides the progress."""
        return [line for line in self.output.splitlines() if not PROGRESS.match(line)]


def write_job(folder: Path, **trainer: Any) -> Path:
    """Write a config of a tiny Llama on a small text of its own; return its path."""
    (folder / "text.jsonl").write_text(
        "".join(json.dumps({"text": f"def f{i}(x): return x + {i}"}) + "\n" for i in range(99))
    )
    section = {
        "model": {
            "config": {
                "model_type": "llama",
                "vocab_size": 4096,
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "attention_dropout": 0.1,
            }
        },
        "data": {"path": str(folder / "text.jsonl"), "sequence_length": 16},
        "steps": 3,
        "seed": 3,
        "run": {"folder": str(folder / "runs")},
        "evaluation": {"samples": 4},
        "log": {"every": 1, "sample_ids": True},
    }
    config = {
        "train_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "scheduler": {
            "type": "WarmupCosineLR",
            "params": {"warmup_num_steps": 2, "total_num_steps": "auto"},
        },
        "trainer": section | trainer,
    }
    path = folder / "job.json"
    path.write_text(json.dumps(config))
    return path


def run(
    *command: str | Path, timeout: float = 400, cold: bool = False, **environment: str
) -> Result:
    """Run a command in its own process group; past `timeout` s kill all of it and fail."""
    process = start(*command, cold=cold, **environment)
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        raise AssertionError(f"no end after {timeout} s:\n{output}") from None
    return Result(process.returncode, output)


def start(*command: str | Path, cold: bool = False, **environment: str) -> subprocess.Popen[str]:
    """Start scripts and launchers warm (warm.py), unless `cold` or with modules of their own."""
    inherited = {
        key: value
        for key, value in os.environ.items()
        if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    }
    words = list(map(str, command))
    if words[0] in SCRIPTS:
        words = [sys.executable, str(BIN / words[0]), *words[1:]]
    usual = environment.get("PYTHONPATH", str(ROOT)) == str(ROOT)
    if not cold and usual and words[0] == sys.executable and words[1] not in ("-c", "-m"):
        words[0] = str(warm.PYTHON)
        environment = {warm.SOCKET: warm_server(), **environment}
    return subprocess.Popen(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        cwd=ROOT,
        env={
            **inherited,
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
            **environment,
        },
    )


def agents(first: list[str | Path], second: list[str | Path]) -> list[Result]:
    """Run two commands at once, as if on two machines."""
    processes = [start(*first), start(*second)]
    try:
        outputs = [process.communicate(timeout=400)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [
        Result(process.returncode, output)
        for process, output in zip(processes, outputs, strict=True)
    ]


@cache
def warm_server() -> str:
    """Return the socket of the server of warm processes, which ends with this one."""
    path = str(Path(tempfile.mkdtemp(), "warm"))
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.support.warm", path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert server.stdin and server.stdout
    while server.stdout.readline() != b"ready\n":
        # the server of warm processes did not start
        assert server.poll() is None
    atexit.register(server.stdin.close)
    return path


def train(*arguments: str | Path, **options: Any) -> Result:
    return run(sys.executable, TRAIN, *arguments, **options)


def metrics(run_folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]


def losses(run_folder: Path) -> list[float]:
    """Return the losses of each step, then of the evaluation."""
    rows = [line for line in metrics(run_folder) if "epoch_loss" not in line]
    return [line.get("loss", line.get("evaluation_loss")) for line in rows]


def sample_ids(run_folder: Path) -> dict[int, list[int]]:
    """Return the samples of each step over all ranks, sorted."""
    results: dict[int, list[int]] = {}
    for path in (run_folder / "logs").glob("samples-rank-*.jsonl"):
        for line in path.read_text().splitlines():
            entry = json.loads(line)
            results.setdefault(entry["step"], []).extend(entry["ids"])
    return {step: sorted(ids) for step, ids in results.items()}


def script(folder: Path, code: str, *command: str, **environment: str) -> Any:
    path = folder / "own.py"
    path.write_text(code)
    return run(*(command or (sys.executable,)), path, PYTHONPATH=str(ROOT), **environment)
