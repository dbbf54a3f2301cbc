"""Rung 3, DDP: every rank has the whole model and a part of the batch; gradients are averaged while backward runs.

    python examples/ladder/03_ddp.py                      # calls torchrun itself; or --by spawn, --by meshloom
    torchrun --nproc-per-node 2 examples/ladder/03_ddp.py

`--by meshloom` runs the same module and data by `trainer.train`, which starts its processes itself.
What `DistributedSampler` gets wrong: it pads the data set until the ranks divide it, so in an epoch of 13 images on two
ranks image 0 counts twice; without that padding, DDP's mean over ranks is a mean of means of 7 and of 6 images. Right
is: each rank sums its losses, and the sum of all is divided by the number of samples. The numbers are printed.
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

parser = argparse.ArgumentParser()
parser.add_argument("--by", choices=("torchrun", "spawn", "meshloom"), default="torchrun")
for name, default in {"steps": 5, "batch": 16, "width": 32, "blocks": 2}.items():
    parser.add_argument(f"--{name}", type=int, default=default)
args, seeded, GPUS = parser.parse_args(), torch.Generator().manual_seed(1), torch.cuda.device_count() >= 2
images, labels = torch.randn(args.batch, 28, 28, generator=seeded), torch.randint(10, (args.batch,), generator=seeded)


def build():
    torch.manual_seed(0)
    block = {"dim_feedforward": 4 * args.width, "dropout": 0.0, "batch_first": True, "norm_first": True}
    layers = (nn.TransformerEncoderLayer(args.width, args.width // 16, **block) for _ in range(args.blocks))
    return nn.Sequential(nn.Linear(28, args.width), *layers, nn.Flatten(1), nn.Linear(28 * args.width, 10))


def train(model, images, labels):
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    for _ in range(args.steps + 1):  # the last one shows the loss after `steps` updates
        loss = cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.detach()


def work(rank, rendezvous):
    device = f"cuda:{rank}" if GPUS else "cpu"
    dist.init_process_group("nccl" if GPUS else "gloo", rendezvous, rank=rank, world_size=2)
    model = nn.parallel.DistributedDataParallel(build().to(device), gradient_as_bucket_view=True)
    loss = train(model, images[rank::2].to(device), labels[rank::2].to(device)) / 2
    with torch.no_grad():
        each = cross_entropy(model(images.to(device)), labels.to(device), reduction="none")[:13]
    padded = each[list(torch.utils.data.DistributedSampler(range(13), 2, rank, shuffle=False))]
    ways = torch.stack([loss, padded.mean() / 2, each[rank::2].mean() / 2, each[rank::2].sum() / 13])
    dist.all_reduce(ways)
    if rank == 0:
        print(f"13 images, one device {each.mean():.6f}:", end=" ")
        print("DistributedSampler {:.6f}, mean of means {:.6f}, sum / 13 {:.6f}".format(*ways[1:]))
        finish(ways[0].item(), device)


def finish(loss, device="cpu"):
    alone = train(build().to(device), images.to(device), labels.to(device)).item()
    print(f"devices: {'2 GPUs' if GPUS else '2 ranks on the CPU'}, started by {args.by}")
    print(f"loss after {args.steps} steps {loss:.6f}, difference from one device {abs(loss - alone):.1e}")


if __name__ == "__main__":
    if "RANK" in os.environ:
        work(int(os.environ["RANK"]), "env://")
    elif args.by == "torchrun":
        torch.distributed.run.main(["--standalone", "--nproc-per-node", "2", *sys.argv])
    elif args.by == "spawn":
        torch.multiprocessing.spawn(work, (f"file://{tempfile.mkdtemp()}/store",), nprocs=2)
    else:
        import trainer

        config = {"train_batch_size": args.batch, "optimizer": {"type": "Adam", "params": {"lr": 1e-4}}}
        config |= {"gradient_clipping": 0.0, "trainer": {"steps": args.steps + 1, "data": {"evaluation_fraction": 0}}}
        given = {"model": build, "data": torch.utils.data.TensorDataset(images, labels), "processes": 2, "quiet": True}
        given["loss"] = lambda output, target: (cross_entropy(output, target, reduction="sum"), len(target))
        finish(trainer.train(config, overrides=[f"trainer.run.folder={tempfile.mkdtemp()}"], **given).losses[-1])
