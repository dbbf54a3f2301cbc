"""Rung 10, products: pipeline x ZeRO-3 x activation checkpointing, and the 3-D pipeline x tensor x data.

    python examples/ladder/10_pipeline_zero3.py           # 2 stages x 2 shards, blocks computed again: 4 ranks
    python examples/ladder/10_pipeline_zero3.py --llama   # 2 stages x 2 tensor ranks x 2 data ranks: 8 ranks

The first is the ladder's model by `trainer.train`. DeepSpeed asserts under a pipeline with ZeRO-2 and 3; the `mesh`
engine runs the product. Tensor parallel needs a plan, which own modules have not, so the 3-D product is that of a tiny
Llama by the command line, `ds_configs/megatron_3d.json`, beside the same JSON in one process.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import trainer

parser = argparse.ArgumentParser()
parser.add_argument("--llama", action="store_true")
for name, default in {"steps": 5, "batch": 16, "width": 32, "blocks": 2}.items():
    parser.add_argument(f"--{name}", type=int, default=default)
args, seeded, folder = parser.parse_args(), torch.Generator().manual_seed(1), tempfile.mkdtemp()
images, labels = torch.randn(args.batch, 28, 28, generator=seeded), torch.randint(10, (args.batch,), generator=seeded)


def build():
    torch.manual_seed(0)
    block = {"dim_feedforward": 4 * args.width, "dropout": 0.0, "batch_first": True, "norm_first": True}
    layers = (nn.TransformerEncoderLayer(args.width, args.width // 16, **block) for _ in range(args.blocks))
    return nn.Sequential(nn.Linear(28, args.width), *layers, nn.Flatten(1), nn.Linear(28 * args.width, 10))


def train(model):
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    for _ in range(args.steps + 1):  # the last one shows the loss after `steps` updates
        loss = cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def own_module():
    config = {"train_batch_size": args.batch, "gradient_accumulation_steps": 2, "gradient_clipping": 0.0}
    config |= {"optimizer": {"type": "Adam", "params": {"lr": 1e-4}}, "zero_optimization": {"stage": 3}}
    config |= {"pipeline": {"stages": 2}, "trainer": {"activation_checkpointing": "full", "steps": args.steps + 1}}
    config["trainer"] |= {"data": {"evaluation_fraction": 0}, "run": {"folder": folder}}
    given = {"model": build, "data": torch.utils.data.TensorDataset(images, labels), "processes": 4, "quiet": True}
    given["loss"] = lambda output, target: (cross_entropy(output, target, reduction="sum"), len(target))
    return trainer.train(config, **given).losses[-1], train(build())


def llama(name, processes, *overrides):
    given = {"log.every": 1, "steps": args.steps + 1, "run.folder": folder, "run.name": name, "evaluation.samples": 1}
    given |= {"data.sequence_length": 32, "generate.prompt": "null"}
    command = [sys.executable, "-m", "trainer.command", "train", "--config", "megatron_3d", "--processes", processes]
    options = [f"trainer.{key}={value}" for key, value in given.items()]
    options += ["train_batch_size=8", "train_micro_batch_size_per_gpu=auto"]  # at any number of processes
    subprocess.run([*command, *options, *overrides], check=True, stdout=subprocess.DEVNULL)
    lines = (Path(folder) / name / "metrics.jsonl").read_text().splitlines()
    return [record["loss"] for record in map(json.loads, lines) if "loss" in record][args.steps]


if __name__ == "__main__":
    if args.llama:
        single = ("pipeline.stages=1", "tensor_parallel.autotp_size=1", "zero_optimization.stage=0")
        loss, alone = llama("three", "8"), llama("one", "1", *single)
    else:
        loss, alone = own_module()
    print(
        f"devices: {'8' if args.llama else '4'} ranks, {'2 x 2 x 2, Llama' if args.llama else '2 stages x ZeRO-3 on 2'}"
    )
    print(f"loss after {args.steps} steps {loss:.6f}, difference from one device {abs(loss - alone):.1e}")
