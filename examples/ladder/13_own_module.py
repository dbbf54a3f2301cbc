"""Rung 13, an own module and data set: three of the rungs above by changing only the JSON.

    python examples/ladder/13_own_module.py

A module that is no `nn.Sequential` names its blocks by a pattern. The certificate, `trainer.verify`, takes the same
arguments, and proves each layout before a GPU hour is spent.
"""

import argparse
import tempfile

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import trainer

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


class Parity(torch.utils.data.Dataset):
    """Eight bits, and whether an odd number of them is set."""

    def __len__(self):
        return args.batch

    def __getitem__(self, index):
        bits = torch.tensor(index) >> torch.arange(8) & 1
        return bits.float(), bits.sum() % 2


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(args.width), nn.Linear(args.width, args.width)

    def forward(self, x):
        return x + self.inner(self.norm(x)).tanh()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Linear(8, args.width), nn.Linear(args.width, 2)
        self.layers = nn.ModuleList(Residual() for _ in range(args.blocks))

    def forward(self, bits):
        x = self.embed(bits)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def loss_sum(output, target):
    return cross_entropy(output, target, reduction="sum"), len(target)


def one_device():
    model, (bits, odd) = Net(), torch.utils.data.default_collate([Parity()[i] for i in range(args.batch)])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(args.steps + 1):  # the last one shows the loss after `steps` updates
        loss = cross_entropy(model(bits), odd)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


if __name__ == "__main__":
    own, losses = {"model": Net, "data": Parity(), "loss": loss_sum, "blocks": "layers.*"}, {}
    for name, layout in LAYOUTS.items():
        config = {"train_batch_size": args.batch, "optimizer": {"type": "Adam", "params": {"lr": 1e-3}}, **layout}
        config |= {"gradient_clipping": 0.0, "trainer": {"steps": args.steps + 1, "data": {"evaluation_fraction": 0}}}
        config["trainer"]["run"] = {"folder": tempfile.mkdtemp()}
        losses[name] = trainer.train(config, **own, processes=2, quiet=True).losses[-1]
        print(f"{name}: {losses[name]:.6f}")
    alone = one_device()
    furthest = max(losses.values(), key=lambda loss: abs(loss - alone))
    print(f"devices: 2 ranks, {', '.join(losses)}")
    print(f"loss after {args.steps} steps {furthest:.6f}, difference from one device {abs(furthest - alone):.1e}")
