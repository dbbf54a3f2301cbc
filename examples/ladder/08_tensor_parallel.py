"""Rung 8, Megatron-style tensor parallel: columns, then rows, so that a pair of matrices needs one sum and no gather.

    python examples/ladder/08_tensor_parallel.py

Each rank has a part of each matrix. Of the first matrix of a pair it has some columns (in attention: whole heads), and
so computes some of the hidden numbers; of the second it has the rows for just these, and so computes a part of a sum.
Entering a pair costs nothing forward and an all-reduce backward, leaving it the reverse: these are f and g of
Megatron-LM (arXiv 1909.08053). A block has two pairs, attention and MLP: two all-reduces forward and two backward, of
batch x rows x width numbers each. They are counted.
"""

import argparse
import os
import sys
from collections import Counter

import torch
import torch.distributed as dist
import torch.distributed.run
from torch import nn
from torch.nn.functional import cross_entropy, linear, relu, scaled_dot_product_attention

parser = argparse.ArgumentParser()
for name, default in {"steps": 5, "batch": 16, "width": 32, "blocks": 2}.items():
    parser.add_argument(f"--{name}", type=int, default=default)
args = parser.parse_args()
RANK = int(os.environ.get("RANK", -1))
DEVICE = f"cuda:{RANK}" if torch.cuda.device_count() >= 2 else "cpu"
COUNTS = Counter()
seeded = torch.Generator().manual_seed(1)
images = torch.randn(args.batch, 28, 28, generator=seeded)
labels = torch.randint(10, (args.batch,), generator=seeded)


def all_reduce(x, when):
    COUNTS[when] += 1
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total)
    return total


class Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return all_reduce(gradient, "backward")


class Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return all_reduce(x, "forward")

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def part_of(tensor, dim):
    return nn.Parameter(tensor.detach().chunk(2, dim)[RANK].clone())


class Column(nn.Module):
    """This rank's columns of a linear layer. PyTorch keeps a weight as [outputs, inputs]: they are its first axis."""

    def __init__(self, weight, bias):
        super().__init__()
        self.weight = part_of(weight, 0)
        self.bias = part_of(bias, 0)

    def forward(self, x):
        return linear(x, self.weight, self.bias)


class Row(nn.Module):
    """This rank's rows of a linear layer. All ranks have the bias, which is added once, to the sum."""

    def __init__(self, weight, bias):
        super().__init__()
        self.weight = part_of(weight, 1)
        self.bias = nn.Parameter(bias.detach().clone())

    def forward(self, x):
        return Leave.apply(linear(x, self.weight)) + self.bias


class Block(nn.Module):
    """This rank's part of an `nn.TransformerEncoderLayer`."""

    def __init__(self, whole):
        super().__init__()
        attention = whole.self_attn
        weights_and_biases = zip(attention.in_proj_weight.chunk(3), attention.in_proj_bias.chunk(3), strict=True)
        self.norm1, self.norm2 = whole.norm1, whole.norm2
        self.query, self.key, self.value = (Column(weight, bias) for weight, bias in weights_and_biases)
        self.out = Row(attention.out_proj.weight, attention.out_proj.bias)
        self.up = Column(whole.linear1.weight, whole.linear1.bias)
        self.down = Row(whole.linear2.weight, whole.linear2.bias)

    def forward(self, x):
        x = x + self.attention(Enter.apply(self.norm1(x)))
        return x + self.down(relu(self.up(Enter.apply(self.norm2(x)))))

    def attention(self, x):
        columns = (self.query(x), self.key(x), self.value(x))
        heads = [column.unflatten(-1, (-1, 16)).transpose(1, 2) for column in columns]
        return self.out(scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))


def build():
    torch.manual_seed(0)
    block = {"dim_feedforward": 4 * args.width, "dropout": 0.0, "batch_first": True, "norm_first": True}
    layers = (nn.TransformerEncoderLayer(args.width, args.width // 16, **block) for _ in range(args.blocks))
    return nn.Sequential(nn.Linear(28, args.width), *layers, nn.Flatten(1), nn.Linear(28 * args.width, 10)).to(DEVICE)


def cut(model):
    """Return this rank's part of the model. Of the first and the last layer both ranks have all."""
    first, *layers, flatten, last = model
    return nn.Sequential(first, *map(Block, layers), flatten, last)


def train(model):
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    for _ in range(args.steps + 1):  # the last one shows the loss after `steps` updates
        loss = cross_entropy(model(images.to(DEVICE)), labels.to(DEVICE))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def work():
    dist.init_process_group("gloo" if DEVICE == "cpu" else "nccl")
    try:
        loss = train(cut(build()))
        if RANK == 0:
            alone = train(build())
            counts = ", ".join(f"{count // (args.steps + 1)} {when}" for when, count in COUNTS.items())
            print(f"all-reduces of a step in {args.blocks} blocks: {counts}")
            print(f"devices: 2 ranks on {DEVICE.split(':')[0]}")
            print(f"loss after {args.steps} steps {loss:.6f}, difference from one device {abs(loss - alone):.1e}")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    if RANK >= 0:
        work()
    else:
        torch.distributed.run.main(["--standalone", "--nproc-per-node=2", *sys.argv])
