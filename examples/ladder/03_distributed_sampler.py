"""Rung 3 again, `DistributedSampler`: which samples a rank draws, and what becomes of a mean over all of them.

    python examples/ladder/03_distributed_sampler.py --ranks 4

A sampler needs no processes: told a rank and the number of ranks, it gives the indices of that rank's samples. Three
things surprise:

- it shuffles, but in the same order in each epoch, unless `set_epoch` is called;
- all ranks draw equally many samples: where the number of ranks does not divide the data set, some are drawn twice;
- with `drop_last=True` some are drawn by no rank instead.

The mean over the ranks of each rank's mean, which is what DDP takes of gradients, is then not the mean over the
samples. Neither is it if each rank draws only samples that no other has: a rank with fewer counts as much as the
others. Right is the sum over the samples of all ranks, divided by their number. The loss is printed in each of these
ways; the last one has to be that of one device.
"""

import argparse

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DistributedSampler

parser = argparse.ArgumentParser()
for name, default in {"ranks": 2, "samples": 13}.items():
    parser.add_argument(f"--{name}", type=int, default=default)
args = parser.parse_args()
SAMPLES = range(args.samples)
RANKS = range(args.ranks)


def show_epochs():
    sampler = DistributedSampler(SAMPLES, args.ranks, rank=0)
    print(f"rank 0, two epochs without set_epoch: {list(sampler)}, {list(sampler)}")
    first = list(sampler)
    sampler.set_epoch(1)
    print(f"rank 0, two epochs with set_epoch:    {first}, {list(sampler)}")


def draw(drop_last):
    """Return the samples of each rank, unshuffled."""
    return [list(DistributedSampler(SAMPLES, args.ranks, rank, False, drop_last=drop_last)) for rank in RANKS]


def losses():
    """Return the loss of each sample under an untrained network."""
    torch.manual_seed(0)
    images = torch.randn(args.samples, 28, 28)
    labels = torch.randint(10, (args.samples,))
    model = nn.Sequential(nn.Flatten(1), nn.Linear(784, 10))
    return cross_entropy(model(images), labels, reduction="none").detach()


def mean_of_means(losses, ranks):
    return sum(losses[samples].mean() for samples in ranks) / len(ranks)


if __name__ == "__main__":
    show_epochs()
    losses = losses()
    repeated = draw(drop_last=False)
    dropped = draw(drop_last=True)
    once = [list(SAMPLES[rank :: args.ranks]) for rank in RANKS]
    for name, ranks in {"repeated": repeated, "drop_last": dropped, "each once": once}.items():
        print(f"mean of means, {name}: {mean_of_means(losses, ranks):.6f} of {ranks}")
    loss = sum(losses[samples].sum() for samples in once) / args.samples
    alone = losses.mean()
    print(f"devices: none but the CPU, a sampler for each of {args.ranks} ranks, {args.samples} samples")
    print(f"loss after 0 steps {loss:.6f}, difference from one device {abs(loss - alone):.1e}")
