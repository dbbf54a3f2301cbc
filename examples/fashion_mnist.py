"""SeqNet, the fully connected network of examples/fashion_mnist.json."""

from torch import nn


def seqnet(num_classes: int = 10) -> nn.Module:
    """Of grey images [batch, 1, 28, 28]. Its children are the blocks that pipeline stages are cut along."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(784, 200),
        nn.ReLU(),
        nn.Linear(200, 200),
        nn.ReLU(),
        nn.Linear(200, num_classes),
    )
