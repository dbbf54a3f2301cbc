"""Rung 5, pipelined micro-batches: ResNet-50 on two devices that work on two parts of a batch at the same time.

    python examples/ladder/05_pipelined.py
    python examples/ladder/05_pipelined.py --batch 120 --splits 1 3 5 8 10 12 20 40 60     # minutes on the CPU

A batch is split into parts. While the second device works on a part, the first one works on the next. The time of a
step is printed for each size of the parts (`--splits`), beside those of one device and of two without a pipeline: with
small parts the many launches cost time, with large ones a device waits. On GPUs the two overlap because a launch
returns before the work is done. On the CPU both devices are `cpu`, one after the other, and what shows is the cost of
small parts; in `05_pipelined_by_stages.py` two processes do overlap.

Batch norm takes the mean of what it sees, which is now a part. So the loss is exactly that of one device that goes
through the same parts, and not that of one device on the whole batch. Both are printed, for parts of `--split`.
"""

import argparse
import statistics
import time

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torchvision.models import resnet50

parser = argparse.ArgumentParser()
parser.add_argument("--splits", type=int, nargs="+", default=(1, 2, 4))
for name, default in {"steps": 5, "batch": 8, "size": 33, "split": 4, "repeats": 3}.items():
    parser.add_argument(f"--{name}", type=int, default=default)
args = parser.parse_args()
DEVICES = ("cuda:0", "cuda:1") if torch.cuda.device_count() >= 2 else ("cpu", "cpu")
ONE = (DEVICES[0], DEVICES[0])


def build(devices):
    torch.manual_seed(0)
    net = resnet50(num_classes=10)
    first = nn.Sequential(net.conv1, net.bn1, net.relu, net.maxpool, net.layer1, net.layer2)
    second = nn.Sequential(net.layer3, net.layer4, net.avgpool, nn.Flatten(1), net.fc)
    return first.to(devices[0]), second.to(devices[1])


def part_by_part(first, second, images, split):
    device = next(second.parameters()).device
    return torch.cat([second(first(part).to(device)) for part in images.split(split)])


def pipelined(first, second, images, split):
    parts = iter(images.split(split))
    outputs = []
    hidden = first(next(parts)).to(DEVICES[1])
    for part in parts:
        outputs.append(second(hidden))  # the second device works on this part,
        hidden = first(part).to(DEVICES[1])  # and the first one on the next
    outputs.append(second(hidden))
    return torch.cat(outputs)


def train(forward, devices, split, steps):
    """Return the loss after `steps` updates, and the seconds of each step but the first."""
    seeded = torch.Generator().manual_seed(1)
    images = torch.randn(args.batch, 3, args.size, args.size, generator=seeded).to(devices[0])
    labels = torch.randint(10, (args.batch,), generator=seeded).to(devices[1])
    first, second = build(devices)
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=1e-3)
    times = []
    for _ in range(steps + 1):
        begin = time.perf_counter()
        loss = cross_entropy(forward(first, second, images, split), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss = loss.item()  # waits for the devices
        times.append(time.perf_counter() - begin)
    return loss, times[1:]


def show_time(label, forward, devices, split):
    _, times = train(forward, devices, split, args.repeats)
    deviation = statistics.stdev(times) if len(times) > 1 else 0.0
    print(f"{label}: {statistics.mean(times):.4f} s a step, +- {deviation:.4f}", flush=True)


if __name__ == "__main__":
    show_time("one device", part_by_part, ONE, args.batch)
    show_time("two devices", part_by_part, DEVICES, args.batch)
    for split in args.splits:
        show_time(f"split {split}", pipelined, DEVICES, split)
    loss, _ = train(pipelined, DEVICES, args.split, args.steps)
    alone, _ = train(part_by_part, ONE, args.split, args.steps)
    whole, _ = train(part_by_part, ONE, args.batch, args.steps)
    print(f"loss of one device, whole batch {whole:.6f}, in parts of {args.split} {alone:.6f}")
    print(f"devices: {', '.join(DEVICES)}, batches of {args.batch} in parts of {args.split}")
    print(f"loss after {args.steps} steps {loss:.6f}, difference from one device {abs(loss - alone):.1e}")
