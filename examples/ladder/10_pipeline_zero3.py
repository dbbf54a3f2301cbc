"""Rung 10, a product: pipeline x ZeRO-3 x activation checkpointing, 2 stages of 2 ranks each.

    python examples/ladder/10_pipeline_zero3.py

Each stage shards its blocks over its own ranks, and computes them again in the backward pass instead of keeping what
they made. DeepSpeed does not support ZeRO-2 and 3 under a pipeline; the `mesh` engine, which `meshloom.train` takes
here by itself, runs the product. The JSON has each of the three under its own key, as if it were alone.
"""

import argparse
import tempfile

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import meshloom

parser = argparse.ArgumentParser()
for name, default in {"steps": 5, "batch": 16, "width": 32, "blocks": 2}.items():
    parser.add_argument(f"--{name}", type=int, default=default)
args = parser.parse_args()
seeded = torch.Generator().manual_seed(1)
images = torch.randn(args.batch, 28, 28, generator=seeded)
labels = torch.randint(10, (args.batch,), generator=seeded)
config = {
    "train_batch_size": args.batch,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.0,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-4}},
    "pipeline": {"stages": 2},
    "zero_optimization": {"stage": 3},
    "trainer": {
        "activation_checkpointing": "full",
        "steps": args.steps + 1,
        "data": {"evaluation_fraction": 0},
        "run": {"folder": tempfile.mkdtemp()},
    },
}


def build():
    torch.manual_seed(0)
    block = {"dim_feedforward": 4 * args.width, "dropout": 0.0, "batch_first": True, "norm_first": True}
    layers = (nn.TransformerEncoderLayer(args.width, args.width // 16, **block) for _ in range(args.blocks))
    return nn.Sequential(nn.Linear(28, args.width), *layers, nn.Flatten(1), nn.Linear(28 * args.width, 10))


def loss_sum(outputs, labels):
    return cross_entropy(outputs, labels, reduction="sum"), len(labels)


def one_device():
    model = build()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    for _ in range(args.steps + 1):  # the last one shows the loss after `steps` updates
        loss = cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


if __name__ == "__main__":
    data = TensorDataset(images, labels)
    result = meshloom.train(config, model=build, data=data, loss=loss_sum, processes=4, quiet=True)
    loss = result.losses[-1]
    alone = one_device()
    print("devices: 4 ranks, 2 stages x ZeRO-3 on 2")
    print(f"loss after {args.steps} steps {loss:.6f}, difference from one device {abs(loss - alone):.1e}")
