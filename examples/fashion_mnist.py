"""SeqNet on FashionMNIST: the model of examples/fashion_mnist.json, and a tutorial's loop that trains it as that does.

    python examples/fashion_mnist.py --root data --epochs 1

torchvision looks for the data set in `data`, and puts it there. docs/from_a_tutorial.md has both beside each other.
"""

import argparse

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import Adam
from torch.utils.data import DataLoader

from meshloom.data.order import KEYED, sample_ids


def seqnet(num_classes=10):
    """Of grey images [batch, 1, 28, 28]. Its children are the blocks that pipeline stages are cut along."""
    torch.manual_seed(0)
    hidden = nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU()
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(200, num_classes))


def train(root, epochs):
    """Return the loss of each step, and the accuracy on the test set."""
    from torchvision.datasets import FashionMNIST  # not needed for the JSON's model
    from torchvision.transforms import ToTensor

    losses = []
    data = FashionMNIST(root, download=True, transform=ToTensor())
    model = seqnet()
    optimizer = Adam(model.parameters(), lr=0.01)
    for epoch in range(epochs):
        order = sample_ids(0, epoch * len(data), len(data), len(data), KEYED).tolist()
        for images, labels in DataLoader(data, 100, sampler=order):
            loss = cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())

    test = FashionMNIST(root, train=False, transform=ToTensor())
    right = 0
    for images, labels in DataLoader(test, 100):
        right += int((model(images).argmax(1) == labels).sum())
    return losses, right / len(test)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", default="data")
    parser.add_argument("--epochs", type=int, default=5)
    args = parser.parse_args()
    losses, accuracy = train(args.root, args.epochs)
    for step, loss in enumerate(losses, 1):
        print(f"step {step} | loss {loss:.6f}")
    print(f"accuracy {accuracy:.2%}")
