"""Rung 5, pipelined micro-batches: ResNet-50 on two devices that work on two parts of a batch at a time.

    python examples/ladder/05_pipelined.py --batch 120 --splits 1 3 5 8 10 12 20 40 60

prints the time of a step for each split size, beside one device and two unpipelined: small parts pay for each launch,
large ones leave a device waiting. On GPUs the overlap comes from their queues: the host runs ahead. On the CPU both
devices are `cpu`, one after the other, so what shows there is what small parts cost; `05_pipelined_by_stages.py` has
two ranks that do overlap.

Batch norm takes the mean of what it sees: with micro-batches that is the part, not the batch, and so the loss is that
of one device over the same parts, exactly, and another than that of one device over the whole batch. Both are printed.
"""

import argparse
import statistics
import time

import torch
import torchvision
from torch import nn
from torch.nn.functional import cross_entropy

parser = argparse.ArgumentParser()
parser.add_argument("--splits", type=int, nargs="+", default=(1, 2, 4))
for name, default in {"steps": 5, "batch": 8, "size": 33, "split": 4, "repeats": 3}.items():
    parser.add_argument(f"--{name}", type=int, default=default)
args = parser.parse_args()
DEVICES = ("cuda:0", "cuda:1") if torch.cuda.device_count() >= 2 else ("cpu", "cpu")
ONE = (DEVICES[0], DEVICES[0])


def build(devices):
    torch.manual_seed(0)
    net = torchvision.models.resnet50(num_classes=10)
    first = nn.Sequential(net.conv1, net.bn1, net.relu, net.maxpool, net.layer1, net.layer2).to(devices[0])
    return first, nn.Sequential(net.layer3, net.layer4, net.avgpool, nn.Flatten(1), net.fc).to(devices[1])


def pipelined(first, second, images, split):
    parts = iter(images.split(split))
    outputs = []
    hidden = first(next(parts)).to(DEVICES[1])
    for part in parts:
        outputs.append(second(hidden))  # the second device works on this part,
        hidden = first(part).to(DEVICES[1])  # while the first one already has the next
    outputs.append(second(hidden))
    return torch.cat(outputs)


def by_parts(first, second, images, split):
    device = next(second.parameters()).device
    return torch.cat([second(first(part).to(device)) for part in images.split(split)])


def train(forward, devices, split, steps):
    """The loss after `steps` updates, and the times of those steps in seconds."""
    seeded = torch.Generator().manual_seed(1)
    images = torch.randn(args.batch, 3, args.size, args.size, generator=seeded).to(devices[0])
    labels = torch.randint(10, (args.batch,), generator=seeded).to(devices[1])
    first, second = build(devices)
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=1e-3)
    ends = []
    for _ in range(steps + 1):
        loss = cross_entropy(forward(first, second, images, split), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        last = loss.item()  # waits for the devices
        ends.append(time.perf_counter())
    return last, [after - before for before, after in zip(ends, ends[1:], strict=False)]


def show_time(label, forward, devices, split):
    _, times = train(forward, devices, split, args.repeats)
    deviation = statistics.stdev(times) if len(times) > 1 else 0.0
    print(f"{label}: {statistics.mean(times):.4f} s a step, +- {deviation:.4f}", flush=True)


if __name__ == "__main__":
    loss, _ = train(pipelined, DEVICES, args.split, args.steps)
    alone, _ = train(by_parts, ONE, args.split, args.steps)
    whole, _ = train(by_parts, ONE, args.batch, args.steps)
    show_time("one device", by_parts, ONE, args.batch)
    show_time("two devices", by_parts, DEVICES, args.batch)
    for split in args.splits:
        show_time(f"split {split}", pipelined, DEVICES, split)
    print(f"batch norm over the whole batch: {whole:.6f}, over parts of {args.split}: {alone:.6f}")
    print(f"devices: {' and '.join(DEVICES)}, batches of {args.batch} in parts of {args.split}")
    print(f"loss after {args.steps} steps {loss:.6f}, difference from one device {abs(loss - alone):.1e}")
