"""Rung 9 again, FSDP(sharding_strategy=HYBRID_SHARD) inside DDP: often written, and not what one wants.

    python examples/ladder/09_hybrid_inside_ddp.py

HYBRID_SHARD alone is the whole of HSDP: it shards within a node, and all-reduces the gradients of the shards across
nodes. DDP around it is meant to do that second part, which is done already, and it breaks the first. DDP takes all
ranks for equal, so its constructor sends rank 0's shard to ranks that hold another one: their weights are lost, without
a word. Its hooks were made for the shard, and see the gathered parameter: `backward` raises an error. With
`use_orig_params=True` the shards differ in shape, and the constructor raises one.

Use instead: HYBRID_SHARD without DDP, or, since PyTorch 2.6 the way that is developed further, `fully_shard` over a
2-D mesh (`09_fsdp_hsdp.py --mesh 2 2`). All are tried here, on 2 nodes (replicate) x 2 ranks (shard).
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
DEVICE = "cuda" if torch.cuda.device_count() >= 4 else "cpu"
seeded = torch.Generator().manual_seed(1)
images = torch.randn(args.batch, 28, 28, generator=seeded).to(DEVICE)
labels = torch.randint(10, (args.batch,), generator=seeded).to(DEVICE)


def build():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(1), nn.Linear(784, args.width), nn.Tanh(), nn.Linear(args.width, 10))
    return net.to(DEVICE)


def hybrid(mesh):
    strategy = ShardingStrategy.HYBRID_SHARD
    device = torch.device("cpu") if DEVICE == "cpu" else torch.device("cuda", RANK)
    return FullyShardedDataParallel(build(), device_mesh=mesh, sharding_strategy=strategy, device_id=device)


def inside_ddp(mesh):
    model = hybrid(mesh)
    before = [shard.detach().clone() for shard in model.parameters()]
    model = nn.parallel.DistributedDataParallel(model)
    kept = all(torch.equal(shard, own) for shard, own in zip(model.parameters(), before, strict=True))
    if RANK == 1:
        print(f"DDP(HYBRID_SHARD): rank 1 holds {'its own' if kept else 'another'} shard now", flush=True)
    return model


def by_fully_shard(mesh):
    return fully_shard(build(), mesh=mesh)


def train(model, images, labels):
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(args.steps + 1):  # the last one shows the loss after `steps` updates
        loss = cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.detach()


def work():
    if DEVICE == "cuda":
        torch.cuda.set_device(RANK)
    try:
        mesh = dist.init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("replicate", "shard"))
        for name, wrap in (("HYBRID_SHARD", hybrid), ("fully_shard", by_fully_shard)):
            loss = train(wrap(mesh), images[RANK::4], labels[RANK::4]) / 4
            dist.all_reduce(loss)
            if RANK == 0:
                print(f"{name}: {loss:.6f}", flush=True)
        try:
            train(inside_ddp(mesh), images[RANK::4], labels[RANK::4])
        except RuntimeError as error:
            if RANK == 0:
                print(f"DDP(HYBRID_SHARD): {str(error).splitlines()[0]}", flush=True)
        alone = train(build(), images, labels)
        if RANK == 0:
            print(f"devices: 4 ranks on {DEVICE}, the loss is that of fully_shard")
            print(f"loss after {args.steps} steps {loss:.6f}, difference from one device {abs(loss - alone):.1e}")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    work() if RANK >= 0 else torch.distributed.run.main(["--standalone", "--nproc-per-node=4", *sys.argv])
