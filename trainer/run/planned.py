"""A config as what the planner simulates: without data, without weights, on a cluster that need not be there."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

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
from trainer.tasks.task import Batch

STEPS = 1000
"""Of the learning rate's schedule, where the config leaves them to the data."""


def planned(config: Config, cluster: Cluster, *, asked: bool = True) -> Plan:
    """The plan of a config on a cluster. Raises ConfigError where it does not fit it, or can't be simulated.

    Without `asked`, no more ranks are simulated than memory and traffic need.
    """
    if config.trainer.task != "causal_lm":
        seen = f'saw the task "{config.trainer.task}"'
        raise ConfigError(Problem("trainer.task", seen, '"causal_lm": plans are made of language models'))
    facts = RuntimeFacts(cluster.world_size, None, None, True, "cuda", cluster.devices)
    config = resolve(config, facts)
    section, layout = config.trainer, layout_of(config, cluster.world_size)
    name, engine = select(section.engine, layout, config, "cuda")
    architecture = huggingface.read_config(section.model)
    spec = without_values(amended(huggingface.spec_of(architecture, section.model), section, ALONE))
    config = resolve(config, replace(facts, hidden_size=spec.language.hidden_size, total_steps=section.steps or STEPS))
    engine.check(spec, layout)
    scheduler = None if config.scheduler is None else vars(config.scheduler)
    length = section.data.sequence_length

    def batch(count: int) -> Batch:
        ids = torch.zeros(count, length, dtype=torch.int64)
        return {"input_ids": ids, "targets": torch.ones_like(ids)}

    @cache
    def spec_of(blocks: int | None) -> ModelSpec:
        if blocks is None or spec.shallow is None:
            return spec
        return without_values(amended(spec.shallow(blocks * layout.stages), section, ALONE, copied=True))

    full = Subject(
        layout=layout,
        engine_name=name,
        engine=engine,
        spec=spec,
        task=regularised(CausalLM.of(spec, 0), spec, section),
        deepspeed=config.deepspeed,
        undecayed=spared(section.weight_decay_excludes, spec),
        schedule=schedule_of(vars(config.optimizer), scheduler),
        batch=batch,
    )

    def make(blocks: int | None, accumulation: int) -> Subject:
        few = spec_of(blocks)
        subject = reduced(full, few, blocks, accumulation)
        task = regularised(CausalLM.of(few, 0), few, section)
        return replace(subject, task=task, undecayed=spared(section.weight_decay_excludes, few))

    return plan_of(make, cluster, length, asked=asked)


def without_values(spec: ModelSpec) -> ModelSpec:
    """What has a shape alone: nothing is read, and nothing needs to be there."""
    return replace(spec, weights=NoWeights(), constructed=lambda name: None)
