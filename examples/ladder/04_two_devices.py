"""Rung 4, layers placed on two devices: a model too large for one; only one of the two works at a time.

    python examples/ladder/04_two_devices.py --model toy        # two linear layers
    python examples/ladder/04_two_devices.py --model seqnet     # three, on FashionMNIST, with Adam
    python examples/ladder/04_two_devices.py --model resnet50   # split after layer2

On the CPU both devices are `cpu`: the placement is the same code, and nothing is copied. FashionMNIST is read from
`--data DIR`: four files of github.com/zalandoresearch/fashion-mnist, unzipped, in DIR/FashionMNIST/raw (`--download`
gets them). Where they are not, images are generated and written in the very format, and read by the same loader.
"""

import argparse
import struct
import tempfile
from pathlib import Path

import torch
import torchvision
from torch import nn
from torch.nn.functional import cross_entropy

parser = argparse.ArgumentParser()
parser.add_argument("--model", choices=("toy", "seqnet", "resnet50"), default="seqnet")
parser.add_argument("--data", type=Path, default=Path("data"))
parser.add_argument("--download", action="store_true")
for name, default in {"steps": 5, "batch": 16, "size": 33}.items():
    parser.add_argument(f"--{name}", type=int, default=default)
args = parser.parse_args()
DEVICES = ("cuda:0", "cuda:1") if torch.cuda.device_count() >= 2 else ("cpu", "cpu")


def fashion(folder):
    if not args.download and not (raw := folder / "FashionMNIST" / "raw").exists():
        print(f"no {raw}: images are generated; how to place the real ones is said in the head of this file")
        raw = (folder := Path(tempfile.mkdtemp())) / "FashionMNIST" / "raw"
        raw.mkdir(parents=True)
        for part, count in (("train", 512), ("t10k", 128)):
            labels = torch.randint(10, (count,), dtype=torch.uint8)
            images = (torch.rand(count, 28, 28) * 128 + 12 * labels[:, None, None]).byte()  # class by brightness
            header = struct.pack(">4i", 2051, count, 28, 28), struct.pack(">2i", 2049, count)
            (raw / f"{part}-images-idx3-ubyte").write_bytes(header[0] + images.numpy().tobytes())
            (raw / f"{part}-labels-idx1-ubyte").write_bytes(header[1] + labels.numpy().tobytes())
    return torchvision.datasets.FashionMNIST(folder, True, torchvision.transforms.ToTensor(), download=args.download)


def build():
    torch.manual_seed(0)
    if args.model == "toy":
        return nn.Sequential(nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 5))
    if args.model == "seqnet":
        middle = nn.ReLU(), nn.Linear(256, 64), nn.ReLU()
        return nn.Sequential(nn.Flatten(1), nn.Linear(784, 256), *middle, nn.Linear(64, 10))
    return torchvision.models.resnet50(num_classes=10)


def placed(net):
    layers, cut = list(net.children()), {"toy": 2, "seqnet": 3, "resnet50": 6}[args.model]
    if args.model == "resnet50":
        layers.insert(-1, nn.Flatten(1))  # which torchvision does in its forward
    first, second = nn.Sequential(*layers[:cut]).to(DEVICES[0]), nn.Sequential(*layers[cut:]).to(DEVICES[1])
    return lambda images: second(first(images).to(DEVICES[1])).to(DEVICES[0])  # autograd goes back over the copies


def train(forward, parameters, images, labels):
    optimizer = torch.optim.Adam(parameters(), lr=1e-4)
    for _ in range(args.steps + 1):  # the last one shows the loss after `steps` updates
        loss = cross_entropy(forward(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


if __name__ == "__main__":
    torch.manual_seed(1)
    shape = (10,) if args.model == "toy" else (3, args.size, args.size)
    images, labels = torch.randn(args.batch, *shape), torch.randint(5, (args.batch,))
    if args.model == "seqnet":
        images, labels = next(iter(torch.utils.data.DataLoader(fashion(args.data), args.batch)))
    images, labels, split, single = images.to(DEVICES[0]), labels.to(DEVICES[0]), build(), build().to(DEVICES[0])
    loss = train(placed(split), split.parameters, images, labels)
    alone = train(single, single.parameters, images, labels)
    print(f"devices: {' and '.join(DEVICES)}, {args.model}")
    print(f"loss after {args.steps} steps {loss:.6f}, difference from one device {abs(loss - alone):.1e}")
