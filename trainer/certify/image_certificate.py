"""The certificate of an image classifier: itself or a small one of its kind, on made-up images."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from trainer.certify.certificate import Certificate
from trainer.certify.module_certificate import certify_subject
from trainer.certify.parameters import constructed, initial
from trainer.certify.tiny_run import Tiny
from trainer.data.dataset import Pairs
from trainer.engines import Machine
from trainer.models import classifiers
from trainer.models.classifiers import Classifier, Images
from trainer.run.images import arguments_of, spec_of
from trainer.run.subject import Given, Subject, amended, image_classifier
from trainer.tasks.image_classification import ImageClassification, class_loss

CLASSES, SIZE = 10, 64
"""Classes and size of made-up images: a residual network's last block still sees four places of
each.
"""
VIT = {"patch_size": 8, "num_heads": 2, "hidden_dim": 16, "mlp_dim": 24}
"""Sizes so narrow that patches weigh no more than two blocks: else a cut would come before the
blocks.
"""


def certify_images(small: Tiny, given: Given, machine: Machine) -> Certificate:
    """Certify the classifier of the config, or of a script. Collective; raises as `certify_given`
    does.
    """
    section, ranks = small.config.trainer, machine.ranks
    wanted = small.layout.train_batch * 3 // 2 + small.held_out + 3
    if (
        given.data is not None
        or given.model is not None
        or ":" in (section.model.name_or_path or "")
    ):
        found = image_classifier(small.config, replace(given, loss=None), small.layout, ranks)
        spec, task, images, notes = found.spec, found.task, found.data.images, ("made-up images",)
    else:
        images = Images(
            tuple(map(str, range(CLASSES))), "RGB", (SIZE, SIZE), (0.0,) * 3, (1.0,) * 3
        )
        name = section.model.name_or_path or ""
        named = ranks.on_first(lambda: classifiers.named(name, arguments_of(section)))
        classifier = ranks.on_first(lambda: tiny_classifier(named, small.layout.stages))
        spec = spec_of(section, images, classifier)
        task = ImageClassification(CLASSES, spec.build, spec.blocks)
        size = " x ".join(map(str, images.size))
        notes = (
            (
                f"a small one of its kind: {spec.parameters / 1e6:.1f} M parameters, made-up "
                "images "
                "of "
                f"{size}"
            ),
        )
    make = partial(initial, spec, section.seed)
    if given.model is not None:
        make = partial(constructed, given.model, section.seed)
    spec = amended(spec, section, ranks, copied=True)
    samples = made_up(images, wanted)
    subject = Subject(spec.tried_on(task.trial(samples[:4])), task, Pairs(samples, None, ""))
    return certify_subject(
        replace(small, changes=(*small.changes, *notes)), subject, make, class_loss, machine
    )


def tiny_classifier(classifier: Classifier, stages: int) -> Classifier:
    """Return a small classifier with the same kinds of blocks; the classifier itself if no small
    one is known.
    """
    from torchvision.models import ResNet, VisionTransformer
    from torchvision.models.resnet import Bottleneck

    with torch.device("meta"):
        model = Classifier(classifier.name, classifier.arguments).completed(_plain()).build()
    if isinstance(model, VisionTransformer):
        kept = {"dropout": model.dropout, "attention_dropout": model.attention_dropout}
        return Classifier("VisionTransformer", {**VIT, **kept, "num_layers": stages + 2})
    if isinstance(model, ResNet):
        kind = type(model.layer1[0])
        width = {"width_per_group": 8} if kind is Bottleneck else {}
        return Classifier("ResNet", {"block": kind.__name__, "layers": [1, 1, 1, 1], **width})
    return Classifier(classifier.name, classifier.arguments)


def _plain() -> Images:
    return Images(("0", "1"), "RGB", (224, 224), (0.0,) * 3, (1.0,) * 3)


def made_up(images: Images, count: int) -> list[tuple[torch.Tensor, int]]:
    """Make images of noise around a pattern for each class; the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    classes, shape = len(images.classes), (images.channels, *images.size)
    patterns = torch.randn(classes, *shape, generator=generator)
    noise = torch.randn(count, *shape, generator=generator)
    return [(patterns[index % classes] + noise[index], index % classes) for index in range(count)]
