"""Rung 5 again, by the schedules of the `mesh` engine: each stage is a process, and they do work at the same time.

    python examples/ladder/05_pipelined_by_stages.py --schedule 1F1B
    python examples/ladder/05_pipelined_by_stages.py --batch 120 --split 20 --splits 10 20 40     # minutes on the CPU

torchvision's ResNet-50 with 1,000 classes is a sequence of blocks here, which the engine cuts into two stages of about
equal work. A part (the tutorial's `split_size`) is a micro-batch, and their number DeepSpeed's
`gradient_accumulation_steps`. Norms are group norms: they take the mean of each image alone, so that the loss is that
of one device on the whole batch, whatever the parts (`05_pipelined.py` shows what batch norm does instead). Nor could
losses be compared under batch norm: with so few images, inputs moved by 1e-7 move the loss after two steps by 1 %.
"""

import argparse
import statistics
import tempfile

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset
from torchvision.models import resnet50

import meshloom

parser = argparse.ArgumentParser()
parser.add_argument("--schedule", default="1F1B")
parser.add_argument("--splits", type=int, nargs="+", default=())
for name, default in {"steps": 5, "batch": 8, "size": 128, "split": 4}.items():
    parser.add_argument(f"--{name}", type=int, default=default)
args = parser.parse_args()
seeded = torch.Generator().manual_seed(1)
images = torch.randn(args.batch, 3, args.size, args.size, generator=seeded)
labels = torch.randint(1000, (args.batch,), generator=seeded)


def build():
    torch.manual_seed(0)
    net = resnet50(num_classes=1000, norm_layer=lambda channels: nn.GroupNorm(32, channels))
    stem = nn.Sequential(net.conv1, net.bn1, net.relu, net.maxpool)
    blocks = [*net.layer1, *net.layer2, *net.layer3, *net.layer4]
    return nn.Sequential(stem, *blocks, net.avgpool, nn.Flatten(1), net.fc)


def loss_sum(outputs, labels):
    return cross_entropy(outputs, labels, reduction="sum"), len(labels)


def pipelined(split):
    config = {
        "train_batch_size": args.batch,
        "gradient_accumulation_steps": args.batch // split,
        "gradient_clipping": 0.0,
        "pipeline": {"stages": 2},
        "zero_optimization": {"stage": 0},
        "optimizer": {"type": "SGD", "params": {"lr": 1e-3}},
        "trainer": {
            "engine": "mesh",
            "pipeline_schedule": args.schedule,
            "steps": args.steps + 1,
            "data": {"evaluation_fraction": 0},
            "log": {"every": 1},
            "run": {"folder": tempfile.mkdtemp()},
        },
    }
    data = TensorDataset(images, labels)
    return meshloom.train(config, model=build, data=data, loss=loss_sum, processes=2, quiet=True)


def one_device():
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(args.steps + 1):  # the last one shows the loss after `steps` updates
        loss = cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


if __name__ == "__main__":
    loss = pipelined(args.split).losses[-1]
    for split in args.splits:
        times = [record.speed.step_seconds for record in pipelined(split).records[1:]]
        deviation = statistics.stdev(times) if len(times) > 1 else 0.0
        print(f"stages, split {split}: {statistics.mean(times):.4f} s a step, +- {deviation:.4f}", flush=True)
    alone = one_device()
    print(f"the loop: loss {alone:.6f}; Meshloom: loss {loss:.6f}")
    print(f"devices: 2 ranks, a stage each, {args.schedule}, batches of {args.batch} in parts of {args.split}")
    print(f"loss after {args.steps} steps {loss:.6f}, difference from one device {abs(loss - alone):.1e}")
