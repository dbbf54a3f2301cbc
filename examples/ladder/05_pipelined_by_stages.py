"""Rung 5 again, by the schedules of the `mesh` engine: each stage is a rank, and they do work at the same time.

    python examples/ladder/05_pipelined_by_stages.py --schedule 1F1B --batch 120 --splits 10 20 40

ResNet-50 as a sequence of blocks, in two stages that the engine cuts by work; micro-batches are DeepSpeed's
`gradient_accumulation_steps`. Its norms are group norms here: they take each image's own mean, so that the loss is that
of one device over the whole batch, whatever the parts (what batch norm does instead: `05_pipelined.py`).
"""

import argparse
import statistics
import tempfile

import torch
import torchvision
from torch import nn
from torch.nn.functional import cross_entropy

import trainer

parser = argparse.ArgumentParser()
parser.add_argument("--schedule", default="1F1B")
parser.add_argument("--splits", type=int, nargs="+", default=())
for name, default in {"steps": 5, "batch": 8, "size": 33, "split": 4}.items():
    parser.add_argument(f"--{name}", type=int, default=default)
args, seeded = parser.parse_args(), torch.Generator().manual_seed(1)
images = torch.randn(args.batch, 3, args.size, args.size, generator=seeded)
labels = torch.randint(10, (args.batch,), generator=seeded)


def build():
    torch.manual_seed(0)
    net = torchvision.models.resnet50(num_classes=10, norm_layer=lambda channels: nn.GroupNorm(32, channels))
    blocks = [*net.layer1, *net.layer2, *net.layer3, *net.layer4]
    stem = nn.Sequential(net.conv1, net.bn1, net.relu, net.maxpool)
    return nn.Sequential(stem, *blocks, net.avgpool, nn.Flatten(1), net.fc)


def loss_sum(output, target):
    return cross_entropy(output, target, reduction="sum"), len(target)


def pipelined(split, stages=2):
    config = {"train_batch_size": args.batch, "gradient_accumulation_steps": args.batch // split}
    config |= {"gradient_clipping": 0.0, "pipeline": {"stages": stages}, "zero_optimization": {"stage": 0}}
    config["optimizer"] = {"type": "SGD", "params": {"lr": 1e-3}}
    config["trainer"] = {"steps": args.steps + 1, "engine": "mesh", "pipeline_schedule": args.schedule}
    config["trainer"] |= {
        "log": {"every": 1},
        "data": {"evaluation_fraction": 0},
        "run": {"folder": tempfile.mkdtemp()},
    }
    data = torch.utils.data.TensorDataset(images, labels)
    return trainer.train(config, model=build, data=data, loss=loss_sum, processes=stages, quiet=True)


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
        times = [record.step_seconds for record in pipelined(split).records[1:]]
        print(
            f"stages, split {split}: {statistics.mean(times):.4f} s a step, +- {statistics.stdev(times):.4f}",
            flush=True,
        )
    alone = one_device()
    print(f"devices: 2 ranks, a stage each, {args.schedule}, batches of {args.batch} in parts of {args.split}")
    print(f"loss after {args.steps} steps {loss:.6f}, difference from one device {abs(loss - alone):.1e}")
