"""Rung 9 again, what FSDP and HSDP send: the numbers that a step hands to each collective, counted.

    python examples/ladder/09_traffic.py --ranks 4            # FSDP
    python examples/ladder/09_traffic.py --mesh 2 2           # HSDP: 2 nodes ("replicate") of 2 ranks ("shard")

A step gathers the weights of the blocks twice, forward and backward, and the other layers' once, and reduce-scatters
all gradients: within a node under HSDP, over all ranks under FSDP. Each is padded to what the ranks of a shard group
divide. Between the nodes of HSDP goes an all-reduce of a rank's shard: P/S numbers, of P parameters and S ranks in a
node. PyTorch's profiler sees each collective and the shapes of its tensors.
"""

import argparse
import math
import os
import sys
from collections import Counter

os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # the profiler says nothing; it is read at the import
import torch
import torch.distributed as dist
import torch.distributed.run
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

parser = argparse.ArgumentParser()
parser.add_argument("--mesh", type=int, nargs=2, metavar=("REPLICATE", "SHARD"))
for name, default in {"ranks": max(2, torch.cuda.device_count()), "batch": 16, "width": 32, "blocks": 2}.items():
    parser.add_argument(f"--{name}", type=int, default=default)
args = parser.parse_args()
SHAPE = tuple(args.mesh or [args.ranks])
RANKS = math.prod(SHAPE)
DEVICE = "cuda" if torch.cuda.device_count() >= RANKS else "cpu"
seeded = torch.Generator().manual_seed(1)
images = torch.randn(args.batch, 28, 28, generator=seeded)
labels = torch.randint(10, (args.batch,), generator=seeded)


def build():
    torch.manual_seed(0)
    block = {"dim_feedforward": 4 * args.width, "dropout": 0.0, "batch_first": True, "norm_first": True}
    layers = (nn.TransformerEncoderLayer(args.width, args.width // 16, **block) for _ in range(args.blocks))
    return nn.Sequential(nn.Linear(28, args.width), *layers, nn.Flatten(1), nn.Linear(28 * args.width, 10))


def shard(model, mesh):
    for layer in model:
        if isinstance(layer, nn.TransformerEncoderLayer):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)  # what is in none of the blocks


def loss_of(model, rank, ranks):
    """Return this rank's part of the loss."""
    outputs = model(images[rank::ranks].to(DEVICE))
    return cross_entropy(outputs, labels[rank::ranks].to(DEVICE), reduction="sum") / args.batch


def count(events):
    numbers = Counter()
    for event in events:
        sizes = [math.prod(shape) for shape in event.input_shapes or () if shape]
        if event.name == "c10d::_allgather_base_":
            numbers["all-gather"] += max(sizes)  # of the shard and the whole
        if event.name == "c10d::_reduce_scatter_base_":
            numbers["reduce-scatter"] += max(sizes)
            shard = min(sizes)
        if event.name == "c10d::allreduce_":
            numbers["all-reduce between nodes"] += shard  # which was scattered just before
    return numbers


def work(rank):
    if DEVICE == "cuda":
        torch.cuda.set_device(rank)
    axes = ("replicate", "shard") if args.mesh else ("shard",)
    mesh = dist.init_device_mesh(DEVICE, SHAPE, mesh_dim_names=axes)
    try:
        model = shard(build().to(DEVICE), mesh)
        with torch.profiler.profile(record_shapes=True) as profile:
            loss = loss_of(model, rank, RANKS)
            loss.backward()
        loss = loss.detach()
        dist.all_reduce(loss)  # the sum of the ranks' parts
        if rank == 0:
            whole = build().to(DEVICE)
            alone = loss_of(whole, rank=0, ranks=1)
            print(f"parameters: {sum(parameter.numel() for parameter in whole.parameters()):,}")
            for name, number in count(profile.events()).items():
                print(f"{name}: {number:,}")
            print(f"devices: {' x '.join(map(str, SHAPE))} ranks on {DEVICE}")
            print(f"loss after 0 steps {loss:.6f}, difference from one device {abs(loss - alone):.1e}")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        work(int(os.environ["RANK"]))
    else:
        torch.distributed.run.main(["--standalone", f"--nproc-per-node={RANKS}", *sys.argv])
