"""A config as what the planner simulates: without data, without weights, on a cluster that need not be there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial

import torch

from trainer.config import Config, RuntimeFacts, resolve
from trainer.distributed.ranks import ALONE
from trainer.engines import select
from trainer.errors import ConfigError, Problem
from trainer.layout import layout_of
from trainer.models import huggingface
from trainer.models.spec import ModelSpec, NoWeights
from trainer.optim.decay import spared
from trainer.optim.lr_schedules import schedule_of
from trainer.planner.cluster import Cluster
from trainer.planner.plan import Plan, plan_of, reduced
from trainer.planner.simulate import Subject
from trainer.run.prepare import amended, regularised
from trainer.tasks.causal_lm import CausalLM
from trainer.tasks.task import Batch, Task

STEPS = 1000
"""Of the learning rate's schedule, where the config leaves them to the data."""


@dataclass(frozen=True)
class Source:
    """A config's model on a cluster, whole and with fewer blocks."""

    config: Config
    """Resolved."""
    subject: Subject
    """The whole."""

    @property
    def sequence(self) -> int:
        """Tokens of a sample."""
        return self.config.trainer.data.sequence_length

    @cached_property
    def of_blocks(self) -> Callable[[int], ModelSpec]:
        """The model with so many blocks in all, each built once. It has to have a `shallow`.

        What is tried out, is tried on the whole's tiny copy: few blocks of a large model are still large.
        """
        whole = self.subject.spec
        shallow = whole.shallow
        assert shallow is not None

        @cache
        def of_blocks(count: int) -> ModelSpec:
            few = amended(shallow(count), self.config.trainer, ALONE, copied=True)
            return replace(few, weights=NoWeights(), shrunk=whole.shrunk)

        return of_blocks

    def task(self, spec: ModelSpec) -> Task:
        return regularised(CausalLM.of(spec, 0), spec, self.config.trainer)

    def reduced(self, blocks: int | None, accumulation: int) -> Subject:
        """The subject with so many blocks a stage, or all, and so many micro-batches."""
        spec = self.subject.spec
        if blocks is not None and spec.shallow is not None:
            spec = _of_shapes(self.of_blocks(blocks * self.subject.layout.stages))
        undecayed = spared(self.config.trainer.weight_decay_excludes, spec)
        return replace(reduced(self.subject, spec, blocks, accumulation), task=self.task(spec), undecayed=undecayed)


def planned(config: Config, cluster: Cluster, *, asked: bool = True) -> Plan:
    """The plan of a config on a cluster. Raises ConfigError where it does not fit it, or can't be simulated.

    Without `asked`, no more ranks are simulated than memory and traffic need.
    """
    source = source_of(config, cluster)
    return plan_of(source.reduced, cluster, source.sequence, asked=asked)


def source_of(config: Config, cluster: Cluster) -> Source:
    """What a config says of its model on a cluster; nothing of the model is read but its config.json.

    Raises ConfigError where the layout does not fit the cluster or the model.
    """
    if config.trainer.task != "causal_lm":
        seen = f'saw the task "{config.trainer.task}"'
        raise ConfigError(Problem("trainer.task", seen, '"causal_lm": plans are made of language models'))
    facts = RuntimeFacts(cluster.world_size, None, None, True, "cuda", cluster.devices)
    config = resolve(config, facts)
    section, layout = config.trainer, layout_of(config, cluster.world_size)
    name, engine = select(section.engine, layout, config, "cuda")
    architecture = huggingface.read_config(section.model)
    spec = _of_shapes(amended(huggingface.spec_of(architecture, section.model, weights=False), section, ALONE))
    config = resolve(config, replace(facts, hidden_size=spec.language.hidden_size, total_steps=section.steps or STEPS))
    engine.check(spec, layout)
    scheduler = None if config.scheduler is None else vars(config.scheduler)
    full = Subject(
        layout=layout,
        engine_name=name,
        engine=engine,
        spec=spec,
        task=regularised(CausalLM.of(spec, 0), spec, section),
        deepspeed=config.deepspeed,
        undecayed=spared(section.weight_decay_excludes, spec),
        schedule=schedule_of(vars(config.optimizer), scheduler),
        batch=partial(_batch, section.data.sequence_length),
    )
    return Source(config, full)


def _batch(length: int, count: int) -> Batch:
    ids = torch.zeros(count, length, dtype=torch.int64)
    return {"input_ids": ids, "targets": torch.ones_like(ids)}


def _of_shapes(spec: ModelSpec) -> ModelSpec:
    """What has a shape alone: nothing is read, and nothing needs to be there."""
    return replace(spec, weights=NoWeights(), constructed=lambda name: None)
