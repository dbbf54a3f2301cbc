"""Rung 11, activation checkpointing: keep less of the forward pass, and compute it again in the backward pass.

    python examples/ladder/11_activation_checkpointing.py [--mode none|every:2|selective|full] [--blocks 8]

Without `--mode` all four are compared: the memory that a step allocates at most, and its time. `full` keeps only the
input of each block, `every:2` does so in every second block. `selective` keeps what matrix products made, which is
expensive to compute, and computes the cheap rest again. The loss is the same to the last bit: nothing is computed
otherwise, some of it is computed twice.
"""

import argparse
import os
import statistics
import time
from functools import partial
from itertools import accumulate

os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # the profiler says nothing; it is read at the import
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

MODES = ("none", "every:2", "selective", "full")
parser = argparse.ArgumentParser()
parser.add_argument("--mode", choices=MODES)
for name, default in {"steps": 5, "batch": 16, "width": 32, "blocks": 4}.items():
    parser.add_argument(f"--{name}", type=int, default=default)
args = parser.parse_args()
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default}
seeded = torch.Generator().manual_seed(1)
images = torch.randn(args.batch, 28, 28, generator=seeded).to(DEVICE)
labels = torch.randint(10, (args.batch,), generator=seeded).to(DEVICE)


def policy(context, operator, *positional, **named):
    return CheckpointPolicy.MUST_SAVE if operator in PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE


class Recomputed(nn.Module):
    """A block of which only the input is kept, or also the products if `selective`."""

    def __init__(self, block, selective):
        super().__init__()
        self.block = block
        self.options = {"use_reentrant": False}
        if selective:
            self.options["context_fn"] = partial(create_selective_checkpoint_contexts, policy)

    def forward(self, x):
        return checkpoint(self.block, x, **self.options)


def build():
    torch.manual_seed(0)
    block = {"dim_feedforward": 4 * args.width, "dropout": 0.0, "batch_first": True, "norm_first": True}
    layers = (nn.TransformerEncoderLayer(args.width, args.width // 16, **block) for _ in range(args.blocks))
    return nn.Sequential(nn.Linear(28, args.width), *layers, nn.Flatten(1), nn.Linear(28 * args.width, 10)).to(DEVICE)


def wrap(model, mode):
    every = 2 if mode == "every:2" else 1
    for number in range(1, 1 + args.blocks, every):
        model[number] = Recomputed(model[number], mode == "selective")
    return model


def peak(step):
    """Return the most bytes that a step has allocated at one time."""
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(profile_memory=True) as profile:
        step()
    events = sorted(profile.events(), key=lambda event: event.time_range.start)
    return max(accumulate(event.self_cpu_memory_usage for event in events))


def train(mode):
    """Return the loss after `steps` updates, the seconds of a step, and the most bytes that one allocates."""
    model = build() if mode == "none" else wrap(build(), mode)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)

    def forward_and_backward():
        optimizer.zero_grad()
        loss = cross_entropy(model(images), labels)
        loss.backward()
        return loss.item()

    times = []
    for _ in range(args.steps + 1):  # the last one shows the loss after `steps` updates
        begin = time.perf_counter()
        loss = forward_and_backward()
        optimizer.step()
        times.append(time.perf_counter() - begin)
    return loss, statistics.median(times), peak(forward_and_backward)


if __name__ == "__main__":
    for mode in [args.mode] if args.mode else MODES:
        loss, seconds, size = train(mode)
        print(f"{mode}: {seconds:.4f} s a step, {size:,} bytes at most")
    alone, *_ = train("none")
    print(f"devices: {DEVICE}, {mode}")
    print(f"loss after {args.steps} steps {loss:.6f}, difference from one device {abs(loss - alone):.1e}")
