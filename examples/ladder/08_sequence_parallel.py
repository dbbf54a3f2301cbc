"""Rung 8, sequence parallel between the tensor parallel pairs: norms and residuals are of a part of the rows alone.

    python examples/ladder/08_sequence_parallel.py

As `08_tensor_parallel.py`, but each rank keeps half of an image's rows between the pairs: entering a pair gathers the
rows, leaving it sums and scatters them (arXiv 2205.05198). An all-gather and a reduce-scatter are the two halves of an
all-reduce, so the bytes are the same, and what is between the pairs is no longer kept on every rank. Parameters that
see some rows only (norms, biases after a sum) have a part of their gradient, which is summed once a step; the last
layer is computed by both ranks, of half the loss each.
"""

import argparse
import os
import sys
from collections import Counter
from types import MethodType

import torch
import torch.distributed as dist
import torch.distributed.run
from torch import nn
from torch.nn.functional import cross_entropy, linear, relu, scaled_dot_product_attention

parser = argparse.ArgumentParser()
for name, default in {"steps": 5, "batch": 16, "width": 32, "blocks": 2}.items():
    parser.add_argument(f"--{name}", type=int, default=default)
args, COUNTS, RANK = parser.parse_args(), Counter(), int(os.environ.get("RANK", -1))
device, seeded = f"cuda:{RANK}" if torch.cuda.device_count() >= 2 else "cpu", torch.Generator().manual_seed(1)
images, labels = torch.randn(args.batch, 28, 28, generator=seeded), torch.randint(10, (args.batch,), generator=seeded)
CUT = {"self_attn.in_proj_weight": 1, "self_attn.in_proj_bias": 1, "linear1.weight": 0, "linear1.bias": 0}  # columns
CUT |= {"self_attn.out_proj.weight": 1, "linear2.weight": 1}  # rows: a weight is [outputs, inputs]


def exchange(x, collective, rows):  # x: [batch, rows, width]; what is gathered or scattered has to come first
    COUNTS[collective.__name__] += 1
    moved = x.new_empty(rows, x.shape[0], x.shape[2])
    collective(moved, x.transpose(0, 1).contiguous())
    return moved.transpose(0, 1)


class Enter(torch.autograd.Function):
    forward = staticmethod(lambda ctx, x: exchange(x, dist.all_gather_single, 28))
    backward = staticmethod(lambda ctx, gradient: exchange(gradient, dist.reduce_scatter_single, 14))


class Leave(torch.autograd.Function):
    forward = staticmethod(lambda ctx, x: exchange(x, dist.reduce_scatter_single, 14))
    backward = staticmethod(lambda ctx, gradient: exchange(gradient, dist.all_gather_single, 28))


def forward(self, x):  # of an nn.TransformerEncoderLayer that is cut
    attention, entered = self.self_attn, Enter.apply(self.norm1(x))
    qkv = linear(entered, attention.in_proj_weight.flatten(0, 1), attention.in_proj_bias.flatten())
    heads = scaled_dot_product_attention(*qkv.unflatten(-1, (3, -1, 16)).permute(2, 0, 3, 1, 4))
    x = x + Leave.apply(linear(heads.transpose(1, 2).flatten(2), attention.out_proj.weight)) + attention.out_proj.bias
    hidden = relu(self.linear1(Enter.apply(self.norm2(x))))
    return x + Leave.apply(linear(hidden, self.linear2.weight)) + self.linear2.bias


def cut(layer):
    for name, dim in CUT.items():
        whole = layer.get_parameter(name).data
        parts = (whole.unflatten(0, (3, -1)) if "in_proj" in name else whole).chunk(2, dim)  # q, k and v each
        layer.get_parameter(name).data = parts[RANK].clone()
    layer.forward = MethodType(forward, layer)


def build():
    torch.manual_seed(0)
    block = {"dim_feedforward": 4 * args.width, "dropout": 0.0, "batch_first": True, "norm_first": True}
    layers = (nn.TransformerEncoderLayer(args.width, args.width // 16, **block) for _ in range(args.blocks))
    return nn.Sequential(nn.Linear(28, args.width), *layers, nn.Flatten(1), nn.Linear(28 * args.width, 10)).to(device)


def train(model, images, summed=(), share=1):
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    for _ in range(args.steps + 1):  # the last one shows the loss after `steps` updates
        loss = cross_entropy(model(images.to(device)), labels.to(device))
        optimizer.zero_grad()
        (loss * share).backward()
        for parameter in summed:
            dist.all_reduce(parameter.grad)
        optimizer.step()
    return loss.item()


def work():
    dist.init_process_group("gloo" if device == "cpu" else "nccl")
    model = build()
    model[1:-2].apply(lambda layer: cut(layer) if isinstance(layer, nn.TransformerEncoderLayer) else None)
    model[-2].register_forward_pre_hook(lambda _, inputs: Enter.apply(*inputs))
    summed = [parameter for name, parameter in model.named_parameters() if name.split(".", 1)[1] not in CUT]
    loss = train(model, images.chunk(2, 1)[RANK], summed, share=0.5)
    if RANK == 0:
        alone, counts = train(build(), images), {name: count // (args.steps + 1) for name, count in COUNTS.items()}
        print(f"devices: 2 ranks on {device.split(':')[0]}; a step of {args.blocks} blocks: {counts}")
        print(f"loss after {args.steps} steps {loss:.6f}, difference from one device {abs(loss - alone):.1e}")


if __name__ == "__main__":
    work() if RANK >= 0 else torch.distributed.run.main(["--standalone", "--nproc-per-node", "2", *sys.argv])
