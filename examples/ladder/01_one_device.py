"""Rung 1, one device: the model, the data and the loss that all other rungs must give again.

    python examples/ladder/01_one_device.py

The model is a small vision transformer: its tokens are the 28 rows of an image. The data is one batch of noise with
random labels, which it learns by heart. Each step sees the whole batch, so that the loss does not depend on the order
of the data, and another rung has the same loss only if it computes the same.
"""

import argparse

import torch
from torch import nn
from torch.nn.functional import cross_entropy

parser = argparse.ArgumentParser()
for name, default in {"steps": 5, "batch": 16, "width": 32, "blocks": 2}.items():
    parser.add_argument(f"--{name}", type=int, default=default)
args = parser.parse_args()
DEVICE = "cuda:0" if torch.cuda.is_available() else "cpu"


def build():
    torch.manual_seed(0)
    block = {"dim_feedforward": 4 * args.width, "dropout": 0.0, "batch_first": True, "norm_first": True}
    layers = (nn.TransformerEncoderLayer(args.width, args.width // 16, **block) for _ in range(args.blocks))
    return nn.Sequential(nn.Linear(28, args.width), *layers, nn.Flatten(1), nn.Linear(28 * args.width, 10))


def train(model, images, labels):
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    for _ in range(args.steps + 1):  # the last one shows the loss after `steps` updates
        loss = cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


if __name__ == "__main__":
    seeded = torch.Generator().manual_seed(1)
    images = torch.randn(args.batch, 28, 28, generator=seeded).to(DEVICE)
    labels = torch.randint(10, (args.batch,), generator=seeded).to(DEVICE)
    loss = train(build().to(DEVICE), images, labels)
    again = train(build().to(DEVICE), images, labels)
    print(f"devices: {DEVICE}; the difference is that of a second run")
    print(f"loss after {args.steps} steps {loss:.6f}, difference from one device {abs(loss - again):.1e}")
