"""Rung 5, pipelined micro-batches: ResNet-50 on two devices that work on two parts of a batch at the same time.

    python examples/ladder/05_pipelined.py --batch 8 --splits 2 4
    python examples/ladder/05_pipelined.py --batch 120 --split 20 --splits 1 3 5 8 10 12 20 40 60     # takes minutes

The classes are those of PyTorch's tutorial on model parallelism: torchvision's ResNet with 1,000 classes, cut in two,
and one that splits a batch of 3 x 128 x 128 images into parts of `split_size`. While the second device works on a part,
the first one works on the next. The time of a step is printed for each size of the parts (`--splits`), beside those of
one device and of two without a pipeline: with small parts the many launches cost time, with large ones a device waits.
On GPUs the two overlap because a launch returns before the work is done. On the CPU both devices are `cpu`, one after
the other, and what shows is the cost of small parts; in `05_pipelined_by_stages.py` two processes do overlap.

Batch norm takes the mean of what it sees, which is now a part. So the loss is exactly that of one device that goes
through the same parts, and not that of one device on the whole batch. Both are printed, for parts of `--split`.
"""

import argparse
import statistics
import time

import torch
from torch import nn
from torch.nn.functional import mse_loss, one_hot
from torchvision.models.resnet import Bottleneck, ResNet

parser = argparse.ArgumentParser()
parser.add_argument("--splits", type=int, nargs="+", default=(1, 2, 4))
for name, default in {"steps": 3, "batch": 8, "size": 128, "split": 4, "repeats": 3}.items():
    parser.add_argument(f"--{name}", type=int, default=default)
args = parser.parse_args()
DEVICES = ("cuda:0", "cuda:1") if torch.cuda.device_count() >= 2 else ("cpu", "cpu")
ONE = (DEVICES[0], DEVICES[0])
CLASSES = 1000


class ModelParallelResNet50(ResNet):
    def __init__(self, devices):
        super().__init__(Bottleneck, [3, 4, 6, 3], num_classes=CLASSES)
        self.devices = devices
        first = self.conv1, self.bn1, self.relu, self.maxpool, self.layer1, self.layer2
        self.seq1 = nn.Sequential(*first).to(devices[0])
        self.seq2 = nn.Sequential(self.layer3, self.layer4, self.avgpool).to(devices[1])
        self.fc.to(devices[1])

    def forward(self, x):
        x = self.seq2(self.seq1(x).to(self.devices[1]))
        return self.fc(torch.flatten(x, 1))


class PipelineParallelResNet50(ModelParallelResNet50):
    def __init__(self, devices, split_size=20):
        super().__init__(devices)
        self.split_size = split_size

    def forward(self, x):
        parts = iter(x.split(self.split_size))
        outputs = []
        hidden = self.seq1(next(parts)).to(self.devices[1])
        for part in parts:
            outputs.append(self.fc(self.seq2(hidden).flatten(1)))  # the second device works on this,
            hidden = self.seq1(part).to(self.devices[1])  # and the first one on the next part
        outputs.append(self.fc(self.seq2(hidden).flatten(1)))
        return torch.cat(outputs)


class PartByPart(PipelineParallelResNet50):
    def forward(self, x):
        return torch.cat([ModelParallelResNet50.forward(self, part) for part in x.split(self.split_size)])


def train(make, steps):
    """Return the loss after `steps` updates, and the seconds of each step but the first."""
    seeded = torch.Generator().manual_seed(1)
    torch.manual_seed(0)
    model = make()
    inputs = torch.randn(args.batch, 3, args.size, args.size, generator=seeded).to(model.devices[0])
    labels = one_hot(torch.randint(CLASSES, (args.batch,), generator=seeded), CLASSES).float()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    times = []
    for _ in range(steps + 1):
        begin = time.perf_counter()
        optimizer.zero_grad()
        outputs = model(inputs)
        loss = mse_loss(outputs, labels.to(outputs.device))
        loss.backward()
        optimizer.step()
        loss = loss.item()  # waits for the devices
        times.append(time.perf_counter() - begin)
    return loss, times[1:]


def show_time(label, kind, *options):
    _, times = train(lambda: kind(*options), args.repeats)
    deviation = statistics.stdev(times) if len(times) > 1 else 0.0
    print(f"{label}: {statistics.mean(times):.4f} s a step, +- {deviation:.4f}", flush=True)


if __name__ == "__main__":
    show_time("one device", ModelParallelResNet50, ONE)
    show_time("two devices", ModelParallelResNet50, DEVICES)
    for split in args.splits:
        show_time(f"split {split}", PipelineParallelResNet50, DEVICES, split)
    loss, _ = train(lambda: PipelineParallelResNet50(DEVICES, args.split), args.steps)
    alone, _ = train(lambda: PartByPart(ONE, args.split), args.steps)
    whole, _ = train(lambda: ModelParallelResNet50(ONE), args.steps)
    print(f"loss of one device, whole batch {whole:.6f}, in parts of {args.split} {alone:.6f}")
    print(f"devices: {', '.join(DEVICES)}, batches of {args.batch} in parts of {args.split}")
    print(f"loss after {args.steps} steps {loss:.6f}, difference from one device {abs(loss - alone):.1e}")
