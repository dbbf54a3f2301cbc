"""Rung 1, one device: the model, the data and the loss that all other rungs must give again.

    python examples/ladder/01_one_device.py

The model is a small vision transformer that takes the 28 rows of an image as its tokens. The data is one batch of noise
with random labels, which it learns by heart; each step sees all of it, so that no rung can hide behind another order.
"""

import argparse

import torch
from torch import nn
from torch.nn.functional import cross_entropy

DEVICE = "cuda:0" if torch.cuda.is_available() else "cpu"


def build(width, blocks):
    torch.manual_seed(0)
    block = {
        "nhead": width // 16,
        "dim_feedforward": 4 * width,
        "dropout": 0.0,
        "batch_first": True,
        "norm_first": True,
    }
    layers = (nn.TransformerEncoderLayer(width, **block) for _ in range(blocks))
    return nn.Sequential(nn.Linear(28, width), *layers, nn.Flatten(1), nn.Linear(28 * width, 10))


def data(batch):
    seeded = torch.Generator().manual_seed(1)
    return torch.randn(batch, 28, 28, generator=seeded), torch.randint(10, (batch,), generator=seeded)


def train(model, images, labels, steps):
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    for _ in range(steps + 1):  # the last one shows the loss after `steps` updates
        loss = cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for name, default in {"steps": 5, "batch": 16, "width": 32, "blocks": 2}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    images, labels = (part.to(DEVICE) for part in data(args.batch))
    loss, again = (train(build(args.width, args.blocks).to(DEVICE), images, labels, args.steps) for _ in range(2))
    print(f"devices: {DEVICE}; the difference is that of a second run")
    print(f"loss after {args.steps} steps {loss:.6f}, difference from one device {abs(loss - again):.1e}")
