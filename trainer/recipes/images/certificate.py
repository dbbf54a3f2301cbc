"""The certificate of an image classifier: itself, or a small one of its kind, on made-up images."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from trainer.certify.pairs import PairsCase
from trainer.certify.parameters import constructed
from trainer.certify.tiny_run import Tiny
from trainer.data.dataset import Pairs
from trainer.engines import Machine
from trainer.errors import ConfigError, Problem
from trainer.models import classifiers
from trainer.models.classifiers import Classifier, Images
from trainer.models.finetuning.changed import changed_spec
from trainer.models.materialise import on_host
from trainer.recipe import HandedIn, RunContext, Subject
from trainer.recipes.images.classifier import arguments_of, spec_of
from trainer.recipes.images.subject import open_classifier
from trainer.recipes.images.task import TOP, ImageClassification, class_loss

CLASSES = 10
SIZE = 64
"""Made-up images: a residual network's last block still sees four places of each."""
VIT = {"patch_size": 8, "num_heads": 2, "hidden_dim": 16, "mlp_dim": 24}
"""So narrow that patches weigh no more than two blocks: a cut would come before the blocks."""


def image_case(small: Tiny, handed_in: HandedIn, machine: Machine) -> PairsCase:
    """An image classifier itself, or a small one of its kind, on made-up images. Collective."""
    section = small.config.trainer
    ranks = machine.ranks
    if machine.device.type == "cuda":
        raise ConfigError(Problem("device", "cuda, of images", "cpu"))
    name = section.model.name_or_path or ""
    if handed_in.data is not None or handed_in.model is not None or ":" in name:
        without = replace(handed_in, loss=None)
        context = RunContext(small.config, without, small.layout, ranks)
        own = open_classifier(context)
        spec = own.spec
        task = own.task
        images = own.data.images
        note = "made-up images"
    else:
        classes = tuple(map(str, range(CLASSES)))
        images = Images(classes, "RGB", (SIZE, SIZE), (0.0,) * 3, (1.0,) * 3)
        named = ranks.on_first(lambda: classifiers.named(name, arguments_of(section)))
        classifier = ranks.on_first(lambda: tiny_classifier(named, small.layout.stages))
        spec = spec_of(section, images, classifier)
        spec = changed_spec(spec, section, ranks, copied=True)
        task = ImageClassification(CLASSES, spec.build, spec.blocks)
        note = (
            f"a small one of its kind: {spec.parameters / 1e6:.1f} M parameters, made-up "
            f"images of {SIZE} x {SIZE}"
        )
    build = partial(on_host, spec)
    if handed_in.model is not None:
        build = partial(constructed, handed_in.model)
    samples = made_up(images, small.layout.train_batch * 3 // 2 + small.held_out + 3)
    subject = Subject(spec.tried_on(task.trial(samples[:4])), task, Pairs(samples, None, ""))
    tops = (1, TOP)[: len(task.measures)]
    return PairsCase(small.noting(note), subject, build, class_loss, tops)


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
    classes = len(images.classes)
    shape = (images.channels, *images.size)
    patterns = torch.randn(classes, *shape, generator=generator)
    noise = torch.randn(count, *shape, generator=generator)
    return [(patterns[index % classes] + noise[index], index % classes) for index in range(count)]
