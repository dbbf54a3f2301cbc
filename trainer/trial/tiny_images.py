"""A small classifier of the kind that a config names, and made-up images for it."""

from __future__ import annotations

import torch

from trainer.models.classifiers import Classifier, Images

CLASSES, SIZE = 10, 64
"""Made-up images: a residual network's last block still sees four places of each."""
VIT = {"patch_size": 8, "num_heads": 2, "hidden_dim": 16, "mlp_dim": 24}
"""So narrow that patches weigh no more than two blocks: a cut would come before the blocks."""


def tiny_classifier(classifier: Classifier, stages: int) -> Classifier:
    """Return a small classifier with the same kinds of blocks, or itself if none is known."""
    from torchvision.models import ResNet, VisionTransformer
    from torchvision.models.resnet import Bottleneck

    plain = Images(("0", "1"), "RGB", (224, 224), (0.0,) * 3, (1.0,) * 3)
    with torch.device("meta"):
        model = Classifier(classifier.name, classifier.arguments).completed(plain).build()
    if isinstance(model, VisionTransformer):
        kept = {"dropout": model.dropout, "attention_dropout": model.attention_dropout}
        return Classifier("VisionTransformer", {**VIT, **kept, "num_layers": stages + 2})
    if isinstance(model, ResNet):
        kind = type(model.layer1[0])
        width = {"width_per_group": 8} if kind is Bottleneck else {}
        return Classifier("ResNet", {"block": kind.__name__, "layers": [1, 1, 1, 1], **width})
    return Classifier(classifier.name, classifier.arguments)


def made_up(images: Images, count: int) -> list[tuple[torch.Tensor, int]]:
    """Make images of noise around a pattern for each class; the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    classes, shape = len(images.classes), (images.channels, *images.size)
    patterns = torch.randn(classes, *shape, generator=generator)
    noise = torch.randn(count, *shape, generator=generator)
    return [(patterns[index % classes] + noise[index], index % classes) for index in range(count)]
