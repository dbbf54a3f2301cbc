"""Rung 9, FSDP shards parameters, gradients and optimizer over all ranks; HSDP within a node, with copies across nodes.

    python examples/ladder/09_fsdp_hsdp.py --ranks 2          # FSDP: a mesh of one axis, "shard"
    python examples/ladder/09_fsdp_hsdp.py --mesh 2 4         # HSDP: 2 nodes (replicate) of 4 ranks (shard)
    python examples/ladder/09_fsdp_hsdp.py --mesh 2 2 --by meshloom

Before a block runs, its ranks gather its weights, and free them afterwards; in the backward pass they gather them again
and reduce-scatter the gradients. Both stay on the axis `shard`, the fast links of a node. On `replicate`, the slow
links, travels the all-reduce of a shard's gradient alone: 1/S of the numbers. What a step hands to each collective is
counted by PyTorch's profiler. `--by meshloom` is the same from a JSON, by `trainer.train`.
"""

import argparse
import math
import os
import sys
import tempfile
from collections import Counter

os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # the profiler is silent
import torch
import torch.distributed as dist
import torch.distributed.run
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--mesh", type=int, nargs=2, metavar=("REPLICATE", "SHARD"))
parser.add_argument("--by", choices=("torch", "meshloom"), default="torch")
for name, default in {"ranks": 2, "steps": 5, "batch": 16, "width": 32, "blocks": 2}.items():
    parser.add_argument(f"--{name}", type=int, default=default)
args = parser.parse_args()
SHAPE = tuple(args.mesh or [args.ranks])
RANKS = math.prod(SHAPE)
DEVICE = "cuda" if torch.cuda.device_count() >= RANKS else "cpu"
seeded = torch.Generator().manual_seed(1)
images = torch.randn(args.batch, 28, 28, generator=seeded)
labels = torch.randint(10, (args.batch,), generator=seeded)
data = TensorDataset(images, labels)


def build():
    torch.manual_seed(0)
    block = {"dim_feedforward": 4 * args.width, "dropout": 0.0, "batch_first": True, "norm_first": True}
    layers = (nn.TransformerEncoderLayer(args.width, args.width // 16, **block) for _ in range(args.blocks))
    return nn.Sequential(nn.Linear(28, args.width), *layers, nn.Flatten(1), nn.Linear(28 * args.width, 10))


def part_of_loss(model, rank, ranks, epoch):
    """The sum of this rank's losses, divided by the number of samples of all ranks."""
    sampler = DistributedSampler(data, ranks, rank, seed=0)
    sampler.set_epoch(epoch)
    images, labels = next(iter(DataLoader(data, batch_size=len(sampler), sampler=sampler)))
    own = len(range(rank, len(data), ranks))  # without what the sampler repeats at the end: 03_ddp.py
    output = model(images[:own].to(DEVICE))
    return cross_entropy(output, labels[:own].to(DEVICE), reduction="sum") / len(data)


def train(model, rank, ranks):
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    for epoch in range(args.steps + 1):  # the last one shows the loss after `steps` updates
        loss = part_of_loss(model, rank, ranks, epoch)
        optimizer.zero_grad()
        (loss * ranks).backward()  # the reduce-scatter takes a mean
        optimizer.step()
    return loss.detach()


def traffic(model, rank):
    """Numbers that a forward and a backward pass hand to each collective: what is gathered, scattered or reduced."""
    with torch.profiler.profile(record_shapes=True) as profile:
        part_of_loss(model, rank, RANKS, epoch=0).backward()
    numbers = Counter()
    shard = 0
    for event in profile.events():
        sizes = [math.prod(shape) for shape in event.input_shapes or () if shape]
        if event.name == "c10d::_allgather_base_":
            numbers["all-gather"] += max(sizes)
        if event.name == "c10d::_reduce_scatter_base_":
            numbers["reduce-scatter"] += max(sizes)
            shard = min(sizes)
        if event.name == "c10d::allreduce_":  # of the shard that was made just before
            numbers["all-reduce across nodes"] += shard
    return ", ".join(f"{name} {number:,}" for name, number in numbers.items())


def work(rank):
    if DEVICE == "cuda":
        torch.cuda.set_device(rank)
    try:
        mesh = dist.init_device_mesh(DEVICE, SHAPE, mesh_dim_names=("replicate", "shard")[-len(SHAPE) :])
        model = build().to(DEVICE)
        for block in model[1:-2]:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)  # what no block holds
        loss = train(model, rank, RANKS)
        sent = traffic(model, rank)
        dist.all_reduce(loss)
        if rank == 0:
            print(f"{sum(p.numel() for p in build().parameters()):,} parameters; numbers a step: {sent}")
        finish(loss, rank)
    finally:
        dist.destroy_process_group()


def by_meshloom():
    import trainer

    adam = {"type": "Adam", "params": {"lr": 1e-4}}
    mesh = {"replicate": RANKS // SHAPE[-1], "shard": SHAPE[-1]}
    run = {"engine": "mesh", "mesh": mesh, "steps": args.steps + 1, "data": {"evaluation_fraction": 0}}
    config = {"train_batch_size": args.batch, "gradient_clipping": 0.0, "optimizer": adam}
    config |= {"zero_optimization": {"stage": 3}, "trainer": run | {"run": {"folder": tempfile.mkdtemp()}}}

    def loss_sum(output, target):
        return cross_entropy(output, target, reduction="sum"), len(target)

    return trainer.train(config, model=build, data=data, loss=loss_sum, processes=RANKS, quiet=True).losses[-1]


def finish(loss, rank=0):
    alone = train(build().to(DEVICE), rank=0, ranks=1)
    if rank == 0:
        print(f"devices: {' x '.join(map(str, SHAPE))} ranks on {DEVICE}, by {args.by}")
        print(f"loss after {args.steps} steps {loss:.6f}, difference from one device {abs(loss - alone):.1e}")


if __name__ == "__main__":
    if args.by == "meshloom":
        finish(by_meshloom())
    elif "RANK" in os.environ:
        work(int(os.environ["RANK"]))
    else:
        torch.distributed.run.main(["--standalone", f"--nproc-per-node={RANKS}", *sys.argv])
