"""Climb the whole ladder: every rung as a process of its own, measured; a table and pictures.

    pip install -e '.[ladder]'
    python examples/ladder/climb.py                  # minutes
    python examples/ladder/climb.py --only FSDP      # those rungs again; the others' rows stay

Writes table.md, ladder.png, activations.png and split_sizes.png, and what they are made of, measured.json, beside this
file, or into `--output`. A rung that can't run here is a row with its reason. A device is one core: each process has
one thread. How it is measured: measure/sitecustomize.py.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
NET = ["--steps", "8", "--width", "128", "--blocks", "4", "--batch", "32"]
TINY = ["--steps", "8"]
EPOCHS = ["--epochs", "2"]
RESNET = ["--steps", "7", "--batch", "16", "--size", "33"]
SPLITS = ["1", "3", "5", "8", "10", "12", "20", "40", "60"]
RUNGS = {
    "1 one device": ["01_one_device", *NET],
    "2 DataParallel": ["02_data_parallel", *NET],
    "2 DataParallel, saved": ["02_data_parallel_saved"],
    "3 DDP": ["03_ddp", *NET],
    "3 DDP, trainer": ["03_ddp", "--by", "meshloom", *NET],
    "4 ToyModel on two devices": ["04_toy_model", *TINY],
    "4 SeqNet on two devices": ["04_seqnet", *EPOCHS],
    "4 ResNet-50 on two devices": ["04_two_devices", *RESNET],
    "5 ResNet-50, pipelined": ["05_pipelined", "--split", "8", "--repeats", "1", *RESNET],
    "5 ResNet-50, two stages": ["05_pipelined_by_stages", "--split", "8", *RESNET],
    "6 DDP x two devices": ["06_ddp_two_devices", *NET],
    "7 ZeRO-1": ["07_zero", "--stage", "1", *NET],
    "7 ZeRO-2": ["07_zero", "--stage", "2", *NET],
    "7 ZeRO-2, bare DeepSpeed": ["07_zero", "--stage", "2", "--by", "deepspeed", *NET],
    "7 ZeRO-3": ["07_zero", "--stage", "3", *NET],
    "7 ZeRO-2, offload": ["07_zero", "--stage", "2", "--offload", *NET],
    "7 ZeRO-2, Llama, imported": ["07_from_deepspeed", *TINY],
    "7 ZeRO-2, bf16": ["07_zero", "--stage", "2", "--precision", "bf16", *NET],
    "8 tensor parallel": ["08_tensor_parallel", *NET],
    "8 sequence parallel": ["08_sequence_parallel", *NET],
    "9 FSDP": ["09_fsdp_hsdp", *NET],
    "9 HSDP, 4 ranks": ["09_fsdp_hsdp", "--mesh", "2", "2", *NET],
    "9 HSDP, trainer": ["09_fsdp_hsdp", "--mesh", "2", "2", "--by", "meshloom", *NET],
    "9 HYBRID_SHARD, 4 ranks": ["09_hybrid_inside_ddp", *TINY],
    "10 pipeline x ZeRO-3, 4 ranks": ["10_pipeline_zero3", *NET],
    "10 3-D, Llama, 8 ranks": ["10_three_axes", "--steps", "4"],
    "11 recompute none": ["11_activation_checkpointing", "--mode", "none", *NET],
    "11 recompute every:2": ["11_activation_checkpointing", "--mode", "every:2", *NET],
    "11 recompute selective": ["11_activation_checkpointing", "--mode", "selective", *NET],
    "11 recompute full": ["11_activation_checkpointing", "--mode", "full", *NET],
    "12 SeqNet, MLflow": ["12_mlflow", *EPOCHS],
    "13 your own module": ["13_own_module", *TINY],
}
SWEEP = ["05_pipelined", "--size", "33", "--batch", "120", "--steps", "0", "--split", "60", "--splits", *SPLITS]
STAGES = ["05_pipelined_by_stages", "--size", "33", "--batch", "120", "--steps", "3", "--split", "60"]
STAGES += ["--splits", "10", "20", "40"]
NOTES = """
Memory and traffic in MiB, of the rank that takes most; gradients, optimizer state and parameters as they are after
a backward pass, activations as the peak of what a step allocates and frees again (rung 2 makes most of its own in
threads, which the profiler does not see). Times are those of this run and this machine: "ms a step" by the clock, "CPU
ms" what the busiest rank worked. DeepSpeed keeps float32 masters beside float32 weights, and counts them to its
optimizer; gloo makes a reduce-scatter of an all-reduce, and is counted as what was asked of it.
"""
KINDS = ("parameters", "gradients", "optimizer", "activations")
LAST = re.compile(r"loss after \d+ (?:steps|epochs) (\S+), difference from one device (\S+)")
TIMED = re.compile(r"^(.+): (\S+) s a step, \+- (\S+)$", re.MULTILINE)


def run(script, *arguments, timeout=900):
    """What a script printed, and what its ranks measured; the reason in place of both where it can't run."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.pathsep.join([str(HERE / "measure"), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "PYTHONPATH": path, "LADDER_MEASURE": folder, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(HERE / f"{script}.py"), *arguments]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        try:
            done = subprocess.run(command, env=environment, timeout=timeout, check=False, **pipes)
        except subprocess.TimeoutExpired:
            return {"reason": f"no end after {timeout} s"}
        if done.returncode or not (last := LAST.search(done.stdout)):
            return {"reason": (done.stdout.strip().splitlines() or ["nothing printed"])[-1][:120]}
        files = [json.loads(file.read_text()) for file in Path(folder).glob("*.json")]
    result = {"loss": float(last[1]), "difference": float(last[2])}
    result["times"] = [(label, float(mean), float(deviation)) for label, mean, deviation in TIMED.findall(done.stdout)]
    return result | cost(files)


