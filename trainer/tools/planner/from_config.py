"""A config as the planner simulates it: without weights, on a cluster that need not exist.

Data is not read either, except the size and the classes of images on this machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import torch

from trainer.config import Config, RuntimeFacts, TrainerSection
from trainer.distributed.ranks import ALONE
from trainer.engines.devices import BF16, FLOAT8
from trainer.errors import ConfigError, Problem, refused
from trainer.layout import Layout
from trainer.models import huggingface
from trainer.models.classifiers import Images
from trainer.models.materialise import SMALL
from trainer.models.names import tensors_of
from trainer.models.spec import ModelSpec, NoWeights, counted_flops, flops_per_token
from trainer.optim.decay import spared
from trainer.optim.lr_schedules import schedule_of
from trainer.parallel.checks import check_blocks
from trainer.parallel.splits import rows
from trainer.run import images
from trainer.run.compose import Composed, compose
from trainer.run.subject import amended
from trainer.supervise.process import cache_folder
from trainer.tasks.causal_lm import CausalLM
from trainer.tasks.image_classification import ImageClassification
from trainer.tasks.task import Batch, Task
from trainer.tools.planner.cluster import Cluster
from trainer.tools.planner.extrapolate import Plan, plan_of
from trainer.tools.planner.simulate import SampleCost, Workload

STEPS = 1000
"""The steps of the learning-rate schedule if the config leaves them to the data."""


@dataclass(frozen=True, eq=False)
class ModelOnCluster:
    """A config's model on a cluster, whole and with fewer blocks."""

    config: Config
    workload: Workload
    task: Callable[[ModelSpec], Task]
    """Builds the task of the model, or of it with fewer blocks."""

    @cache  # noqa: B019 - a plan is a process's work
    def of_blocks(self, count: int) -> ModelSpec:
        """Return the model with so many blocks; trials stay those of the whole's tiny copy."""
        tiny = self.workload.spec.tiny
        assert tiny.first_blocks is not None
        few = amended(tiny.first_blocks(count), self.config.trainer, ALONE, copied=True)
        return replace(few, weights=NoWeights(), tiny=tiny)

    def with_blocks(self, blocks: int | None, accumulation: int) -> Workload:
        """Return the workload with so many blocks per stage, or all, and so many micro-batches."""
        full, spec, layout = self.workload, self.workload.spec, self.workload.layout
        if blocks is not None:
            spec = _of_shapes(self.of_blocks(blocks * layout.stages))
            layout = replace(layout, schedule=replace(layout.schedule, partition="uniform"))
        rounds = accumulation or layout.accumulation
        samples = layout.micro_batch * rounds * layout.data_ranks
        batches = {"train_batch_size": samples, "gradient_accumulation_steps": rounds}
        return replace(
            full,
            layout=replace(layout, accumulation=rounds),
            spec=spec,
            task=self.task(spec),
            deepspeed={**full.deepspeed, **batches},
            undecayed=spared(self.config.trainer.weight_decay_excludes, spec),
        )


def planned(config: Config, cluster: Cluster) -> Plan:
    """Plan a config. Raises ConfigError if it does not suit the cluster, or fake tensors."""
    return plan_of(model_on(config, cluster).with_blocks, cluster)


def on_cluster(config: Config, cluster: Cluster) -> Composed:
    """Compose a config on all GPUs of a cluster. Raises ConfigError if it does not suit them."""
    bf16 = not cluster.device.lacks(BF16)
    facts = RuntimeFacts(cluster.world_size, None, None, bf16, "cuda", cluster.devices)
    composed = compose(config, facts)
    if composed.layout.float8 != "none" and cluster.device.lacks(FLOAT8):
        seen = f"{composed.layout.float8} on {cluster.device.name}"
        raise ConfigError(Problem("trainer.float8", seen, "a GPU with float8: Ada, Hopper, later"))
    return composed


def model_on(config: Config, cluster: Cluster) -> ModelOnCluster:
    """Read a config's model for a cluster: only its description.

    Raises ConfigError if the layout does not suit both, DataError if images do not.
    """
    composed = on_cluster(config, cluster)
    section, layout = composed.config.trainer, composed.layout
    name, engine = composed.engine()
    model_of = {"causal_lm": _language, "image_classification": _classifier}.get(section.task)
    if model_of is None:
        raise ConfigError(Problem("trainer.task", section.task, "a task whose model is named"))
    trained = model_of(section, layout)
    check_blocks(trained.spec, layout)
    engine.check(trained.spec, layout)
    if layout.context > 1:
        rows.check(trained.spec, trained.task(trained.spec), layout, section.data.packs)
    spec = _of_shapes(trained.spec)
    config = composed.knowing(
        hidden_size=spec.language.hidden_size, total_steps=section.steps or STEPS
    ).config
    full = Workload(
        layout=layout,
        engine_name=name,
        engine=engine,
        spec=spec,
        task=trained.task(spec),
        deepspeed=config.deepspeed,
        undecayed=spared(section.weight_decay_excludes, spec),
        schedule=schedule_of(config.settings),
        sample=trained.sample,
        batch=trained.batch,
    )
    return ModelOnCluster(config, full, trained.task)


