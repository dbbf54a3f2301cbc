"""Rung 3 again, `DistributedSampler`: which samples a rank draws, and what becomes of a mean over all.

    python examples/ladder/03_distributed_sampler.py --ranks 4

It needs no processes: told the number of ranks and a rank, it gives that rank's indices. Three things surprise:

- without `set_epoch` each epoch has the same order, although it shuffles;
- all ranks draw equally many, so it repeats samples until the ranks divide the data set: they count twice;
- `drop_last=True` leaves some out instead: they count in no epoch without a shuffle.

Each rank's mean, averaged over ranks as DDP does with gradients, is then not the mean over the samples, and neither is
it without padding, where a rank with fewer samples has the same say. Right is a sum over the samples of all ranks,
divided by their number. Below, the loss of an epoch in each way; the last one has to be that of one device.
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
RANKS = range(args.ranks)


def drawn(rank, **options):
    return list(DistributedSampler(range(args.samples), args.ranks, rank, **options))


def show_orders():
    sampler = DistributedSampler(range(args.samples), args.ranks, rank=0)
    print(f"rank 0 without set_epoch: {list(sampler)}, then {list(sampler)}")
    orders = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        orders.append(str(list(sampler)))
    print(f"rank 0 with set_epoch:    {', then '.join(orders)}")
    indices = [index for rank in RANKS for index in drawn(rank, shuffle=False)]
    print(f"drawn twice: {sorted({index for index in indices if indices.count(index) > 1})}")
    indices = [index for rank in RANKS for index in drawn(rank, shuffle=False, drop_last=True)]
    print(f"never drawn with drop_last: {sorted(set(range(args.samples)) - set(indices))}")


def losses():
    """Of an untrained network, the loss of each sample."""
    torch.manual_seed(0)
    images, labels = torch.randn(args.samples, 28, 28), torch.randint(10, (args.samples,))
    net = nn.Sequential(nn.Flatten(1), nn.Linear(784, 10))
    return cross_entropy(net(images), labels, reduction="none").detach()


def mean_of_means(each, indices_of):
    return torch.stack([each[indices_of(rank)].mean() for rank in RANKS]).mean()


if __name__ == "__main__":
    show_orders()
    each = losses()
    print(f"padded:                  {mean_of_means(each, lambda rank: drawn(rank, shuffle=False)):.6f}")
    dropped = mean_of_means(each, lambda rank: drawn(rank, shuffle=False, drop_last=True))
    print(f"drop_last:               {dropped:.6f}")
    unpadded = mean_of_means(each, lambda rank: list(range(rank, args.samples, args.ranks)))
    print(f"a mean of means:         {unpadded:.6f}")
    sums = [each[rank :: args.ranks].sum() for rank in RANKS]
    right, alone = sum(sums) / args.samples, each.mean()
    print(f"devices: cpu, {args.ranks} ranks of a sampler, {args.samples} samples")
    print(f"loss after 0 steps {right:.6f}, difference from one device {abs(right - alone):.1e}")
