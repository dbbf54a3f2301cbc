"""Rung 5, pipelined micro-batches: ResNet-50 on two devices that work on two parts of a batch at a time.

    python examples/ladder/05_pipelined.py --batch 120 --splits 1 3 5 8 10 12 20 40 60

prints the time of a step for each split size, beside one device and two unpipelined. On GPUs the overlap comes from
their queues: the host runs ahead. On the CPU both devices are `cpu`, one after the other, so what shows there is what
small parts cost; `05_pipelined_by_stages.py` has two ranks that do overlap. Batch norm takes the mean of what it sees:
with micro-batches that is the part, not the batch, and so the loss is that of one device over the same parts, exactly,
and another than that of one device over the whole batch. Both differences are printed.
"""

import argparse
import statistics
import time

import torch
import torchvision
from torch import nn
from torch.nn.functional import cross_entropy

parser = argparse.ArgumentParser()
parser.add_argument("--splits", type=int, nargs="+", default=(2, 4))
for name, default in {"steps": 5, "batch": 8, "size": 33, "split": 4, "repeats": 3}.items():
    parser.add_argument(f"--{name}", type=int, default=default)
args = parser.parse_args()
DEVICES = ("cuda:0", "cuda:1") if torch.cuda.device_count() >= 2 else ("cpu", "cpu")


def build(devices):
    torch.manual_seed(0)
    net = torchvision.models.resnet50(num_classes=10)
    first = nn.Sequential(net.conv1, net.bn1, net.relu, net.maxpool, net.layer1, net.layer2).to(devices[0])
    return first, nn.Sequential(net.layer3, net.layer4, net.avgpool, nn.Flatten(1), net.fc).to(devices[1])


def pipelined(first, second, images, split):
    outputs, ahead = [], None
    for part in (*images.split(split), None):
        done, ahead = ahead, None if part is None else first(part).to(DEVICES[1])  # of the next one
        if done is not None:
            outputs.append(second(done))
    return torch.cat(outputs)


def by_parts(first, second, images, split):
    return torch.cat([second(first(part)) for part in images.split(split)])


def train(forward, devices, images, labels, split, steps):
    """The loss after `steps` updates, and the times of those steps in seconds."""
    first, second = build(devices)
    optimizer, ends = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=1e-3), []
    for _ in range(steps + 1):
        loss = cross_entropy(forward(first, second, images, split), labels.to(devices[1]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ends.append((loss.item(), time.perf_counter())[1])  # waits for the devices
    return loss.item(), [after - before for before, after in zip(ends, ends[1:], strict=False)]


if __name__ == "__main__":
    seeded = torch.Generator().manual_seed(1)
    images = torch.randn(args.batch, 3, args.size, args.size, generator=seeded).to(DEVICES[0])
    given = images, torch.randint(10, (args.batch,), generator=seeded)
    loss, _ = train(pipelined, DEVICES, *given, args.split, args.steps)
    alone, whole = (train(by_parts, DEVICES[:1] * 2, *given, s, args.steps)[0] for s in (args.split, args.batch))
    ways = [("one device", by_parts, DEVICES[:1] * 2, args.batch), ("two devices", by_parts, DEVICES, args.batch)]
    for label, forward, devices, split in ways + [
        (f"split {split}", pipelined, DEVICES, split) for split in args.splits
    ]:
        times = train(forward, devices, *given, split, args.repeats)[1] if args.repeats > 1 else (0, 0)
        print(f"{label}: {statistics.mean(times):.4f} s a step, +- {statistics.stdev(times):.4f}", flush=True)
    print(f"batch norm over the whole batch: {whole:.6f}, over parts of {args.split}: {alone:.6f}")
    print(f"devices: {' and '.join(DEVICES)}, batches of {args.batch} in parts of {args.split}")
    print(f"loss after {args.steps} steps {loss:.6f}, difference from one device {abs(loss - alone):.1e}")
