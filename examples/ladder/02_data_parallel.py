"""Rung 2, nn.DataParallel: one process copies the model to every GPU anew in each step, and splits the batch.

    python examples/ladder/02_data_parallel.py [--devices 4]

It is four functions, which stand here in a few lines each, in the order in which a step calls them: `replicate` the
model, `scatter` the images, `parallel_apply` in threads, `gather` the outputs. The backward pass goes back through the
copies, and so adds up their gradients. nn.DataParallel needs GPUs: on the CPU it only calls the module. Where there are
two it trains, too, and its loss is printed. Why DDP (rung 3) replaced it: one process's Python for all GPUs, a copy of
all weights in each step, and all outputs on the first GPU.
"""

import argparse
import copy
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy


def build(width, blocks):
    torch.manual_seed(0)
    block = {"dim_feedforward": 4 * width, "dropout": 0.0, "batch_first": True, "norm_first": True}
    layers = (nn.TransformerEncoderLayer(width, width // 16, **block) for _ in range(blocks))
    return nn.Sequential(nn.Linear(28, width), *layers, nn.Flatten(1), nn.Linear(28 * width, 10))


class ByHand(nn.Module):
    def __init__(self, model, devices):
        super().__init__()
        self.model, self.devices = model, devices
        self.shells = [copy.deepcopy(model).to(device) for device in devices]  # whose weights are replaced in each step

    def forward(self, images):
        return self.gather(self.parallel_apply(self.replicate(), self.scatter(images)))

    def replicate(self):
        weights = dict(self.model.named_parameters())
        # autograd follows a copy: the gradient of a weight is the sum of those of its copies
        return [{name: weight.to(device, copy=True) for name, weight in weights.items()} for device in self.devices]

    def scatter(self, images):
        return [part.to(device) for part, device in zip(images.chunk(len(self.devices)), self.devices, strict=False)]

    def parallel_apply(self, replicas, parts):
        with ThreadPoolExecutor(len(self.devices)) as threads:
            return list(threads.map(functional_call, self.shells, replicas, parts))

    def gather(self, outputs):
        return torch.cat([output.to(self.devices[0]) for output in outputs])


def train(model, images, labels, steps):
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    for _ in range(steps + 1):  # the last one shows the loss after `steps` updates
        loss = cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for name, default in {"devices": 2, "steps": 5, "batch": 16, "width": 32, "blocks": 2}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    on_gpus = torch.cuda.device_count() >= args.devices
    devices = [f"cuda:{number}" if on_gpus else "cpu" for number in range(args.devices)]
    seeded = torch.Generator().manual_seed(1)
    images = torch.randn(args.batch, 28, 28, generator=seeded).to(devices[0])
    labels = torch.randint(10, (args.batch,), generator=seeded).to(devices[0])
    whole, split, torchs = (build(args.width, args.blocks).to(devices[0]) for _ in range(3))
    loss = train(ByHand(split, devices), images, labels, args.steps)
    if on_gpus:
        print(f"nn.DataParallel {train(nn.DataParallel(torchs, range(args.devices)), images, labels, args.steps):.6f}")
    alone = train(whole, images, labels, args.steps)
    print(f"devices: {', '.join(devices)}")
    print(f"loss after {args.steps} steps {loss:.6f}, difference from one device {abs(loss - alone):.1e}")
