"""`layouts.py time`: layouts beside DDP and beside the same by hand, with the bounds."""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from layouts import KINDS, ROOT, Bench, interleaved, ratio

ACCUMULATION, RANKS = 4, (2, 4)
"""The micro-batches and the numbers of ranks of the measure of time."""
OVER_DDP = {"DDP": 1.0, "ZeRO-2": 1.12, "ZeRO-3": 1.18, "HSDP": 1.2}
"""The most that a step of `mesh` may take, with its DDP as 1."""
OVER_HAND = 1.01


def measure(bench: Bench, rounds: int, counts: Sequence[int] = ()) -> str:
    """The layouts of two ranks beside those by hand, or of four."""
    arms: dict[str, Callable[[], None]] = {}
    kinds = {**KINDS} if bench.world_size == 2 else {"DDP": 0, "HSDP": 3}
    for kind, stage in kinds.items():
        replicate = 2 if kind == "HSDP" else 1
        names = {"mesh": "mesh", "mesh again": "mesh", "accelerate": "accelerate"}
        for name, engine in names.items() if bench.world_size == 2 else list(names.items())[:2]:
            arms[f"{name} {kind}"] = bench.ours(engine, stage, ACCUMULATION, replicate)
        if bench.world_size == 2:
            arms[f"by hand {kind}"] = bench.by_hand(stage, ACCUMULATION)
    used = cpu_seconds()
    times = interleaved(arms, rounds, warm_up=min(2, rounds))
    others = 1 - (cpu_seconds()[0] - used[0]) / (cpu_seconds()[1] - used[1])
    lines = [
        f"{bench.world_size} ranks, {rounds} rounds; other processes took {others:.1%} of the CPU "
        "time that was used",
        "",
        "| layout | mesh (ms) | A/A | / own DDP | at most | mesh / by hand | accelerate / by hand "
        "| at most |",
        "| --- |" + " ---: |" * 7,
    ]
    for kind in kinds:
        mesh = times[f"mesh {kind}"]
        cells = [f"{statistics.median(mesh) * 1e3:.0f}"]
        cells.append(f"{ratio(mesh, times[f'mesh again {kind}']):.3f}")
        cells += [f"{ratio(mesh, times['mesh DDP']):.3f}", f"{OVER_DDP[kind]:.2f}"]
        hand = times.get(f"by hand {kind}")
        peers = (times.get(f"{name} {kind}") for name in ("mesh", "accelerate"))
        cells += [f"{ratio(peer, hand):.3f}" if peer and hand else "" for peer in peers]
        lines.append(f"| {kind} | " + " | ".join([*cells, f"{OVER_HAND if hand else ''}"]) + " |")
    return "\n".join(lines)


def cpu_seconds() -> tuple[float, float]:
    """The CPU seconds of all ranks, and those that were used on this machine. Collective."""
    own = torch.tensor(time.process_time(), dtype=torch.float64)
    dist.all_reduce(own)
    ticks = [int(field) for field in Path("/proc/stat").read_text().split()[1:9]]
    idle = ticks[3] + ticks[4]
    return float(own), (sum(ticks) - idle) / os.sysconf("SC_CLK_TCK")


def run(script: str, options: argparse.Namespace) -> None:
    """Run the measure of time on each number of ranks, and step_time.py."""
    smoke = ["--smoke"][: options.smoke]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node"]
    for ranks in RANKS:
        command = [*torchrun, str(ranks), script, "time", "--rounds", str(options.rounds), *smoke]
        subprocess.run(command, check=True, cwd=ROOT)
    print("\nours - bare DeepSpeed: at most +50 us", flush=True)
    steps = smoke or ["--model", "small", "--steps", "200"]
    command = [sys.executable, str(ROOT / "benchmarks/step_time.py"), *steps]
    subprocess.run(command, check=True, cwd=ROOT)
