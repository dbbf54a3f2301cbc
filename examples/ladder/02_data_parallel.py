"""Rung 2, nn.DataParallel: one process copies the model to every GPU again in each step, and splits the batch.

    python examples/ladder/02_data_parallel.py [--devices 4]

`nn.DataParallel` is four functions. They stand here in a few lines each, in the order in which a step calls them:
`replicate` copies the weights, `scatter` splits the images, `parallel_apply` runs each copy on its images in a thread
of its own, `gather` puts the outputs together. The backward pass goes the same way back, and so adds up the gradients
of the copies.

`nn.DataParallel` itself does this on GPUs alone; on the CPU it just calls the module. Where there are enough GPUs it is
trained, too, and its loss is printed. DDP (rung 3) replaced it, because here one process runs the Python of all GPUs,
all weights are copied in each step, and all outputs have to fit on the first GPU.
"""

import argparse
import copy
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

parser = argparse.ArgumentParser()
for name, default in {
    "devices": torch.cuda.device_count() or 2,
    "steps": 5,
    "batch": 16,
    "width": 32,
    "blocks": 2,
}.items():
    parser.add_argument(f"--{name}", type=int, default=default)
args = parser.parse_args()
GPUS = torch.cuda.device_count() >= args.devices
DEVICES = [f"cuda:{number}" if GPUS else "cpu" for number in range(args.devices)]


def build():
    torch.manual_seed(0)
    block = {"dim_feedforward": 4 * args.width, "dropout": 0.0, "batch_first": True, "norm_first": True}
    layers = (nn.TransformerEncoderLayer(args.width, args.width // 16, **block) for _ in range(args.blocks))
    return nn.Sequential(nn.Linear(28, args.width), *layers, nn.Flatten(1), nn.Linear(28 * args.width, 10))


class DataParallel(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model
        # a module on each device, to be called with the weights of the step
        self.modules_of_devices = [copy.deepcopy(model).to(device) for device in DEVICES]

    def forward(self, images):
        replicas = self.replicate()
        parts = self.scatter(images)
        return self.gather(self.parallel_apply(replicas, parts))

    def replicate(self):
        weights = dict(self.model.named_parameters())
        # autograd follows the copies: a weight's gradient is the sum of its copies' gradients
        return [{name: weight.to(device, copy=True) for name, weight in weights.items()} for device in DEVICES]

    def scatter(self, images):
        return [part.to(device) for part, device in zip(images.chunk(args.devices), DEVICES, strict=False)]

    def parallel_apply(self, replicas, parts):
        with ThreadPoolExecutor(args.devices) as threads:
            return list(threads.map(functional_call, self.modules_of_devices, replicas, parts))

    def gather(self, outputs):
        return torch.cat([output.to(DEVICES[0]) for output in outputs])


def train(model):
    seeded = torch.Generator().manual_seed(1)
    images = torch.randn(args.batch, 28, 28, generator=seeded).to(DEVICES[0])
    labels = torch.randint(10, (args.batch,), generator=seeded).to(DEVICES[0])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    for _ in range(args.steps + 1):  # the last one shows the loss after `steps` updates
        loss = cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


if __name__ == "__main__":
    loss = train(DataParallel(build().to(DEVICES[0])))
    if GPUS:
        torchs = nn.DataParallel(build().to(DEVICES[0]), range(args.devices))
        print(f"loss of nn.DataParallel {train(torchs):.6f}")
    alone = train(build().to(DEVICES[0]))
    print(f"devices: {', '.join(DEVICES)}")
    print(f"loss after {args.steps} steps {loss:.6f}, difference from one device {abs(loss - alone):.1e}")
