"""Rung 9, FSDP shards parameters, gradients and optimizer over all ranks; HSDP within a node, with copies across nodes.

    python examples/ladder/09_fsdp_hsdp.py [--hsdp] [--by meshloom]

FSDP on two ranks; HSDP on four, a mesh of 2 "nodes" (replicate) x 2 (shard). What travels on each axis is counted: the
all-gathers and reduce-scatters of `shard` stay within a node, and only the all-reduce of a shard's gradient, P / 2
numbers, crosses `replicate`, the slow links. `--by meshloom` is the same JSON-driven, by `trainer.train`.
"""

import argparse
import os
import sys
import tempfile
from collections import Counter

import torch
import torch.distributed as dist
import torch.distributed.run
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

parser = argparse.ArgumentParser()
parser.add_argument("--hsdp", action="store_true")
parser.add_argument("--by", choices=("torch", "meshloom"), default="torch")
for name, default in {"steps": 5, "batch": 16, "width": 32, "blocks": 2}.items():
    parser.add_argument(f"--{name}", type=int, default=default)
args, seeded, BYTES = parser.parse_args(), torch.Generator().manual_seed(1), Counter()
RANKS, DEVICE = (4 if args.hsdp else 2), "cuda" if torch.cuda.device_count() >= (4 if args.hsdp else 2) else "cpu"
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


def count(name, mesh):
    def counted(*positional, **named):
        axis = next(axis for axis in mesh.mesh_dim_names if mesh.get_group(axis) == named["group"])
        BYTES[axis, name] += max(x.nbytes for x in (*positional, *named.values()) if isinstance(x, torch.Tensor))
        return original(*positional, **named)

    original = getattr(dist, name)
    setattr(dist, name, counted)


def work(rank):
    shape, names = ((2, 2), ("replicate", "shard")) if args.hsdp else ((2,), ("shard",))
    mesh = dist.init_device_mesh(DEVICE, shape, mesh_dim_names=names)
    for name in ("all_gather_single", "reduce_scatter_single", "all_reduce"):
        count(name, mesh)
    model = build().to(DEVICE)
    for module in (*model[1:-2], model):
        fully_shard(module, mesh=mesh)
    loss = train(model, images[rank::RANKS].to(DEVICE), labels[rank::RANKS].to(DEVICE)) / RANKS
    travelled = ", ".join(f"{axis} {name} {n // (args.steps + 1):,}" for (axis, name), n in sorted(BYTES.items()))
    dist.reduce(loss, 0)
    if rank == 0:
        print(f"bytes a rank and step: {travelled}")
        finish(loss.item())


def finish(loss):
    alone = train(build().to(DEVICE), images.to(DEVICE), labels.to(DEVICE)).item()
    print(f"devices: {RANKS} ranks on {DEVICE}, {'HSDP' if args.hsdp else 'FSDP'} by {args.by}")
    print(f"loss after {args.steps} steps {loss:.6f}, difference from one device {abs(loss - alone):.1e}")


if __name__ == "__main__":
    if args.by == "torch" and "RANK" in os.environ:
        work(int(os.environ["RANK"]))
    elif args.by == "torch":
        torch.distributed.run.main(["--standalone", "--nproc-per-node", str(RANKS), *sys.argv])
    else:
        import trainer

        config = {"train_batch_size": args.batch, "gradient_clipping": 0.0, "zero_optimization": {"stage": 3}}
        config["optimizer"] = {"type": "Adam", "params": {"lr": 1e-4}}
        config["trainer"] = {"engine": "mesh", "steps": args.steps + 1, "data": {"evaluation_fraction": 0}}
        config["trainer"] |= {"mesh": {"replicate": RANKS // 2, "shard": 2}, "run": {"folder": tempfile.mkdtemp()}}
        given = {"model": build, "data": torch.utils.data.TensorDataset(images, labels)}
        given["loss"] = lambda output, target: (cross_entropy(output, target, reduction="sum"), len(target))
        finish(trainer.train(config, processes=RANKS, quiet=True, **given).losses[-1])
