"""Rung 8 again, sequence parallel between the tensor parallel pairs: each rank keeps only a part of the rows there.

    python examples/ladder/08_sequence_parallel.py

As `08_tensor_parallel.py`, but between the pairs a rank has half of an image's rows: entering a pair gathers the rows,
leaving it sums them and scatters the sum (arXiv 2205.05198). An all-gather and a reduce-scatter are the two halves of
an all-reduce, so that as many bytes are sent, and no rank keeps all rows of what is between the pairs.

Two things need care. Parameters that see only a rank's rows (norms, biases after a sum) get only a part of
their gradient: it is summed over the ranks once a step. And the last layer needs all rows, so both ranks compute it,
each of half the loss.
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


def all_gather(x):
    """Return all rows of [batch, rows, width]; what is gathered has to come first."""
    COUNTS["all-gathers"] += 1
    rows = x.transpose(0, 1).contiguous()
    gathered = x.new_empty(2 * rows.shape[0], *rows.shape[1:])
    dist.all_gather_into_tensor(gathered, rows)
    return gathered.transpose(0, 1).contiguous()  # or each product would keep a copy of its own


def reduce_scatter(x):
    """Return this rank's rows of the sum over the ranks."""
    COUNTS["reduce-scatters"] += 1
    rows = x.transpose(0, 1).contiguous()
    scattered = x.new_empty(rows.shape[0] // 2, *rows.shape[1:])
    dist.reduce_scatter_tensor(scattered, rows)
    return scattered.transpose(0, 1)


class Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return all_gather(x)

    @staticmethod
    def backward(ctx, gradient):
        return reduce_scatter(gradient)


class Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return reduce_scatter(x)

    @staticmethod
    def backward(ctx, gradient):
        return all_gather(gradient)


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


class AllRows(nn.Module):
    def forward(self, x):
        return Enter.apply(x)


def build():
    torch.manual_seed(0)
    block = {"dim_feedforward": 4 * args.width, "dropout": 0.0, "batch_first": True, "norm_first": True}
    layers = (nn.TransformerEncoderLayer(args.width, args.width // 16, **block) for _ in range(args.blocks))
    return nn.Sequential(nn.Linear(28, args.width), *layers, nn.Flatten(1), nn.Linear(28 * args.width, 10)).to(DEVICE)


def cut(model):
    """Return this rank's part of the model, and those of its parameters that are not cut."""
    first, *layers, flatten, last = model
    blocks = [Block(layer) for layer in layers]
    own = nn.Sequential(first, *blocks, AllRows(), flatten, last)
    columns_and_rows = [part for block in blocks for part in block.children() if isinstance(part, Column | Row)]
    cut = {part.weight for part in columns_and_rows}
    cut |= {part.bias for part in columns_and_rows if isinstance(part, Column)}
    return own, [parameter for parameter in own.parameters() if parameter not in cut]


def train(model, images, summed=(), share=1.0):
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    for _ in range(args.steps + 1):  # the last one shows the loss after `steps` updates
        loss = cross_entropy(model(images.to(DEVICE)), labels.to(DEVICE))
        optimizer.zero_grad()
        (loss * share).backward()
        for parameter in summed:
            dist.all_reduce(parameter.grad)
        optimizer.step()
    return loss.item()


def work():
    dist.init_process_group("gloo" if DEVICE == "cpu" else "nccl")
    try:
        model, summed = cut(build())
        loss = train(model, images.chunk(2, dim=1)[RANK], summed, share=0.5)
        if RANK == 0:
            alone = train(build(), images)
            counts = ", ".join(f"{count // (args.steps + 1)} {name}" for name, count in COUNTS.items())
            print(f"a step in {args.blocks} blocks: {counts}")
            print(f"devices: 2 ranks on {DEVICE.split(':')[0]}")
            print(f"loss after {args.steps} steps {loss:.6f}, difference from one device {abs(loss - alone):.1e}")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    if RANK >= 0:
        work()
    else:
        torch.distributed.run.main(["--standalone", "--nproc-per-node=2", *sys.argv])
