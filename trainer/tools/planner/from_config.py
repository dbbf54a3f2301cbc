"""A config as the planner simulates it: without weights, on a cluster that need not exist.

Data is not read either, except the size and the classes of images on this machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import torch

from trainer.config import Config, RuntimeFacts
from trainer.distributed.ranks import ALONE
from trainer.engines.devices import BF16, FLOAT8
from trainer.models.finetuning.changed import changed_spec
from trainer.models.materialise import SMALL
from trainer.models.names import tensors_of
from trainer.models.spec import ModelSpec, NoWeights
from trainer.optim.decay import spared
from trainer.optim.lr_schedules import schedule_of
from trainer.parallel import float8
from trainer.parallel.checks import check_blocks
from trainer.parallel.probes.context_parts import QUESTION
from trainer.probes.question import Probed, ask
from trainer.recipe import of_recipe, planned_model
from trainer.run.compose import Composed, compose
from trainer.run.engine_choice import choice_of
from trainer.tasks.task import Task
from trainer.tools.planner.cluster import Cluster
from trainer.tools.planner.extrapolate import Plan, plan_of
from trainer.tools.planner.simulate import Workload

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
        """Return the model with `count` blocks; its tiny copy, for trials, stays the whole's."""
        tiny = self.workload.spec.tiny
        assert tiny.first_blocks is not None
        few = changed_spec(tiny.first_blocks(count), self.config.trainer, ALONE, copied=True)
        return replace(few.with_weights(NoWeights()), tiny=tiny)

    def with_blocks(self, blocks: int | None, accumulation: int) -> Workload:
        """Return the workload with so many blocks per stage, and so many micro-batches.

        `blocks` None: all. `accumulation` 0: the layout's.
        """
        full = self.workload
        spec = self.workload.spec
        layout = self.workload.layout
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
    """Plan a config. Raises ConfigError if the cluster or fake tensors can't run it."""
    return plan_of(model_on(config, cluster).with_blocks, cluster)


def on_cluster(config: Config, cluster: Cluster) -> Composed:
    """Compose a config on all GPUs of a cluster. Raises ConfigError if it does not fit them."""
    bf16 = not cluster.device.lacks(BF16)
    facts = RuntimeFacts(cluster.world_size, None, None, bf16, "cuda", cluster.devices)
    composed = compose(config, facts)
    if composed.layout.float8 != "none" and cluster.device.lacks(FLOAT8):
        raise float8.lacking(composed.layout, cluster.device.name)
    return composed


def model_on(config: Config, cluster: Cluster) -> ModelOnCluster:
    """Read the description of a config's model, without weights, and lay it out on a cluster.

    Raises ConfigError if the layout does not fit both, DataError if images can't be read.
    """
    composed = on_cluster(config, cluster)
    section = composed.config.trainer
    layout = composed.layout
    composed.engine()  # an error before the model is read, where none can run the layout
    trained = planned_model(section, layout)
    with of_recipe(section.task):
        sample = trained.cost(trained.spec)
    check_blocks(trained.spec, layout)
    engine = choice_of(composed, spec=trained.spec)
    if layout.context > 1:
        task = trained.task(trained.spec)
        ask(QUESTION, Probed(trained.spec, task, layout, packed=section.data.packs))
    spec = _of_shapes(trained.spec)
    config = composed.knowing(
        hidden_size=spec.language.hidden_size, total_steps=section.steps or STEPS
    ).config
    full = Workload(
        layout=layout,
        engine_name=engine.name,
        engine=engine.kind,
        spec=spec,
        task=trained.task(spec),
        deepspeed=config.deepspeed,
        undecayed=spared(section.weight_decay_excludes, spec),
        schedule=schedule_of(config.settings),
        sample=sample,
        batch=trained.batch,
    )
    return ModelOnCluster(config, full, trained.task)


def _of_shapes(spec: ModelSpec) -> ModelSpec:
    """Return the spec without weights: tensors have shapes alone. Its trials still have values."""
    # tensors that are never read from weights need their constructor, however large
    most = SMALL if isinstance(spec.building.weights, NoWeights) else math.inf

    @cache
    def shapes() -> dict[str, torch.Size]:
        named = tensors_of(spec.build()).items()
        return {name: tensor.shape for name, tensor in named if tensor.numel() <= most}

    def constructed(name: str) -> torch.Tensor | None:
        return torch.empty(shape) if (shape := shapes().get(name)) is not None else None

    tiny = replace(spec.tiny, copy=spec.tiny.copy or (lambda *_, **__: spec))
    building = replace(spec.building, weights=NoWeights(), constructed=constructed)
    return replace(spec, building=building, tiny=tiny)