def cost(files):
    """Of the rank that takes the most; of several runs in one script, the first."""
    ranks = [file for file in files if file["rank"] >= 0] or files
    first = {file["rank"]: file for file in sorted(ranks, key=lambda file: -file["begun"])}.values()
    if not first:
        return {}
    most = max(first, key=lambda file: sum(file[kind] for kind in KINDS))
    times = {key: max(statistics.median(file[key] or [0]) for file in first) for key in ("seconds", "cpu_seconds")}
    return {key: most[key] for key in (*KINDS, "communicated")} | times | {"ranks": len(first)}


def mebi(number):
    return f"{number / 2**20:.2f}"


def row(label, result):
    if "reason" in result:
        return f"| {label} | can't run here: {result['reason']} | | | | | | | | |"
    memory = [mebi(result[kind]) if kind in result else "" for kind in KINDS]
    sent = ", ".join(f"{name} {mebi(number)}" for name, number in sorted(result.get("communicated", {}).items()))
    times = [f"{result[key] * 1000:.0f}" if result.get(key) else "" for key in ("seconds", "cpu_seconds")]
    cells = [label, f"{result['loss']:.6f}", f"{result['difference']:.0e}", *memory, sent or "-", *times]
    return "| " + " | ".join(cells) + " |"


def table(results):
    head = ["rung", "loss", "difference", *KINDS, "communicated a step", "ms a step", "CPU ms"]
    lines = ["| " + " | ".join(head) + " |", "| --- | --- | --- | ---: | ---: | ---: | ---: | --- | ---: | ---: |"]
    return "\n".join([*lines, *(row(label, results[label]) for label in RUNGS if label in results)]) + "\n" + NOTES


def bars(axis, results, labels, parts_of, title):
    found = sorted({name for label in labels for name in parts_of(results[label])})
    names = [kind for kind in KINDS if kind in found] or found
    left = dict.fromkeys(labels, 0.0)
    for name in names:
        widths = [parts_of(results[label]).get(name, 0) / 2**20 for label in labels]
        axis.barh(labels, widths, left=list(left.values()), label=name)
        left = {label: left[label] + width for label, width in zip(labels, widths, strict=True)}
    axis.set_xlabel(title)
    axis.legend(fontsize=7)


def draw(results, output):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    labels = [label for label in RUNGS if NET[-1] in RUNGS[label] and "activations" in results.get(label, {})]
    figure, axes = pyplot.subplots(1, 3, figsize=(15, 6), sharey=True, layout="constrained")
    bars(axes[0], results, labels, lambda r: {kind: r[kind] for kind in KINDS}, "MiB a rank, at most")
    bars(axes[1], results, labels, lambda r: r["communicated"], "MiB handed to collectives, a rank and step")
    axes[2].barh(labels, [1000 * results[label]["cpu_seconds"] for label in labels], color="grey")
    axes[2].set_xlabel("CPU ms a step, of the busiest rank")
    axes[0].invert_yaxis()
    figure.savefig(output / "ladder.png", dpi=90)

    figure, axis = pyplot.subplots(figsize=(6, 4), layout="constrained")
    for label in (label for label in labels if label.startswith("11 ")):
        point = results[label]["activations"] / 2**20, 1000 * results[label]["cpu_seconds"]
        axis.plot(*point, "o")
        axis.annotate(label.removeprefix("11 recompute "), point, xytext=(6, 4), textcoords="offset points")
    axis.margins(0.15)
    axis.set(xlabel="peak of activations in MiB", ylabel="CPU ms a step", xlim=(0, None), ylim=(0, None))
    figure.savefig(output / "activations.png", dpi=90)

    if not any("times" in results.get(key, {}) for key in ("sweep", "stages")):
        return
    figure, axis = pyplot.subplots(figsize=(7, 4), layout="constrained")
    lines = ("sweep", "split ", "two devices, pipelined"), ("stages", "stages, split ", "two ranks, 1F1B")
    for key, prefix, name in lines:
        timed = [time for time in results.get(key, {}).get("times", ()) if time[0].startswith(prefix)]
        sizes = [int(label.removeprefix(prefix)) for label, _, _ in timed]
        axis.errorbar(sizes, [t[1] for t in timed], [t[2] for t in timed], fmt="o-", capsize=3, label=name)
    for color, (label, mean, deviation) in enumerate(results.get("sweep", {}).get("times", ())[:2], 2):
        axis.axhline(mean, color=f"C{color}", linestyle="--", label=label)
        axis.axhspan(mean - deviation, mean + deviation, color=f"C{color}", alpha=0.15)
    axis.set(xlabel="split size, of a batch of 120", ylabel="s a step", ylim=(0, None))
    axis.legend()
    figure.savefig(output / "split_sizes.png", dpi=90)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=HERE)
    parser.add_argument("--only", help="rungs whose name has this in it, or sweep, or stages")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    measured = args.output / "measured.json"
    results = json.loads(measured.read_text()) if args.only and measured.exists() else {}
    for label, command in (RUNGS | {"sweep": SWEEP, "stages": STAGES}).items():
        if args.only is None or args.only in label:
            begun = time.perf_counter()
            results[label] = run(*command)
            print(row(label, results[label]), f"{time.perf_counter() - begun:.0f} s", flush=True)
            measured.write_text(json.dumps(results, indent=1) + "\n")
            (args.output / "table.md").write_text(table(results))  # which is whole before the sweeps begin
    print(table(results))
    draw(results, args.output)


if __name__ == "__main__":
    main()
