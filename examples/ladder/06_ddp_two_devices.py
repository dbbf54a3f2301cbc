"""Rung 6, DDP x model parallel: two machines of two devices each; each holds the model in halves, a half a device.

    python examples/ladder/06_ddp_two_devices.py          # two torchrun agents, as two machines would have

On real machines, each: torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint HEAD:29500 \\
    examples/ladder/06_ddp_two_devices.py
DDP is given no `device_ids`, as the model decides where it is. With four GPUs on one machine the agents share them out.
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
args, seeded = parser.parse_args(), torch.Generator().manual_seed(1)
images, labels = torch.randn(args.batch, 28, 28, generator=seeded), torch.randint(10, (args.batch,), generator=seeded)
DEVICES = ("cuda:0", "cuda:1") if torch.cuda.device_count() >= 2 else ("cpu", "cpu")


class Halves(nn.Module):
    def __init__(self, devices):
        super().__init__()
        torch.manual_seed(0)
        block = {"dim_feedforward": 4 * args.width, "dropout": 0.0, "batch_first": True, "norm_first": True}
        layers = (nn.TransformerEncoderLayer(args.width, args.width // 16, **block) for _ in range(args.blocks))
        whole = nn.Sequential(nn.Linear(28, args.width), *layers, nn.Flatten(1), nn.Linear(28 * args.width, 10))
        cut = 1 + args.blocks // 2
        self.devices, self.first, self.second = devices, whole[:cut].to(devices[0]), whole[cut:].to(devices[1])

    def forward(self, images):
        return self.second(self.first(images.to(self.devices[0])).to(self.devices[1]))


def train(model, images, labels):
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    for _ in range(args.steps + 1):  # the last one shows the loss after `steps` updates
        output = model(images)
        loss = cross_entropy(output, labels.to(output.device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.detach()


def work(rank):
    dist.init_process_group("gloo" if DEVICES[0] == "cpu" else "nccl")
    model = nn.parallel.DistributedDataParallel(Halves(DEVICES), gradient_as_bucket_view=True)
    loss = train(model, images[rank::2], labels[rank::2]) / 2
    dist.all_reduce(loss)
    if rank == 0:
        alone = train(Halves(DEVICES[:1] * 2), images, labels)
        print(f"devices: {DEVICES[0]} and {DEVICES[1]} in each of two agents")
        print(f"loss after {args.steps} steps {loss:.6f}, difference from one device {abs(loss - alone):.1e}")


if __name__ == "__main__":
    if "RANK" in os.environ:
        work(int(os.environ["RANK"]))
    else:
        probe = socket.create_server(("127.0.0.1", 0))  # a free port
        endpoint = f"--rdzv-endpoint=127.0.0.1:{probe.getsockname()[1]}"
        probe.close()
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--rdzv-backend=c10d", endpoint]
        own = [{"CUDA_VISIBLE_DEVICES": pair} if torch.cuda.device_count() >= 4 else {} for pair in ("0,1", "2,3")]
        agents = [subprocess.Popen([*torchrun, *sys.argv], env=os.environ | environment) for environment in own]
        sys.exit(max(agent.wait() for agent in agents))
