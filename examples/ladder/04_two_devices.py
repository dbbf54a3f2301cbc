"""Rung 4, ResNet-50 on several devices, for a model that is too large for one; only one device works at a time.

    python examples/ladder/04_two_devices.py
    python examples/ladder/04_two_devices.py --devices 3 --size 33

A network is a list of layers. Each device gets a run of consecutive ones, and activations are copied from device to
device. The time of a step is printed beside that on one device: as each device waits for the one before it, two are no
faster than one, and slower by the copies. Rung 5 is the cure.

On the CPU all devices are `cpu`: the code is the same, and nothing is copied. The images are noise of 3 x 128 x 128, of
1,000 classes. `04_seqnet.py` trains a smaller network, on FashionMNIST, and sets Meshloom beside it.
"""

import argparse
import statistics
import time

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torchvision.models import resnet50

parser = argparse.ArgumentParser()
parser.add_argument("--devices", "--ranks", type=int, default=2)
for name, default in {"steps": 5, "batch": 16, "size": 128}.items():
    parser.add_argument(f"--{name}", type=int, default=default)
args = parser.parse_args()
GPUS = torch.cuda.device_count() >= args.devices
DEVICES = [f"cuda:{number}" if GPUS else "cpu" for number in range(args.devices)]


def layers():
    torch.manual_seed(0)
    net = resnet50(num_classes=1000)
    stem = nn.Sequential(net.conv1, net.bn1, net.relu, net.maxpool)
    head = nn.Sequential(net.avgpool, nn.Flatten(1), net.fc)
    return [stem, net.layer1, net.layer2, net.layer3, net.layer4, head]


class Placed(nn.Module):
    def __init__(self, layers, devices):
        super().__init__()
        self.devices = devices
        self.parts = nn.ModuleList()
        for number, device in enumerate(devices):
            begin = number * len(layers) // len(devices)
            end = (number + 1) * len(layers) // len(devices)
            self.parts.append(nn.Sequential(*layers[begin:end]).to(device))

    def forward(self, images):
        for part, device in zip(self.parts, self.devices, strict=True):
            images = part(images.to(device))  # autograd goes back over the copies
        return images


def batch():
    seeded = torch.Generator().manual_seed(1)
    images = torch.randn(args.batch, 3, args.size, args.size, generator=seeded)
    return images, torch.randint(1000, (args.batch,), generator=seeded)


def train(devices):
    """Return the loss after `steps` updates, and the seconds of each step but the first."""
    model = Placed(layers(), devices)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    images, labels = batch()
    times = []
    for _ in range(args.steps + 1):  # the last one shows the loss after `steps` updates
        begin = time.perf_counter()
        loss = cross_entropy(model(images), labels.to(devices[-1]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss = loss.item()  # waits for the devices
        times.append(time.perf_counter() - begin)
    return loss, times[1:]


def show(label, times):
    deviation = statistics.stdev(times) if len(times) > 1 else 0.0
    print(f"{label}: {statistics.mean(times):.4f} s a step, +- {deviation:.4f}")


if __name__ == "__main__":
    loss, times = train(DEVICES)
    alone, times_alone = train(DEVICES[:1])
    show("one device", times_alone)
    show(f"{args.devices} devices", times)
    print(f"devices: {', '.join(DEVICES)}, batches of {args.batch}")
    print(f"loss after {args.steps} steps {loss:.6f}, difference from one device {abs(loss - alone):.1e}")
