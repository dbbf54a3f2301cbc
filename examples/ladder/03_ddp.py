"""Rung 3, DDP: every rank has the whole model and a part of the batch; gradients are averaged while backward runs.

    python examples/ladder/03_ddp.py --ranks 4            # starts torchrun itself
    torchrun --nproc-per-node 2 examples/ladder/03_ddp.py
    python examples/ladder/03_ddp.py --by spawn           # torch.multiprocessing in place of torchrun
    python examples/ladder/03_ddp.py --by meshloom        # `meshloom.train`, which starts its processes itself

A rank is a process with a GPU of its own; by default there are as many as GPUs, or two on the CPU. What each does, from
top to bottom of `work` and `train`: it meets the others (`init_process_group`), takes rank 0's weights (DDP's
constructor), draws its own part of the data (`DistributedSampler`, which `set_epoch` shuffles again), averages
its gradients with the others' (within `backward`), and leaves (`destroy_process_group`, also after an error).

Where the number of ranks does not divide the data set, `DistributedSampler` repeats samples (what that does to a mean:
`03_distributed_sampler.py`). Here the repeated ones are left out, losses are summed, and the sum is divided by the
number of samples of all ranks. So the loss is that of one device on any number of ranks.
"""

import argparse
import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.run
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--by", choices=("torchrun", "spawn", "meshloom"), default="torchrun")
for name, default in {
    "ranks": torch.cuda.device_count() or 2,
    "steps": 5,
    "batch": 16,
    "width": 32,
    "blocks": 2,
}.items():
    parser.add_argument(f"--{name}", type=int, default=default)
args = parser.parse_args()
RANKS = int(os.environ.get("WORLD_SIZE", args.ranks))  # torchrun sets WORLD_SIZE
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


def work(rank, rendezvous="env://"):
    if DEVICE == "cuda":
        torch.cuda.set_device(rank)
    backend = "nccl" if DEVICE == "cuda" else "gloo"
    dist.init_process_group(backend, rendezvous, rank=rank, world_size=RANKS)
    try:
        model = nn.parallel.DistributedDataParallel(build().to(DEVICE), gradient_as_bucket_view=True)
        loss = train(model, rank, RANKS)
        dist.all_reduce(loss)  # the sum of the ranks' parts
        if rank == 0:
            finish(loss)
    finally:
        dist.destroy_process_group()


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
            (loss * ranks).backward()  # DDP divides the sum over ranks by their number
            optimizer.step()
    return loss.detach()


def by_meshloom():
    import meshloom

    config = {
        "train_batch_size": args.batch,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-4}},
        "trainer": {
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
    print(f"devices: {RANKS} ranks on {DEVICE}, started by {args.by}")
    print(f"loss after {args.steps} steps {loss:.6f}, difference from one device {abs(loss - alone):.1e}")


if __name__ == "__main__":
    if "RANK" in os.environ:
        work(int(os.environ["RANK"]))
    elif args.by == "torchrun":
        torch.distributed.run.main(["--standalone", f"--nproc-per-node={RANKS}", *sys.argv])
    elif args.by == "spawn":
        torch.multiprocessing.spawn(work, (f"file://{tempfile.mkdtemp()}/store",), nprocs=RANKS)
    else:
        finish(by_meshloom())
