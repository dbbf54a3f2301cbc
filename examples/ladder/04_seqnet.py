"""Rung 4, SeqNet on two devices, as tutorials on model parallelism train it on FashionMNIST; and Meshloom beside it.

    python examples/ladder/04_seqnet.py --data DIR
    python examples/ladder/04_seqnet.py --data DIR --divide 1

Each of the two layers is put on a device, `forward` carries the activations from one to the other, and the labels go to
where the outputs are. On the CPU both devices are `cpu`: the code is the same, and nothing is copied. In Meshloom the
same class names no devices: `"pipeline": {"stages": 2}` cuts it between the modules that `blocks` names.

Such tutorials divide the images by 255. `ToTensor` has done so already, so that they are divided twice, and the
brightest pixel is 0.004: the network hardly sees them. `--divide 1` leaves them as they are; compare the losses.

A tutorial's loader would have `shuffle=True`. This one draws its samples in Meshloom's order for seed 0, so that the
losses can be compared: two lines "Epoch [1/10]", one by each, and two accuracies. torchvision looks for the images in
DIR/FashionMNIST/raw, and puts them there.
"""

import argparse
import tempfile

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Sampler
from torchvision.datasets import FashionMNIST
from torchvision.transforms import Compose, ToTensor

import meshloom
from meshloom.data.order import KEYED, sample_ids

parser = argparse.ArgumentParser()
parser.add_argument("--data", default="data")
parser.add_argument("--divide", type=float, default=255.0)
for name, default in {"epochs": 10, "batch": 100}.items():
    parser.add_argument(f"--{name}", type=int, default=default)
args = parser.parse_args()
DEVICES = ("cuda:0", "cuda:1") if torch.cuda.device_count() >= 2 else ("cpu", "cpu")


class SeqNet(nn.Module):
    def __init__(self, input_size, hidden_size, output_size, first=None, second=None):
        super().__init__()
        self.first, self.second = first, second  # None: where the input is
        self.lin1 = nn.Linear(input_size, hidden_size).to(first)
        self.lin2 = nn.Linear(hidden_size, output_size).to(second)

    def forward(self, x):
        x = torch.flatten(x, 1)
        x = self.lin1(x.to(self.first))
        x = F.log_softmax(x, dim=1)
        return self.lin2(x.to(self.second))


def build(first=None, second=None):
    torch.manual_seed(0)
    return SeqNet(784, 200, 10, first, second)


class InMeshloomsOrder(Sampler):
    def __init__(self, data):
        self.size = len(data)
        self.epoch = -1

    def __len__(self):
        return self.size

    def __iter__(self):
        self.epoch += 1
        return iter(sample_ids(0, self.epoch * self.size, self.size, self.size, KEYED).tolist())


def train(model, data):
    """Return the mean loss of the last epoch."""
    loader = DataLoader(data, args.batch, sampler=InMeshloomsOrder(data))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loss_function = nn.CrossEntropyLoss()
    for epoch in range(args.epochs):
        running_loss = 0.0
        model.train()
        for images, labels in loader:
            optimizer.zero_grad()
            outputs = model(images)
            loss = loss_function(outputs, labels.to(outputs.device))
            loss.backward()
            optimizer.step()
            running_loss += loss.item()
        average_loss = running_loss / len(loader)
        print(f"Epoch [{epoch + 1}/{args.epochs}], Loss: {average_loss:.4f}", flush=True)
    return average_loss


@torch.no_grad()
def accuracy(model, data):
    model.eval()
    outputs = [(model(images).cpu(), labels) for images, labels in DataLoader(data, args.batch)]
    return sum(int((output.argmax(1) == labels).sum()) for output, labels in outputs) / len(data)


def by_meshloom(data, test):
    config = {
        "train_batch_size": args.batch,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.0,
        "pipeline": {"stages": 2},
        "zero_optimization": {"stage": 0},
        "optimizer": {"type": "Adam", "params": {"lr": 0.01}},
        "trainer": {
            "epochs": args.epochs,
            "evaluation": {"samples": len(test)},
            "log": {"every": 100},
            "run": {"folder": tempfile.mkdtemp()},
        },
    }

    def loss_sum(outputs, labels):
        return F.cross_entropy(outputs, labels, reduction="sum"), len(labels)

    def right(outputs, labels):
        return (outputs.argmax(1) == labels).sum(), len(labels)

    own = {"model": build, "blocks": "lin*", "data": data, "evaluation_data": test, "loss": loss_sum}
    return meshloom.train(config, **own, metrics={"right": right}, processes=2)


if __name__ == "__main__":
    transform = Compose([ToTensor(), lambda image: torch.div(image, args.divide)])
    data = FashionMNIST(args.data, train=True, download=True, transform=transform)
    test = FashionMNIST(args.data, train=False, download=True, transform=transform)
    result = by_meshloom(data, test)
    model = build(*DEVICES)
    loss = train(model, data)
    alone = train(build(DEVICES[0], DEVICES[0]), data)
    ours = result.evaluations[-1].metrics["right"]
    print(f"the loop: loss {loss:.6f}, accuracy {accuracy(model, test):.2%}")
    print(f"Meshloom: loss {result.epochs[-1].loss:.6f}, accuracy {ours:.2%}")
    furthest = max(abs(one - alone) for one in (loss, result.epochs[-1].loss))
    print(f"devices: {' and '.join(DEVICES)}, divided by 255 and {args.divide:g}")
    print(f"loss after {args.epochs} epochs {loss:.6f}, difference from one device {furthest:.1e}")
