"""The modes of activation checkpointing in the order of their cost, and the first that fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainer.config import RECOMPUTE, Config, recompute_note, recomputing
from trainer.config.keys.key import AUTO
from trainer.errors import ConfigError
from trainer.storage import Json
from trainer.tools.planner.cluster import Cluster, gib
from trainer.tools.planner.extrapolate import Plan
from trainer.tools.planner.from_config import planned

MODES = ("none", "selective", "selective:2", "full", "offload")
"""By the arithmetic that they add to a step (`cluster.recomputed`); `offload` copies, besides."""


@dataclass(frozen=True)
class PlannedMode:
    """A mode, and the plan with it."""

    mode: str
    plan: Plan

    def __str__(self) -> str:
        return f"{self.mode} {gib(self.plan.needed)}"


def cheapest(config: Config, cluster: Cluster) -> tuple[PlannedMode, ...]:
    """Plan a config with one mode after the other, up to the first that fits; it is the last.

    Modes that can't run are left out. If none fits, the last is the one that takes least. Raises
    ConfigError where the cluster or fake tensors can't run the config without recomputation.
    """
    tried = list[PlannedMode]()
    for mode in MODES:
        try:
            plan = planned(recomputing(config, mode, ""), cluster)
        except ConfigError:
            if not tried:  # it is no mode's fault
                raise
            continue
        tried.append(PlannedMode(mode, plan))
        if plan.fits:
            return tuple(tried)
    return tuple(sorted(tried, key=lambda one: -one.plan.needed))


def planned_by_need(config: Config, cluster: Cluster) -> tuple[Plan, tuple[PlannedMode, ...]]:
    """Plan a config; return the modes that were planned for that, the chosen one last.

    There are none if the config itself says which. Raises ConfigError as `planned`.
    """
    if config.trainer.activation_checkpointing != AUTO:
        return planned(config, cluster), ()
    tried = cheapest(config, cluster)
    return tried[-1].plan, tried


def override_of(tried: Sequence[PlannedMode]) -> str:
    """Return the override by which a config names the chosen mode."""
    return f"{RECOMPUTE}={tried[-1].mode}"


def reason(tried: Sequence[PlannedMode]) -> str:
    """Say which mode was chosen, what it takes, and what the cheaper ones would take."""
    chosen = tried[-1]
    size = f"{gib(chosen.plan.needed)} of {gib(chosen.plan.room)}"
    others = ", ".join(str(one) for one in tried[:-1])
    if not chosen.plan.fits:
        more = f" ({others})" if others else ""
        return f"{chosen.mode}, which needs {size}: no mode fits{more}"
    return f"{chosen.mode}, {size}" + (f"; too much: {others}" if others else "")


def note(tried: Sequence[PlannedMode]) -> str:
    """Return the note that a run with this choice prints."""
    return recompute_note(reason(tried))


def as_json(tried: Sequence[PlannedMode]) -> Json:
    """Return the choice as JSON values."""
    modes = {one.mode: round(one.plan.needed) for one in tried}
    return {"recompute": {"mode": tried[-1].mode, "reason": reason(tried), "needed": modes}}
