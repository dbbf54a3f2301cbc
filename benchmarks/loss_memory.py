"""The chunked loss against PyTorch's own at a vocabulary of 128k: memory and time, forward and
backward.

    python benchmarks/loss_memory.py [--repeats 8] [--smoke]

Peak memory is that of a process of its own per arm, above the same process without the loss. Times
are taken in one process, arms in random order, and reported as the median of paired ratios.
"""

from __future__ import annotations

import argparse
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.nn.functional as F

from trainer.tasks.losses.cross_entropy import linear_cross_entropy

SMOKE = "--smoke" in sys.argv
TOKENS, WIDTH, VOCABULARY = (64, 32, 512) if SMOKE else (2048, 1024, 131072)


def plain(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(F.linear(hidden, weight).float(), targets, reduction="sum")


def chunked(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return linear_cross_entropy(hidden, weight, None, targets)


ARMS = {"plain": plain, "chunked": chunked, "none": None}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def inputs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH).to(dtype).requires_grad_()
    weight = torch.randn(VOCABULARY, WIDTH).mul_(0.02).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(0, VOCABULARY, (TOKENS,))


def peak_gib(arm: str, dtype: str) -> float:
    command = [sys.executable, __file__, "--arm", arm, "--dtype", dtype, *["--smoke"][:SMOKE]]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--arm", choices=ARMS)
    parser.add_argument("--dtype", choices=DTYPES)
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument(
        "--smoke", action="store_true", help="that it runs: a small vocabulary, no figure"
    )
    options = parser.parse_args()
    if options.arm:
        hidden, weight, targets = inputs(DTYPES[options.dtype])
        if ARMS[options.arm] is None:
            weight.grad = torch.ones_like(weight)  # the gradient itself is nobody's overhead
        else:
            ARMS[options.arm](hidden, weight, targets).backward()
        status = Path(
            "/proc/self/status"
        ).read_text()  # ru_maxrss would count the parent from before exec
        print(int(status.split("VmHWM:")[1].split()[0]) / 2**20)
        return
    print(
        f"{TOKENS} tokens, hidden size {WIDTH}, vocabulary {VOCABULARY}, {options.repeats} "
        "repeats\n"
    )
    print(
        "| weights | arm | peak memory above weights and gradient (GiB) | median time (s) | time "
        "against plain |"
    )
    print("| --- | --- | ---: | ---: | ---: |")
    for name, dtype in DTYPES.items():
        tensors = inputs(dtype)
        times: dict[str, list[float]] = {"plain": [], "chunked": []}
        for _ in range(options.repeats):
            for arm in random.sample(sorted(times), 2):
                tensors[1].grad = None
                started = time.perf_counter()
                ARMS[arm](*tensors).backward()
                times[arm].append(time.perf_counter() - started)
        del tensors
        floor = peak_gib("none", name)
        for arm, found in times.items():
            ratio = statistics.median(a / b for a, b in zip(found, times["plain"], strict=True))
            memory = peak_gib(arm, name) - floor
            print(
                f"| {name} | {arm} | {memory:.2f} | {statistics.median(found):.2f} | {ratio:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
