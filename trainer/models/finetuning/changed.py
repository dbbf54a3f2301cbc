"""A spec with the config's changes: adapter, frozen parameters and parameter groups."""

from __future__ import annotations

from dataclasses import replace

from trainer.config import TrainerSection
from trainer.distributed.ranks import Ranks
from trainer.models.finetuning.frozen import frozen
from trainer.models.finetuning.lora import adapted
from trainer.models.finetuning.tuned import tuned
from trainer.models.spec import ModelSpec


def changed_spec(
    spec: ModelSpec, section: TrainerSection, ranks: Ranks, *, copied: bool = False
) -> ModelSpec:
    """Apply the config's changes to a model's spec, unless it has them already. Collective.

    `copied`: the spec is that of a smaller copy of the config's model. Raises ConfigError for
    changes that do not fit the model.
    """

    if spec.training.changed:
        return spec

    def changed() -> ModelSpec:
        partly_frozen = frozen(adapted(spec, section.adapter), section.freeze, copied=copied)
        return tuned(partly_frozen, section.parameter_groups, copied=copied)

    ranks.try_on_first(changed)  # so that an error is reported once
    return with_changes(changed())


def with_changes(spec: ModelSpec) -> ModelSpec:
    """Mark a spec as one that has the config's changes."""
    return replace(spec, training=replace(spec.training, changed=True))
