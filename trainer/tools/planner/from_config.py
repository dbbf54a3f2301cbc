"""A config as the planner simulates it: without weights, on a cluster that need not exist.

Data is not read either, except the size and the classes of images on this machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import NamedTuple

import torch

from trainer.config import Config, RuntimeFacts, TrainerSection
from trainer.distributed.ranks import ALONE
from trainer.errors import ConfigError, Problem, first_line
from trainer.layout import Layout
from trainer.models import huggingface
from trainer.models.classifiers import Images
from trainer.models.materialise import SMALL
from trainer.models.spec import ModelSpec, NoWeights, counted_flops, flops_per_token
from trainer.optim.decay import spared
from trainer.optim.lr_schedules import schedule_of
from trainer.parallel.checks import check_blocks
from trainer.run import images
from trainer.run.compose import Composed, compose
from trainer.run.subject import amended
from trainer.supervise.process import cache_folder
from trainer.tasks.causal_lm import CausalLM
from trainer.tasks.image_classification import ImageClassification
from trainer.tasks.task import Batch, Task
from trainer.tools.planner.cluster import Cluster
from trainer.tools.planner.estimate import Plan, plan_of, with_blocks
from trainer.tools.planner.simulate import SampleCost, Workload

STEPS = 1000
"""The steps of the learning-rate schedule if the config leaves them to the data."""


@dataclass(frozen=True)
class ModelOnCluster:
    """A config's model on a cluster, whole and with fewer blocks."""

    config: Config
    """The resolved config."""
    workload: Workload
    """The workload with all blocks."""
    task: Callable[[ModelSpec], Task]
    """Builds the task of the model, or of it with fewer blocks."""

    @cached_property
    def of_blocks(self) -> Callable[[int], ModelSpec]:
        """A function that returns the model with so many blocks in all, each built once; requires
        `first_blocks`.

        Trials use the whole model's tiny copy: a few blocks of a large model are still large.
        """
        whole = self.workload.spec
        first_blocks = whole.tiny.first_blocks
        assert first_blocks is not None

        @cache
        def of_blocks(count: int) -> ModelSpec:
            few = amended(first_blocks(count), self.config.trainer, ALONE, copied=True)
            return replace(few, weights=NoWeights(), tiny=whole.tiny)

        return of_blocks

    def with_blocks(self, blocks: int | None, accumulation: int) -> Workload:
        """Return the workload with so many blocks per stage, or all, and so many micro-batches."""
        spec = self.workload.spec
        if blocks is not None and spec.tiny.first_blocks is not None:
            spec = _of_shapes(self.of_blocks(blocks * self.workload.layout.stages))
        undecayed = spared(self.config.trainer.weight_decay_excludes, spec)
        fewer = with_blocks(self.workload, spec, blocks, accumulation)
        return replace(fewer, task=self.task(spec), undecayed=undecayed)


def planned(config: Config, cluster: Cluster) -> Plan:
    """Plan a config on a cluster. Raises ConfigError if it does not fit the cluster, or can't be
    simulated.
    """
    return plan_of(model_on(config, cluster).with_blocks, cluster)


def on_cluster(config: Config, cluster: Cluster) -> Composed:
    """A config on all GPUs of a cluster. Raises ConfigError where it does not fit."""
    return compose(
        config, RuntimeFacts(cluster.world_size, None, None, True, "cuda", cluster.devices)
    )


def model_on(config: Config, cluster: Cluster) -> ModelOnCluster:
    """Build the source of a config on a cluster, reading only the model's description.

    Raises ConfigError if the layout does not fit the cluster or the model, DataError if images do
    not.
    """
    composed = on_cluster(config, cluster)
    section, layout = composed.config.trainer, composed.layout
    name, engine = composed.engine()
    model_of = {"causal_lm": _language, "image_classification": _classifier}[section.task]
    trained = model_of(section, layout)
    check_blocks(trained.spec, layout)
    engine.check(trained.spec, layout)
    spec = _of_shapes(trained.spec)
    config = composed.knowing(
        hidden_size=spec.language.hidden_size, total_steps=section.steps or STEPS
    ).config
    scheduler = None if config.scheduler is None else vars(config.scheduler)
    full = Workload(
        layout=layout,
        engine_name=name,
        engine=engine,
        spec=spec,
        task=trained.task(spec),
        deepspeed=config.deepspeed,
        undecayed=spared(section.weight_decay_excludes, spec),
        schedule=schedule_of(vars(config.optimizer), scheduler),
        sample=trained.sample,
        batch=trained.batch,
    )
    return ModelOnCluster(config, full, trained.task)


