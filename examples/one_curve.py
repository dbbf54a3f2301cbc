"""One JSON under four layouts, and one loss curve: docs/one_curve.png.

    pip install -e .
    python examples/one_curve.py [--steps 60] [--output docs/one_curve.png]

Each layout trains on two processes, with the same seed, data and global batch. The picture says how
far the losses are from those of one process.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt

ROOT = Path(__file__).resolve().parent.parent
SAME = [
    "train_batch_size=8",
    "train_micro_batch_size_per_gpu=auto",
    "gradient_accumulation_steps=auto",
    "bf16.enabled=false",
    "trainer.log.every=1",
    "trainer.evaluation.samples=8",
    "trainer.data.sequence_length=64",
]
LAYOUTS = {
    "one process": (1, ["zero_optimization.stage=0", "trainer.engine=mesh"]),
    "ZeRO-2, by DeepSpeed": (2, ["zero_optimization.stage=2", "trainer.engine=deepspeed"]),
    "FSDP, by Accelerate": (2, ["zero_optimization.stage=3", "trainer.engine=accelerate"]),
    "two pipeline stages": (2, ["pipeline.stages=2", "gradient_accumulation_steps=2"]),
    "two tensor ranks": (2, ["tensor_parallel.autotp_size=2"]),
}


def losses(name: str, steps: int, folder: Path) -> list[float]:
    """Train the layout `name`; return the loss of each step."""
    processes, layout = LAYOUTS[name]
    command = [sys.executable, str(ROOT / "launch/train.py"), "--config", "zero2"]
    run = [f"trainer.steps={steps}", f"trainer.run.folder={folder}", f"trainer.run.name={name}"]
    command += ["--processes", str(processes), *SAME, *run, *layout]
    subprocess.run(command, check=True)
    rows = map(json.loads, (folder / name / "metrics.jsonl").read_text().splitlines())
    return [row["loss"] for row in rows if "loss" in row]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--output", type=Path, default=ROOT / "docs/one_curve.png")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = {name: losses(name, options.steps, Path(folder)) for name in LAYOUTS}
    alone = found["one process"]
    figure, axes = plt.subplots(figsize=(7, 3), dpi=150)
    for width, (name, curve) in zip((9, 7, 5, 3, 1), found.items(), strict=True):
        apart = max(abs(a - b) / b for a, b in zip(curve, alone, strict=True))
        label = name if name == "one process" else f"{name}: {apart:.0e} apart"
        axes.plot(range(1, len(curve) + 1), curve, linewidth=width, label=label)
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats a token)")
    axes.legend()
    figure.tight_layout()
    figure.savefig(options.output)


if __name__ == "__main__":
    main()
