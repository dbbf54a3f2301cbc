"""What training costs on this machine's GPUs: our engines, Hugging Face's Trainer with the same
JSON, and a bare loop, beside what the GPU can do.

    python benchmarks/gpu.py            # on one GPU at most ten minutes; writes results/gpu.md
    python benchmarks/gpu.py --smoke    # that it runs: two processes without GPUs, no figures

A Llama of 1 billion parameters (on several GPUs one of 8, too, for ten minutes more) in bfloat16,
random tokens, AdamW, clipping, ZeRO-3 (ZeRO-1 on one GPU); sequences of 8,192 tokens, micro-batches
of 2, `selective` recomputation. Each arm has processes of its own, one after the other, and is
stopped after its seconds in `ARMS` (gpu_arms.py) and what earlier ones left; they and `PLANNING`
are 600 in all. An arm that is stopped, runs out of memory or fails is a row that says so; what it
measured is kept.

The first arm measures ceilings (gpu_ceilings.py): a copy, the shape's matrix products in three
directions, attention by kernel; from these come the tokens a second that no step of this shape in
bfloat16 passes, and each later row is a share of them. The last arm repeats one (A/A): what it
differs by is noise. A step's time is the median after the warm-up, of steps that are each waited
for; beside it as many steps in one interval, by the step. MFU is by `flops_per_token`, which counts
attention to earlier tokens alone, and by the rule that counts all, as torchtitan's. Memory: what
`meshloom plan` predicts of this JSON (blocks are planned uncompiled), and the most that torch
allocated on a GPU. A row of our engines names the certificate of its config, if gpu_certificates.py
has made one. Of "mesh, compiled" a line under the table has a step's kernels in eight classes
(gpu_profile.py). "mesh, saving" times a save and a load, the raw write of as many bytes to the same
folder, and how long the loop waits for a save in the background, the first time and when its
buffers are there. The bare loop is plain PyTorch with the same units and the same recomputation;
Trainer recomputes whole blocks, as it has nothing in between.

These run only if they are named:

    python benchmarks/gpu.py --shapes Qwen3-0.6B
    python benchmarks/gpu.py --arms mesh "bare FSDP2" accelerate
    python benchmarks/gpu.py --shapes 8B --sequence 4096 --arms ceilings "mesh, LoRA" "Trainer + PEFT"
    python benchmarks/gpu.py --shapes 8B --arms "longest in 24 GB" "longest in 48 GB" "longest in 80 GB"

The last trains an adapter on sequences that grow until they do not fit a memory limited to that of
such a GPU (gpu_longest.py), beside the longest that plans predict.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.gpu_arms import (
    ARMS,
    PLANNING,
    PREDICTING,
    SEQUENCE,
    SHAPES,
    USUAL,
    certified,
    in_order,
    json_of,
    missing,
    own_json,
)
from benchmarks.gpu_table import of_ceiling, report, shown
from trainer.supervise.world import environment_of, free_port, gpu_count

Row = dict[str, Any]
SLOWER = 10
"""Times the seconds of each arm with `--smoke`, on a CPU."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--smoke", action="store_true", help="a tiny model and two steps, on processors"
    )
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, help="default: 1B; with GPUs, 8B")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=USUAL)
    parser.add_argument("--sequence", type=int, default=SEQUENCE, help="tokens; default: 8192")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks/results/gpu.md")
    parser.add_argument("--work", nargs=2, help=argparse.SUPPRESS)  # a worker's arm and folder
    options = parser.parse_args()
    if options.work:
        from benchmarks.gpu_bench import work

        return work(*options.work, cuda=not options.smoke)
    count = 2 if options.smoke else gpu_count()
    if not count:
        print("no GPU here; --smoke shows that it runs")
        return 0
    shapes = ["tiny"] if options.smoke else options.shapes or ["1B", "8B"][: min(count, 2)]
    rows: list[Row] = []
    for shape in shapes:
        shared = json_of(shape, count, options.smoke, options.sequence)
        rows += rows_of(shape, shared, count, in_order(options.arms), options.smoke)
    options.output.write_text(report(rows, count, sys.argv[1:]))
    print(f"written to {options.output}")
    return 0


