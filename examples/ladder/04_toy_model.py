"""Rung 4, ToyModel on two devices: each layer is put on a device, and `forward` carries activations between them.

    python examples/ladder/04_toy_model.py

Model, loss (MSE) and optimizer (SGD) are those of PyTorch's tutorial on model parallelism. The training loop is that of
one device, but for one thing: the labels have to be where the outputs are. Autograd remembers the copy of the
activations, and `backward` carries their gradients back over it. On the CPU both devices are `cpu`: the code is the
same, and nothing is copied.
"""

import argparse

import torch
from torch import nn
from torch.nn.functional import mse_loss

parser = argparse.ArgumentParser()
for name, default in {"steps": 5, "batch": 20}.items():
    parser.add_argument(f"--{name}", type=int, default=default)
args = parser.parse_args()
DEVICES = ("cuda:0", "cuda:1") if torch.cuda.device_count() >= 2 else ("cpu", "cpu")


class ToyModel(nn.Module):
    def __init__(self, first, second):
        super().__init__()
        self.first, self.second = first, second
        self.net1 = nn.Linear(10, 10).to(first)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(10, 5).to(second)

    def forward(self, inputs):
        hidden = self.relu(self.net1(inputs.to(self.first)))
        return self.net2(hidden.to(self.second))


def train(first, second):
    torch.manual_seed(0)
    model = ToyModel(first, second)
    inputs = torch.randn(args.batch, 10)
    labels = torch.randn(args.batch, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(args.steps + 1):  # the last one shows the loss after `steps` updates
        optimizer.zero_grad()
        outputs = model(inputs)
        loss = mse_loss(outputs, labels.to(outputs.device))
        loss.backward()
        optimizer.step()
    return loss.item()


if __name__ == "__main__":
    loss = train(*DEVICES)
    alone = train(DEVICES[0], DEVICES[0])
    print(f"devices: {' and '.join(DEVICES)}, ToyModel")
    print(f"loss after {args.steps} steps {loss:.6f}, difference from one device {abs(loss - alone):.1e}")
