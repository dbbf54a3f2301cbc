"""Rung 10 again, three axes: pipeline x tensor x data, 2 x 2 x 2 ranks, of a tiny Llama by the command line.

    python examples/ladder/10_three_axes.py

The config is `ds_configs/megatron_3d.json`, whose data axis is ZeRO-2. Tensor parallel has to know which matrices to
cut by columns and which by rows; Meshloom knows that of transformers' families, and not of your own module. So
this is a Llama. The same JSON with each axis set to 1, in one process, is the loss to have.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=5)
args = parser.parse_args()
folder = Path(tempfile.mkdtemp())
SIZES = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": "auto",  # as fits the number of processes
    "trainer.data.sequence_length": 32,
    "trainer.steps": args.steps + 1,
    "trainer.evaluation.samples": 1,
    "trainer.generate.prompt": "null",
    "trainer.log.every": 1,
    "trainer.run.folder": folder,
}
ONE = {"pipeline.stages": 1, "tensor_parallel.autotp_size": 1, "zero_optimization.stage": 0}


def train(name, processes, overrides):
    """Return the loss after `steps` updates."""
    command = [sys.executable, "-m", "trainer.command", "train", "--config", "megatron_3d"]
    values = {"trainer.run.name": name, **SIZES, **overrides}
    words = [f"{key}={value}" for key, value in values.items()]
    subprocess.run([*command, "--processes", str(processes), *words], check=True, stdout=subprocess.DEVNULL)
    records = map(json.loads, (folder / name / "metrics.jsonl").read_text().splitlines())
    losses = [record["loss"] for record in records if "loss" in record]
    return losses[args.steps]


if __name__ == "__main__":
    loss = train("three_axes", 8, {})
    alone = train("one", 1, ONE)
    print("devices: 8 ranks, 2 x 2 x 2, Llama")
    print(f"loss after {args.steps} steps {loss:.6f}, difference from one device {abs(loss - alone):.1e}")
