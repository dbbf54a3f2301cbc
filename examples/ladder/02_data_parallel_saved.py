"""Rung 2 again, nn.DataParallel with a loader and `torch.save`, as tutorials have it; and Meshloom beside it.

    python examples/ladder/02_data_parallel_saved.py

`nn.DataParallel` prefixes the names of all parameters with `module.`: what is saved is `model.module.state_dict()`,
which a plain model loads. It takes all GPUs of the machine by default; on the CPU it just calls the module. Meshloom
starts a process for each GPU instead (two on the CPU), and writes the plain model to `final/`, which `meshloom.open`
opens.

A tutorial's loader would have `shuffle=True`. This one draws its samples in Meshloom's order for seed 0, so that the
losses can be compared. The last batch of an epoch is smaller in such a tutorial; here the number of samples is a
multiple of the batch, as Meshloom's steps are all of one size.
"""

import argparse
import os
import tempfile

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, Dataset

import meshloom
from meshloom.data.order import KEYED, sample_ids

parser = argparse.ArgumentParser()
RANKS = torch.cuda.device_count() or 2
for name, default in {"ranks": RANKS, "epochs": 3, "batch": 16 * RANKS, "samples": 64 * RANKS}.items():
    parser.add_argument(f"--{name}", type=int, default=default)
args = parser.parse_args()
GPUS = torch.cuda.device_count()
DEVICE = "cuda:0" if GPUS else "cpu"


class RandomDataset(Dataset):
    def __init__(self, size, length):
        seeded = torch.Generator().manual_seed(1)
        self.data = torch.randn(length, size, generator=seeded)

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        return self.data[index], self.data[index, :2]  # the target: two of the inputs


class Model(nn.Module):
    def __init__(self, input_size, output_size):
        super().__init__()
        self.fc = nn.Linear(input_size, output_size)

    def forward(self, inputs):
        return self.fc(inputs)


def build():
    torch.manual_seed(0)
    return Model(5, 2)


def train(model, data):
    """Return the mean loss of the last epoch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(args.epochs):
        running_loss = 0.0
        order = sample_ids(0, epoch * len(data), len(data), len(data), KEYED).tolist()
        loader = DataLoader(data, args.batch, sampler=order)
        for inputs, targets in loader:
            outputs = model(inputs.to(DEVICE))
            loss = mse_loss(outputs, targets.to(DEVICE))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            running_loss += loss.item()
        print(f"Epoch [{epoch + 1}/{args.epochs}], Loss: {running_loss / len(loader):.4f}")
    return running_loss / len(loader)


def by_meshloom(data):
    config = {
        "train_batch_size": args.batch,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 0},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "trainer": {
            "epochs": args.epochs,
            "data": {"evaluation_fraction": 0},
            "run": {"folder": tempfile.mkdtemp()},
        },
    }

    def loss_sum(outputs, targets):
        return mse_loss(outputs, targets, reduction="sum"), targets.numel()

    return meshloom.train(config, model=build, data=data, loss=loss_sum, processes=args.ranks)


if __name__ == "__main__":
    data = RandomDataset(5, args.samples)
    result = by_meshloom(data)
    model = nn.DataParallel(build().to(DEVICE))
    loss = train(model, data)
    path = os.path.join(tempfile.mkdtemp(), "model.pt")
    torch.save(model.module.state_dict(), path)
    plain = build()
    plain.load_state_dict(torch.load(path))
    opened = meshloom.open(result.folder / "final", build)
    apart = (plain(data.data) - opened(data.data)).abs().max().item()
    print(f"the saved model's outputs and those of Meshloom's are {apart:.1e} apart")
    alone = train(build().to(DEVICE), data)
    furthest = max(abs(loss - alone), abs(result.epochs[-1].loss - alone))
    print(f"the loop: loss {loss:.6f}; Meshloom: loss {result.epochs[-1].loss:.6f}")
    print(f"devices: {GPUS or 'no'} GPUs under nn.DataParallel, {args.ranks} ranks under Meshloom")
    print(f"loss after {args.epochs} epochs {loss:.6f}, difference from one device {furthest:.1e}")