def rows_of(
    shape: str, shared: dict[str, Any], count: int, arms: list[str], smoke: bool
) -> list[Row]:
    """Plan and measure the arms of a shape, one after the other, and print each row."""
    slower = SLOWER if smoke else 1
    predicted = plans(shared, count, arms, smoke)
    ends = time.monotonic()
    rows: list[Row] = []
    for arm in arms:
        ends += slower * ARMS[arm].seconds
        row = {"shape": shape, "arm": arm, **predicted.get(arm, {})}
        row |= measured(arm, shared, count, smoke, ends, row.get("predicted", 0))
        rows.append(row | of_ceiling(row, rows))
        print(*shown(rows[-1]), sep="\n", flush=True)
    return rows


def plans(shared: dict[str, Any], count: int, arms: list[str], smoke: bool) -> dict[str, Row]:
    """Return the `planned` GiB of `meshloom plan` on the fullest GPU, or the `predicted` longest
    sequence, by arm.
    """
    running: dict[str, list[Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for index, arm in enumerate(arm for arm in arms if missing(arm) is None and ARMS[arm].own):
            config = own_json(arm, shared, Path(folder))
            config["trainer"].pop("compile", None)  # planned uncompiled
            text = json.dumps(config) + ARMS[arm].memory
            if text not in running:
                path = Path(folder) / f"{index}.json"
                path.write_text(json.dumps(config))
                running[text] = [planning(path, count, ARMS[arm].memory, smoke)]
            running[text].append(arm)
        searched = any(ARMS[arm].memory for arm in arms)
        seconds = (SLOWER if smoke else 1) * (PREDICTING if searched else PLANNING)
        ends = time.monotonic() + seconds
        results: dict[str, Row] = {}
        for process, *names in running.values():
            try:
                output, errors = process.communicate(timeout=max(0.1, ends - time.monotonic()))
                result = json.loads(output)
            except (subprocess.TimeoutExpired, ValueError) as error:
                process.kill()
                _, errors = process.communicate()
                print(f"no plan of {', '.join(names)}: {error}\n{errors[-2000:]}", flush=True)
                continue
            if "needed" in result:
                result = {"planned": result["needed"] / 2**30}
            results.update(dict.fromkeys(names, result))
    return results


def planning(path: Path, count: int, memory: str, smoke: bool) -> subprocess.Popen[str]:
    """Start a plan of a config; with `memory` a search for the longest sequence on such a GPU."""
    command = [sys.executable, "-m", "trainer.command", "plan", "--json", "--config", str(path)]
    command += ["--nodes", "1", "--gpus", str(count)]
    if memory:
        command = [sys.executable, "-m", "benchmarks.gpu_longest", str(path), str(count), memory]
        command += ["--smoke"][:smoke]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )


def measured(
    arm: str, shared: dict[str, Any], count: int, smoke: bool, ends: float, predicted: int
) -> Row:
    """Return the result of an arm's first process; or why there is none."""
    if reason := missing(arm):
        return {"note": reason}
    if ARMS[arm].memory and not predicted:
        return {"note": "left out: no plan says where to begin"}
    with tempfile.TemporaryDirectory(prefix="meshloom-gpu-") as folder:
        config = own_json(arm, shared, Path(folder))
        if predicted:
            config["trainer"]["data"] |= {"sequence_length": predicted}
        (Path(folder) / "config.json").write_text(json.dumps(config))
        proof = certified(config) if ARMS[arm].own else {}
        command = [sys.executable, __file__, "--work", arm, folder, *["--smoke"][:smoke]]
        port = free_port()
        started = time.monotonic()
        logs = [open(f"{folder}/{rank}.log", "w+") for rank in range(count)]
        processes = [
            subprocess.Popen(
                command,
                env={**os.environ, **environment_of(rank, count, port)},
                stdout=logs[rank],
                stderr=logs[rank],
            )
            for rank in range(count)
        ]
        while any(p.poll() is None for p in processes) and time.monotonic() < ends:
            if any(p.poll() for p in processes):  # the others wait for it
                time.sleep(2)
                break
            time.sleep(0.2)
        codes = [process.poll() for process in processes]
        for process in processes:
            process.kill()
            process.wait()
        path = Path(f"{folder}/result.json")
        result = proof | (json.loads(path.read_text()) if path.is_file() else {})
        if any(codes):
            first = next(rank for rank, code in enumerate(codes) if code)
            logs[first].seek(0)
            lines = [text.strip() for text in logs[first] if "Error" in text or "refus" in text]
            result["note"] = f"failed: {(lines or [f'exit code {codes[first]}'])[-1][:160]}"
        elif None in codes:
            result["note"] = f"stopped after {time.monotonic() - started:.0f} s"
        return result


if __name__ == "__main__":
    sys.exit(main())
