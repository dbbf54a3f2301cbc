"""Rung 6, DDP x model parallel: two machines of two devices each. A machine holds the model, a half on each device.

    python examples/ladder/06_ddp_two_devices.py

starts two torchrun agents on this machine, as two machines would have one each. On real machines, each runs

    torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint HEAD:29500 \\
        examples/ladder/06_ddp_two_devices.py

A process drives both devices of its machine. DDP is given no `device_ids`, as the model places its layers itself. On
one machine with four GPUs each agent takes two of them.

DDP no longer copies a model to several devices in one process: `device_ids` with more than one of them is a ValueError,
and each device gets a process of its own (`03_ddp.py`).
"""

import argparse
import os
import socket
import subprocess
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

parser = argparse.ArgumentParser()
for name, default in {"steps": 5, "batch": 16, "width": 32, "blocks": 2}.items():
    parser.add_argument(f"--{name}", type=int, default=default)
args = parser.parse_args()
DEVICES = ("cuda:0", "cuda:1") if torch.cuda.device_count() >= 2 else ("cpu", "cpu")
seeded = torch.Generator().manual_seed(1)
images = torch.randn(args.batch, 28, 28, generator=seeded)
labels = torch.randint(10, (args.batch,), generator=seeded)


class Halves(nn.Module):
    def __init__(self, first, second):
        super().__init__()
        torch.manual_seed(0)
        block = {"dim_feedforward": 4 * args.width, "dropout": 0.0, "batch_first": True, "norm_first": True}
        layers = (nn.TransformerEncoderLayer(args.width, args.width // 16, **block) for _ in range(args.blocks))
        whole = nn.Sequential(nn.Linear(28, args.width), *layers, nn.Flatten(1), nn.Linear(28 * args.width, 10))
        middle = 1 + args.blocks // 2
        self.devices = first, second
        self.first = whole[:middle].to(first)
        self.second = whole[middle:].to(second)

    def forward(self, images):
        hidden = self.first(images.to(self.devices[0]))
        return self.second(hidden.to(self.devices[1]))


def train(model, images, labels):
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    for _ in range(args.steps + 1):  # the last one shows the loss after `steps` updates
        outputs = model(images)
        loss = cross_entropy(outputs, labels.to(outputs.device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.detach()


def work(rank):
    dist.init_process_group("gloo" if DEVICES[0] == "cpu" else "nccl")
    try:
        model = nn.parallel.DistributedDataParallel(Halves(*DEVICES), gradient_as_bucket_view=True)
        loss = train(model, images[rank::2], labels[rank::2]) / 2
        dist.all_reduce(loss)
        if rank == 0:
            alone = train(Halves(DEVICES[0], DEVICES[0]), images, labels)
            print(f"devices: {DEVICES[0]} and {DEVICES[1]} in each of two agents")
            print(f"loss after {args.steps} steps {loss:.6f}, difference from one device {abs(loss - alone):.1e}")
    finally:
        dist.destroy_process_group()


def start_agents():
    """Start two agents, and return the exit code of the one that fails, or 0."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]  # a free one
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--rdzv-backend=c10d"]
    command = [*torchrun, f"--rdzv-endpoint=127.0.0.1:{port}", *sys.argv]
    agents = []
    for gpus in ("0,1", "2,3"):
        own = {"CUDA_VISIBLE_DEVICES": gpus} if torch.cuda.device_count() >= 4 else {}
        agents.append(subprocess.Popen(command, env=os.environ | own))
    return max(agent.wait() for agent in agents)


if __name__ == "__main__":
    if "RANK" in os.environ:
        work(int(os.environ["RANK"]))
    else:
        sys.exit(start_agents())
