"""Rung 4, layers placed on two devices: a model too large for one; only one of the two works at a time.

    python examples/ladder/04_two_devices.py --model resnet50            # with the times of one device and of two
    python examples/ladder/04_two_devices.py --model seqnet --devices 3  # on FashionMNIST

A network is a list of layers; each device gets consecutive ones, and between them activations are copied. Which ones
wait can be seen in the times: two devices are no faster than one, and slower by the copies (rung 5 is the cure).

On the CPU all devices are `cpu`: the placement is the same code, and nothing is copied. FashionMNIST is read from
`--data DIR`: four files of github.com/zalandoresearch/fashion-mnist, unzipped, in DIR/FashionMNIST/raw (`--download`
gets them). Where they are not, the images are noise.
"""

import argparse
import statistics
import time
from pathlib import Path

import torch
import torchvision
from torch import nn
from torch.nn.functional import cross_entropy

parser = argparse.ArgumentParser()
parser.add_argument("--model", choices=("seqnet", "resnet50"), default="seqnet")
parser.add_argument("--data", type=Path, default=Path("data"))
parser.add_argument("--download", action="store_true")
parser.add_argument("--devices", "--ranks", type=int, default=2)
for name, default in {"steps": 5, "batch": 16, "size": 33}.items():
    parser.add_argument(f"--{name}", type=int, default=default)
args = parser.parse_args()
GPUS = torch.cuda.device_count() >= args.devices
DEVICES = [f"cuda:{number}" if GPUS else "cpu" for number in range(args.devices)]


def layers():
    torch.manual_seed(0)
    if args.model == "seqnet":
        sizes = nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 10)
        return [nn.Flatten(1), *sizes]
    net = torchvision.models.resnet50(num_classes=10)
    stem = nn.Sequential(net.conv1, net.bn1, net.relu, net.maxpool)
    head = nn.Sequential(net.avgpool, nn.Flatten(1), net.fc)
    return [stem, net.layer1, net.layer2, net.layer3, net.layer4, head]


class Placed(nn.Module):
    def __init__(self, layers, devices):
        super().__init__()
        self.devices = devices
        each, more = divmod(len(layers), len(devices))  # layers a device, and how many devices have one more
        sizes = [each + (number < more) for number in range(len(devices))]
        borders = [sum(sizes[:number]) for number in range(len(devices) + 1)]
        parts = (nn.Sequential(*layers[begin:end]) for begin, end in zip(borders, borders[1:], strict=False))
        self.parts = nn.ModuleList(part.to(device) for part, device in zip(parts, devices, strict=True))

    def forward(self, images):
        for part, device in zip(self.parts, self.devices, strict=True):
            images = part(images.to(device))  # autograd goes back over the copies
        return images


def batch():
    if args.model == "seqnet" and (args.download or (args.data / "FashionMNIST" / "raw").exists()):
        to_tensor = torchvision.transforms.ToTensor()
        found = torchvision.datasets.FashionMNIST(args.data, True, to_tensor, download=args.download)
        return next(iter(torch.utils.data.DataLoader(found, args.batch)))
    shape = (1, 28, 28) if args.model == "seqnet" else (3, args.size, args.size)
    seeded = torch.Generator().manual_seed(1)
    images = torch.randn(args.batch, *shape, generator=seeded)
    return images, torch.randint(10, (args.batch,), generator=seeded)


def train(devices):
    """The loss after `steps` updates, and the seconds of each step."""
    model = Placed(layers(), devices)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3 if args.model == "seqnet" else 1e-4)
    images, labels = batch()
    ends = []
    for _ in range(args.steps + 1):  # the last one shows the loss after `steps` updates
        loss = cross_entropy(model(images), labels.to(devices[-1]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss = loss.item()  # waits for the devices
        ends.append(time.perf_counter())
    return loss, [after - before for before, after in zip(ends, ends[1:], strict=False)]


if __name__ == "__main__":
    loss, placed_times = train(DEVICES)
    alone, single_times = train(DEVICES[:1])
    for label, times in (("one device", single_times), (f"{args.devices} devices", placed_times)):
        deviation = statistics.stdev(times) if len(times) > 1 else 0.0
        print(f"{label}: {statistics.mean(times):.4f} s a step, +- {deviation:.4f}")
    print(f"devices: {' and '.join(DEVICES)}, {args.model}")
    print(f"loss after {args.steps} steps {loss:.6f}, difference from one device {abs(loss - alone):.1e}")
