"""Rung 9 again, FSDP(sharding_strategy=HYBRID_SHARD) inside DDP: often written, and not what one wants.

    python examples/ladder/09_hybrid_inside_ddp.py

HYBRID_SHARD alone is the whole of HSDP: it shards within a node, and all-reduces the gradients of the shards between
nodes. DDP around it is meant to do that second part, which is done already, and it breaks the first. DDP believes that
all ranks have the same parameters. So its constructor sends rank 0's shard to the ranks that have another one, whose
weights are silently lost. In `backward` its hooks, made for the shard, meet the gathered parameter: an error.

Use HYBRID_SHARD without DDP, or `fully_shard` over a mesh of two axes (`09_fsdp_hsdp.py --mesh 2 2`), which is
what PyTorch develops further. All three are tried here, on 2 nodes ("replicate") x 2 ranks ("shard").
"""

import argparse
import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.run
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.nn.functional import cross_entropy

parser = argparse.ArgumentParser()
for name, default in {"steps": 5, "batch": 16, "width": 32}.items():
    parser.add_argument(f"--{name}", type=int, default=default)
args = parser.parse_args()
RANK = int(os.environ.get("RANK", -1))
DEVICE = torch.device("cuda", RANK) if torch.cuda.device_count() >= 4 else torch.device("cpu")
seeded = torch.Generator().manual_seed(1)
images = torch.randn(args.batch, 28, 28, generator=seeded).to(DEVICE)
labels = torch.randint(10, (args.batch,), generator=seeded).to(DEVICE)


def build():
    torch.manual_seed(0)
    hidden = nn.Linear(784, args.width), nn.Tanh()
    return nn.Sequential(nn.Flatten(1), *hidden, nn.Linear(args.width, 10)).to(DEVICE)


def hybrid_shard(mesh):
    strategy = ShardingStrategy.HYBRID_SHARD
    return FullyShardedDataParallel(build(), device_mesh=mesh, sharding_strategy=strategy, device_id=DEVICE)


def train(model, images, labels):
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(args.steps + 1):  # the last one shows the loss after `steps` updates
        loss = cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.detach()


def loss_of_all(model):
    loss = train(model, images[RANK::4], labels[RANK::4]) / 4
    dist.all_reduce(loss)
    return loss


def try_inside_ddp(mesh):
    model = hybrid_shard(mesh)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    model = nn.parallel.DistributedDataParallel(model)
    if RANK == 1:
        same = all(map(torch.equal, before, model.parameters()))
        print(f"HYBRID_SHARD inside DDP: rank 1 has {'its own' if same else 'another'} shard now", flush=True)
    dist.barrier()
    try:
        loss = loss_of_all(model)
        message = f"loss {loss:.6f}"
    except RuntimeError as error:
        message = str(error).splitlines()[0]
    if RANK == 0:
        print(f"HYBRID_SHARD inside DDP: {message}", flush=True)


def work():
    if DEVICE.type == "cuda":
        torch.cuda.set_device(DEVICE)
    mesh = dist.init_device_mesh(DEVICE.type, (2, 2), mesh_dim_names=("replicate", "shard"))
    try:
        hybrid_loss = loss_of_all(hybrid_shard(mesh))
        loss = loss_of_all(fully_shard(build(), mesh=mesh))
        if RANK == 0:
            print(f"HYBRID_SHARD alone: loss {hybrid_loss:.6f}")
        try_inside_ddp(mesh)
        if RANK == 0:
            alone = train(build(), images, labels)
            print(f"devices: 4 ranks on {DEVICE.type}, fully_shard over 2 x 2")
            print(f"loss after {args.steps} steps {loss:.6f}, difference from one device {abs(loss - alone):.1e}")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    if RANK >= 0:
        work()
    else:
        torch.distributed.run.main(["--standalone", "--nproc-per-node=4", *sys.argv])
