"""Rung 9, FSDP shards parameters, gradients and optimizer over all ranks; HSDP within a node, with a copy on each node.

    python examples/ladder/09_fsdp_hsdp.py --ranks 2          # FSDP: a mesh of one axis, "shard"
    python examples/ladder/09_fsdp_hsdp.py --mesh 2 4         # HSDP: 2 nodes ("replicate") of 4 ranks ("shard")
    python examples/ladder/09_fsdp_hsdp.py --mesh 2 2 --by meshloom

Before a block runs, the ranks of a shard group gather its weights, and free them afterwards; in the backward pass they
gather them again, and reduce-scatter the gradients. All of this goes over the axis `shard`, the fast links of a node.
Over `replicate`, the slow links, goes only an all-reduce of each rank's shard of the gradients (`09_traffic.py` counts
both). The loop is that of DDP (`03_ddp.py`). Without `--ranks` there are as many as
GPUs, or two on the CPU. `--by meshloom` is the same from a JSON, by `meshloom.train`.
"""

import argparse
import math
import os
import sys
import tempfile

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
for name, default in {
    "ranks": torch.cuda.device_count() or 2,
    "steps": 5,
    "batch": 16,
    "width": 32,
    "blocks": 2,
}.items():
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


def work(rank):
    if DEVICE == "cuda":
        torch.cuda.set_device(rank)
    axes = ("replicate", "shard") if args.mesh else ("shard",)
    mesh = dist.init_device_mesh(DEVICE, SHAPE, mesh_dim_names=axes)
    try:
        loss = train(shard(build().to(DEVICE), mesh), rank, RANKS)
        dist.all_reduce(loss)  # the sum of the ranks' parts
        if rank == 0:
            finish(loss)
    finally:
        dist.destroy_process_group()


def shard(model, mesh):
    for layer in model:
        if isinstance(layer, nn.TransformerEncoderLayer):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)  # what is in none of the blocks


def train(model, rank, ranks):
    """Return this rank's part of the loss; of one rank it is the whole loss."""
    sampler = DistributedSampler(data, ranks, rank, shuffle=True, seed=0)
    loader = DataLoader(data, batch_size=len(sampler), sampler=sampler)  # an epoch is one step here
    own = len(range(rank, len(data), ranks))  # without the samples that the sampler repeats at the end
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    for epoch in range(args.steps + 1):  # the last one shows the loss after `steps` updates
        sampler.set_epoch(epoch)
        for images, labels in loader:
            outputs = model(images[:own].to(DEVICE))
            loss = cross_entropy(outputs, labels[:own].to(DEVICE), reduction="sum") / len(data)
            optimizer.zero_grad()
            (loss * ranks).backward()  # FSDP, too, divides the sum over ranks by their number
            optimizer.step()
    return loss.detach()


def by_meshloom():
    import meshloom

    config = {
        "train_batch_size": args.batch,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 3},
        "trainer": {
            "engine": "mesh",
            "mesh": {"replicate": RANKS // SHAPE[-1], "shard": SHAPE[-1]},
            "steps": args.steps + 1,
            "data": {"evaluation_fraction": 0},
            "run": {"folder": tempfile.mkdtemp()},
        },
    }

    def loss_sum(outputs, labels):
        return cross_entropy(outputs, labels, reduction="sum"), len(labels)

    result = meshloom.train(config, model=build, data=data, loss=loss_sum, processes=RANKS, quiet=True)
    return result.losses[-1]


def finish(loss):
    alone = train(build().to(DEVICE), rank=0, ranks=1)
    print(f"devices: {' x '.join(map(str, SHAPE))} ranks on {DEVICE}, by {args.by}")
    print(f"loss after {args.steps} steps {loss:.6f}, difference from one device {abs(loss - alone):.1e}")


if __name__ == "__main__":
    if args.by == "meshloom":
        finish(by_meshloom())
    elif "RANK" in os.environ:
        work(int(os.environ["RANK"]))
    else:
        torch.distributed.run.main(["--standalone", f"--nproc-per-node={RANKS}", *sys.argv])