class TaskModel(NamedTuple):
    """The description by a task of the model that a config names."""

    spec: ModelSpec
    task: Callable[[ModelSpec], Task]
    """Builds the task of the model, or of it with fewer blocks."""
    batch: Callable[[int], Batch]
    """Makes a micro-batch of so many samples."""
    sample: SampleCost


def _language(section: TrainerSection, layout: Layout) -> TaskModel:
    architecture = huggingface.read_config(section.model)
    spec = amended(huggingface.spec_of(architecture, section.model, weights=False), section, ALONE)
    length = section.data.sequence_length

    def batch(count: int) -> Batch:
        ids = torch.zeros(count, length, dtype=torch.int64)
        return {"input_ids": ids, "targets": torch.ones_like(ids)}

    flops, kind = flops_per_token(spec, length) * length, f"samples of {length:,} tokens"
    regular = section.label_smoothing, section.neftune_alpha
    # a transformer's block surely keeps the inputs of its attention and of its other half
    sample = SampleCost("token", length, kind, flops, length * (spec.language.hidden_size or 0), 2)
    return TaskModel(
        spec, lambda spec: CausalLM.of(spec, 0).regularised(spec, *regular), batch, sample
    )


def _classifier(section: TrainerSection, layout: Layout) -> TaskModel:
    named, given = images.named_in(section), images.expected(section, cache_folder())
    # no weights are read or downloaded
    arguments = {
        key: value
        for key, value in named.arguments.items()
        if key not in ("weights", "weights_backbone")
    }
    classifier = replace(named, arguments=arguments, folder=None)
    classes, shape = len(given.classes), (given.channels, *given.size)
    spec = images.spec_of(section, given, classifier)
    plain = ImageClassification(classes, spec.build, spec.blocks)
    first = [(torch.zeros(shape), 0)] * 2
    images.check(spec, plain, given, str(section.data.path or section.task), layout, first)
    spec = amended(spec, section, ALONE).tried_on(plain.trial(first))

    task, batch = (
        plain.regularised(spec, section.label_smoothing, section.neftune_alpha),
        batches_of(given),
    )
    two = {
        name: part.to("meta") for name, part in batch(2).items()
    }  # batch norm has no statistics of one
    try:
        flops = counted_flops(spec, lambda model: task.loss_sum(task.prepare(model), two)) / 2
    except Exception as error:  # whatever the model's own code raises
        seen = (
            f"its training fails on the meta device: {type(error).__name__}: {first_line(error)}"[
                :200
            ]
        )
        expected = "scores of these images in training, as in an evaluation"
        raise ConfigError(Problem(f"trainer.model: {spec.name}", seen, expected)) from error
    hidden = math.prod(shape)
    with suppress(KeyError):  # a block that takes no tensor
        hidden = min(
            [
                hidden,
                *(
                    math.prod(task.hidden_shape(batch(1), block))
                    for block in range(len(spec.blocks))
                ),
            ]
        )
    kind = f"images of {' x '.join(map(str, shape))}, {classes:,} classes"
    return TaskModel(spec, lambda spec: task, batch, SampleCost("image", 1, kind, flops, hidden, 0))


def batches_of(images: Images) -> Callable[[int], Batch]:
    """Return a function that makes micro-batches as `ImageClassification` collates them, of so many
    images.
    """

    def batch(count: int) -> Batch:
        pixels, targets = (
            torch.zeros(count, images.channels, *images.size),
            torch.zeros(count, dtype=torch.int64),
        )
        return {
            "input": pixels,
            "target": targets,
            "count": torch.tensor(count),
            "share": torch.tensor(1.0),
        }

    return batch


def _of_shapes(spec: ModelSpec) -> ModelSpec:
    """Return the spec with shapes alone, without reading weights. Trials still have values."""

    most = (
        SMALL if isinstance(spec.weights, NoWeights) else math.inf
    )  # larger ones need their constructor

    @cache
    def shapes() -> dict[str, torch.Size]:
        model = spec.build()
        tensors = (
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        )
        return {name: tensor.shape for name, tensor in tensors if tensor.numel() <= most}

    def constructed(name: str) -> torch.Tensor | None:
        return torch.empty(shape) if (shape := shapes().get(name)) is not None else None

    tried = spec.tiny.copy or (lambda *_, **__: spec)
    return replace(
        spec, weights=NoWeights(), constructed=constructed, tiny=replace(spec.tiny, copy=tried)
    )