class TaskModel(NamedTuple):
    """The description by a task of the model that a config names."""

    spec: ModelSpec
    task: Callable[[ModelSpec], Task]
    batch: Callable[[int], Batch]
    sample: SampleCost


def _language(section: TrainerSection, layout: Layout) -> TaskModel:
    architecture = huggingface.read_config(section.model)
    spec = amended(huggingface.spec_of(architecture, section.model, weights=False), section, ALONE)
    length = section.data.sequence_length

    def batch(count: int) -> Batch:
        ids, lengths = torch.zeros(count, length, dtype=torch.int64), torch.full((count, 1), length)
        return {"input_ids": ids, "targets": torch.ones_like(ids), "lengths": lengths}

    attention = CausalLM.of(spec, 0).attention()  # tried here, where tensors have values

    def task(spec: ModelSpec) -> Task:
        plain = CausalLM.of(spec, 0, lambda: attention)
        return plain.regularised(spec, section.label_smoothing, section.neftune_alpha)

    flops, kind = flops_per_token(spec, length) * length, f"samples of {length:,} tokens"
    sample = SampleCost("token", length, kind, flops, length * (spec.language.hidden_size or 0))
    return TaskModel(spec, task, batch, sample)


def _classifier(section: TrainerSection, layout: Layout) -> TaskModel:
    named, known = images.named_in(section), images.expected(section, cache_folder())
    read = ("weights", "weights_backbone")  # none are read or downloaded
    arguments = {key: value for key, value in named.arguments.items() if key not in read}
    shape, classes = (known.channels, *known.size), len(known.classes)
    spec = images.spec_of(section, known, replace(named, arguments=arguments, folder=None))
    plain = ImageClassification(classes, spec.build, spec.blocks)
    first = [(torch.zeros(shape), 0)] * 2
    images.check(spec, plain, known, str(section.data.path or section.task), layout, first)
    spec = amended(spec, section, ALONE).tried_on(plain.trial(first))
    task = plain.regularised(spec, section.label_smoothing, section.neftune_alpha)
    batch = batches_of(known)
    hidden = math.prod(shape)
    with suppress(KeyError):  # a block that takes no tensor
        shapes = [task.hidden_shape(batch(1), block) for block in range(len(spec.blocks))]
        hidden = min([hidden, *map(math.prod, shapes)])
    kind = f"images of {' x '.join(map(str, shape))}, {classes:,} classes"
    sample = SampleCost("image", 1, kind, _flops_of_an_image(spec, task, batch), hidden)
    return TaskModel(spec, lambda spec: task, batch, sample)


def _flops_of_an_image(
    spec: ModelSpec, task: ImageClassification, batch: Callable[[int], Batch]
) -> float:
    """Count FLOPs on the meta device, of two images: batch norm has no statistics of one."""
    two = {name: part.to("meta") for name, part in batch(2).items()}
    expected = "scores of these images in training, as in an evaluation"
    start = "its training fails on the meta device: "
    # whatever the model's own code raises
    with refused(f"trainer.model: {spec.name}", expected, named=True, start=start):
        return counted_flops(spec, lambda model: task.loss_sum(task.prepare(model), two)) / 2


def batches_of(images: Images) -> Callable[[int], Batch]:
    """Return a function that makes micro-batches as `ImageClassification` collates them."""
    return lambda count: {
        "input": torch.zeros(count, images.channels, *images.size),
        "target": torch.zeros(count, dtype=torch.int64),
        "count": torch.tensor(count),
        "share": torch.tensor(1.0),
    }


def _of_shapes(spec: ModelSpec) -> ModelSpec:
    """Return the spec with shapes alone, without reading weights. Trials still have values."""
    # tensors that are never read from weights need their constructor, however large
    most = SMALL if isinstance(spec.weights, NoWeights) else math.inf

    @cache
    def shapes() -> dict[str, torch.Size]:
        named = tensors_of(spec.build()).items()
        return {name: tensor.shape for name, tensor in named if tensor.numel() <= most}

    def constructed(name: str) -> torch.Tensor | None:
        return torch.empty(shape) if (shape := shapes().get(name)) is not None else None

    tiny = replace(spec.tiny, copy=spec.tiny.copy or (lambda *_, **__: spec))
    return replace(spec, weights=NoWeights(), constructed=constructed, tiny=tiny)
