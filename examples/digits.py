"""A small convolutional network for the digits of examples/digits.json."""

from torch import nn


def block(inside: int, outside: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(inside, outside, 3, padding=1), nn.GroupNorm(4, outside), nn.GELU())


def model(num_classes: int = 10) -> nn.Module:
    """Of grey images [batch, 1, 8, 8]. An `nn.Sequential`: its children are the blocks that pipelines are cut along."""
    return nn.Sequential(
        block(1, 32),
        block(32, 32),
        nn.MaxPool2d(2),
        block(32, 64),
        block(64, 64),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(256, num_classes),
    )
