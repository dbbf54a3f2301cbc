"""Rung 11, activation checkpointing alone: keep less of the forward pass, compute it again in the backward one.

    python examples/ladder/11_activation_checkpointing.py [--mode none|every:2|selective|full] [--blocks 8]

without `--mode` compares all four: the peak that a step allocates, and its time. `full` keeps each block's input alone,
`every:2` does so for each second block, `selective` keeps what matrix products made, which is dear, and computes the
cheap rest again. The loss is the same to the last bit: nothing is computed otherwise, only twice.
"""

import argparse
import os
import time
from functools import partial
from itertools import accumulate

os.environ.setdefault("KINETO_LOG_LEVEL", "5")
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

parser = argparse.ArgumentParser()
parser.add_argument("--mode", default="all")
for name, default in {"steps": 5, "batch": 16, "width": 32, "blocks": 4}.items():
    parser.add_argument(f"--{name}", type=int, default=default)
args, seeded, DEVICE = (
    parser.parse_args(),
    torch.Generator().manual_seed(1),
    "cuda" if torch.cuda.is_available() else "cpu",
)
images, labels = torch.randn(args.batch, 28, 28, generator=seeded), torch.randint(10, (args.batch,), generator=seeded)
PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default}
SAVE, AGAIN = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE


def build():
    torch.manual_seed(0)
    block = {"dim_feedforward": 4 * args.width, "dropout": 0.0, "batch_first": True, "norm_first": True}
    layers = (nn.TransformerEncoderLayer(args.width, args.width // 16, **block) for _ in range(args.blocks))
    return nn.Sequential(nn.Linear(28, args.width), *layers, nn.Flatten(1), nn.Linear(28 * args.width, 10)).to(DEVICE)


def recompute(model, mode):
    policy = partial(create_selective_checkpoint_contexts, lambda _, op, *a, **k: SAVE if op in PRODUCTS else AGAIN)
    extra = {"context_fn": policy} if mode == "selective" else {}
    for layer in model[1:-2][:: int(mode[6:]) if mode.startswith("every:") else 1]:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, **extra)


def peak(step):
    with torch.profiler.profile(profile_memory=True) as profile:
        step()
    allocated = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(accumulate(event.nbytes() for event in sorted(allocated, key=lambda event: event.start_ns())))


def train(mode):
    """The loss after `steps` updates, the seconds of a step, the peak bytes of one."""
    model, times = build(), []
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    if mode != "none":
        recompute(model, mode)

    def forward_backward():
        optimizer.zero_grad()
        loss = cross_entropy(model(images.to(DEVICE)), labels.to(DEVICE))
        loss.backward()
        return loss.item()

    for _ in range(args.steps + 1):  # the last one shows the loss after `steps` updates
        begin, loss = time.perf_counter(), forward_backward()
        optimizer.step()
        times.append(time.perf_counter() - begin)
    return loss, sorted(times)[len(times) // 2], peak(forward_backward)


if __name__ == "__main__":
    for mode in ("none", "every:2", "selective", "full") if args.mode == "all" else (args.mode,):
        loss, seconds, peak_bytes = train(mode)
        print(f"{mode}: {seconds:.4f} s a step, {peak_bytes:,} bytes at most")
    print(f"devices: {DEVICE}, {mode}")
    print(f"loss after {args.steps} steps {loss:.6f}, difference from one device {abs(loss - train('none')[0]):.1e}")
