"""The certificate of an own module or an image classifier: pairs of input and target."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import default_collate

from trainer.certify.parameters import Learner, constructed, learner
from trainer.certify.recording import Sources, State
from trainer.certify.reference import IGNORED, Judged, MicroBatch, Reference
from trainer.certify.tiny_run import Tiny
from trainer.data.dataset import Pairs, Subset
from trainer.engines import Machine
from trainer.errors import ConfigError, DataError, Problem
from trainer.models import classifiers
from trainer.models.classifiers import Classifier, Images
from trainer.models.materialise import on_host
from trainer.models.spec import ModelSpec
from trainer.run.images import arguments_of, spec_of
from trainer.run.subject import Given, Subject, amended, image_classifier, own_module
from trainer.tasks.image_classification import TOP, ImageClassification, class_loss
from trainer.trial.findings import observe_draws
from trainer.trial.setup import tiny

LARGEST = 50_000_000
"""The most parameters of a module that is certified: there is no smaller copy of it."""
PAIRED = 1e-5
"""The relative difference above which a loss over micro-batches counts as one of pairs."""


class PairsCase:
    """A model on pairs, with its loss; `build(seed=...)` builds it with its initial values."""

    base: None = None
    """No base of a language model is read."""

    def __init__(
        self, small: Tiny, subject: Subject, build: Callable[..., nn.Module], loss: Any
    ) -> None:
        self.small, self.subject, self.loss, self._build = small, subject, loss, build
        if subject.spec.parameters > LARGEST:
            actual = f"{subject.spec.parameters / 1e6:,.0f} M parameters"
            most = f"at most {LARGEST / 1e6:,.0f} M"
            raise ConfigError(Problem("model", actual, most, "Verify a smaller one of its kind."))

    architecture = None
    edges: Sequence[Any] = ()

    def rehearse(self, spec: ModelSpec) -> tuple[Sources, Callable[..., Reference]]:
        """Return the samples, and the one process that trains on them.

        Raises ConfigError if one process would draw other numbers, DataError for too few samples.
        """
        layout, source = self.small.layout, self.subject.data.train
        if layout.sync_batch_norm and observe_draws(tiny(spec)[1], spec).any:
            actual = "with a module that draws random numbers, on each data rank its own"
            expected = "dropout of 0 to verify it"
            raise ConfigError(Problem("trainer.sync_batch_norm", actual, expected))
        wanted = layout.train_batch * 3 // 2 + 1  # steps span the ends of epochs
        if len(source) < wanted + 1:
            expected = f"at least {wanted + 1} to verify on"
            raise DataError(Problem("data", f"{len(source)} samples", expected))
        end = min(len(source), wanted + self.small.held_out + 1)
        sources = Sources(Subset(source, range(wanted)), Subset(source, range(wanted, end)))

        def reference(small: Tiny, amend: None = None) -> Reference:
            section = small.config.trainer
            own = learner(self._build(seed=section.seed), section)
            return PairsReference(small, spec, own, sources, self)

        return sources, reference


def module_case(small: Tiny, given: Given, machine: Machine, folder: Path) -> PairsCase:
    """An own module itself, on its own first samples, with its own loss. Collective."""
    subject = own_module(small.config, replace(given, metrics={}), machine.ranks)
    assert given.model is not None
    return PairsCase(small, subject, partial(constructed, given.model), given.loss)


def image_case(small: Tiny, given: Given, machine: Machine, folder: Path) -> PairsCase:
    """An image classifier itself, or a small one of its kind, on made-up images. Collective."""
    section, ranks = small.config.trainer, machine.ranks
    if machine.device.type == "cuda":
        raise ConfigError(Problem("device", "cuda, of images", "cpu"))
    name = section.model.name_or_path or ""
    if given.data is not None or given.model is not None or ":" in name:
        own = image_classifier(small.config, replace(given, loss=None), small.layout, ranks)
        spec, task, images, note = own.spec, own.task, own.data.images, "made-up images"
    else:
        classes = tuple(map(str, range(CLASSES)))
        images = Images(classes, "RGB", (SIZE, SIZE), (0.0,) * 3, (1.0,) * 3)
        named = ranks.on_first(lambda: classifiers.named(name, arguments_of(section)))
        classifier = ranks.on_first(lambda: tiny_classifier(named, small.layout.stages))
        spec = spec_of(section, images, classifier)
        task = ImageClassification(CLASSES, spec.build, spec.blocks)
        note = (
            f"a small one of its kind: {spec.parameters / 1e6:.1f} M parameters, made-up "
            f"images of {SIZE} x {SIZE}"
        )
    build = partial(on_host, spec)
    if given.model is not None:
        build = partial(constructed, given.model)
    spec = amended(spec, section, ranks, copied=True)
    samples = made_up(images, small.layout.train_batch * 3 // 2 + small.held_out + 3)
    subject = Subject(spec.tried_on(task.trial(samples[:4])), task, Pairs(samples, None, ""))
    return PairsCase(small.noting(note), subject, build, class_loss)


class PairsReference(Reference):
    """One process with only the module, `default_collate` and the loss."""

    def __init__(self, small: Tiny, spec: ModelSpec, own: Learner, data: Sources, case: PairsCase):
        self._loss, tops = case.loss, (1, TOP)[: len(case.subject.task.measures)]
        super().__init__(small, spec, own, data, torch.device("cpu"), tops)

    def held_out(self, state: State) -> Judged:
        """Evaluate each sample by itself; by micro-batches if the loss is one of pairs."""
        self._load(state)
        samples, sizes = self._evaluated_samples(), (1, self._layout.micro_batch)
        alone, together = (self._judged(samples, size) for size in sizes)
        return alone if abs(alone.loss - together.loss) <= PAIRED * abs(alone.loss) else together

    def _collated(self, samples: Sequence[Any]) -> tuple[Any, Any]:
        return tuple(default_collate([tuple(sample) for sample in samples]))  # type: ignore[return-value]

    def _output(self, model: nn.Module, inputs: Any) -> Any:
        return model(**inputs) if isinstance(inputs, dict) else model(inputs)

    def _loss_sum(self, model: nn.Module, inputs: Any, targets: Any) -> torch.Tensor:
        output = self._output(model, inputs)
        if self._smoothing and model.training:
            options: Any = {"label_smoothing": self._smoothing, "ignore_index": IGNORED}
            return F.cross_entropy(output.float(), targets, reduction="sum", **options)
        return self._loss(output, targets)[0]  # type: ignore[no-any-return]

    def _counted(self, inputs: Any, targets: Any) -> int:
        """Count targets by the loss itself, from the module's output."""
        training = self.model.training
        with torch.no_grad():
            count = int(self._loss(self._output(self.model.eval(), inputs), targets)[1])
        self.model.train(training)
        return count

    def _example(self) -> Any:
        return self._collated([self._data.training[0]])[0]

    def _whole_step(self, step: int) -> list[MicroBatch]:
        """Return the micro-batches; those that batch norm normalises together are one here."""
        layout, training = self._layout, self._data.training
        if not layout.sync_batch_norm:
            return super()._whole_step(step)
        of_ranks = [self._numbers(step, rank) for rank in range(layout.data_ranks)]
        rows = np.stack(of_ranks, 1).reshape(layout.accumulation, -1)
        batches = [self._collated([training[n] for n in row]) for row in rows]
        return [MicroBatch(0, index, *batch) for index, batch in enumerate(batches)]


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
