"""Rung 13, a module and a data set of your own: three of the rungs above by changing nothing but the JSON.

    python examples/ladder/13_own_module.py

A module that is not an `nn.Sequential` names its blocks by a pattern. The certificate, `meshloom.verify`, takes the
same arguments, and shows whether each layout is right before a GPU hour is spent.
"""

import argparse
import tempfile

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset, default_collate

import meshloom

parser = argparse.ArgumentParser()
for name, default in {"steps": 5, "batch": 16, "width": 32, "blocks": 4}.items():
    parser.add_argument(f"--{name}", type=int, default=default)
args = parser.parse_args()
LAYOUTS = {
    "ddp": {"zero_optimization": {"stage": 0}},
    "zero3": {"zero_optimization": {"stage": 3}},
    "pipeline x zero2": {
        "zero_optimization": {"stage": 2},
        "pipeline": {"stages": 2},
        "gradient_accumulation_steps": 2,
    },
}


class Parity(Dataset):
    """Eight bits, and whether an odd number of them is set."""

    def __len__(self):
        return args.batch

    def __getitem__(self, index):
        bits = torch.tensor(index) >> torch.arange(8) & 1
        return bits.float(), bits.sum() % 2


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(args.width)
        self.inner = nn.Linear(args.width, args.width)

    def forward(self, x):
        return x + self.inner(self.norm(x)).tanh()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(8, args.width)
        self.head = nn.Linear(args.width, 2)
        self.layers = nn.ModuleList(Residual() for _ in range(args.blocks))

    def forward(self, bits):
        x = self.embed(bits)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def loss_sum(outputs, labels):
    return cross_entropy(outputs, labels, reduction="sum"), len(labels)


def by_meshloom(layout):
    config = {
        "train_batch_size": args.batch,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
        "trainer": {
            "steps": args.steps + 1,
            "data": {"evaluation_fraction": 0},
            "run": {"folder": tempfile.mkdtemp()},
        },
    }
    own = {"model": Net, "blocks": "layers.*", "data": Parity(), "loss": loss_sum}
    return meshloom.train(config | layout, **own, processes=2, quiet=True).losses[-1]


def one_device():
    model = Net()
    bits, labels = default_collate([Parity()[index] for index in range(args.batch)])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(args.steps + 1):  # the last one shows the loss after `steps` updates
        loss = cross_entropy(model(bits), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


if __name__ == "__main__":
    alone = one_device()
    losses = {name: by_meshloom(layout) for name, layout in LAYOUTS.items()}
    for name, loss in losses.items():
        print(f"{name}: {loss:.6f}")
    furthest = max(losses.values(), key=lambda loss: abs(loss - alone))
    print(f"devices: 2 ranks, {', '.join(losses)}")
    print(f"loss after {args.steps} steps {furthest:.6f}, difference from one device {abs(furthest - alone):.1e}")
