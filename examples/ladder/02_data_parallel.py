"""Rung 2, nn.DataParallel: one process copies the model to every GPU anew in each step, and splits the batch.

    python examples/ladder/02_data_parallel.py

It is four functions: `replicate` the model, `scatter` the images, `parallel_apply` in threads, `gather` the outputs;
the backward pass adds up the gradients of the copies. nn.DataParallel itself needs several GPUs. Without them the very
four functions run on CPU tensors here: what they ask CUDA to do (copy, split, join) is put in its place on the CPU.
Why DDP (rung 3) replaced it: one process's Python for all GPUs, and copies and outputs pass through the first of them.
"""

import argparse
from contextlib import nullcontext
from unittest.mock import patch

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import _functions, gather, parallel_apply, replicate, scatter

GPUS = torch.cuda.device_count()
CPU = {"is_available": lambda: True, "current_accelerator": lambda **_: torch.device("cpu")}
CPU |= dict.fromkeys(("current_stream", "device_index"), lambda *_: nullcontext())


def build(width, blocks):
    torch.manual_seed(0)
    block = {
        "nhead": width // 16,
        "dim_feedforward": 4 * width,
        "dropout": 0.0,
        "batch_first": True,
        "norm_first": True,
    }
    layers = (nn.TransformerEncoderLayer(width, **block) for _ in range(blocks))
    return nn.Sequential(nn.Linear(28, width), *layers, nn.Flatten(1), nn.Linear(28 * width, 10))


@patch.multiple("torch.accelerator", **CPU)
@patch.object(_functions.Broadcast, "apply", lambda ranks, *tensors: tuple(t.clone() for _ in ranks for t in tensors))
@patch.object(_functions.Scatter, "apply", lambda ranks, sizes, dim, tensor: tensor.chunk(len(ranks), dim))
@patch.object(_functions.Gather, "apply", lambda rank, dim, *tensors: torch.cat(tensors, dim))
def by_its_parts(model, images, ranks=(0, 1)):
    return gather(parallel_apply(replicate(model, ranks), scatter(images, ranks)), ranks[0])


def train(model, forward, images, labels, steps):
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    for _ in range(steps + 1):  # the last one shows the loss after `steps` updates
        loss = cross_entropy(forward(model, images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for name, default in {"steps": 5, "batch": 16, "width": 32, "blocks": 2}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    device, seeded = "cuda:0" if GPUS > 1 else "cpu", torch.Generator().manual_seed(1)
    images, labels = (
        torch.randn(args.batch, 28, 28, generator=seeded),
        torch.randint(10, (args.batch,), generator=seeded),
    )
    images, labels = images.to(device), labels.to(device)
    model, single = (build(args.width, args.blocks).to(device) for _ in range(2))
    forward = nn.DataParallel.__call__ if GPUS > 1 else by_its_parts
    loss = train(nn.DataParallel(model) if GPUS > 1 else model, forward, images, labels, args.steps)
    alone = train(single, nn.Module.__call__, images, labels, args.steps)
    print(f"devices: {f'{GPUS} GPUs' if GPUS > 1 else 'cpu twice: no two GPUs, so by the four parts of DataParallel'}")
    print(f"loss after {args.steps} steps {loss:.6f}, difference from one device {abs(loss - alone):.1e}")
