"""Changes to a config that make it fit a cluster, or faster: tried, and written."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trainer.config import Config, load
from trainer.config.compiled import path_of
from trainer.config.read import override, read
from trainer.errors import ConfigError, Problem
from trainer.layout import Layout
from trainer.storage import disk_errors, replace_file
from trainer.tools.planner.candidates import (
    Estimates,
    ModelSizes,
    candidates,
    changes_to,
    differences,
    promising,
    rank,
)
from trainer.tools.planner.cluster import Cluster
from trainer.tools.planner.estimate import Plan
from trainer.tools.planner.from_config import on_cluster, planned
from trainer.tools.planner.rendering import reason, shortfall

SIMULATED = 8
"""The most candidates that are simulated."""
REFUSED = 24
"""The most candidates that no engine runs, before the search ends."""
SECONDS = 60.0
"""Seconds after which no other simulation begins."""
FASTER = 0.98
"""The largest share of the present step time at which an optional change is proposed."""
MARGIN = 0.97
"""The largest share of a device's room that an estimate may fill to count as fitting."""
MOST_NODES = 64
"""The largest multiple of the present nodes that is tried to find how many would do."""


@dataclass(frozen=True)
class Proposal:
    """A change to a config, and its result."""

    changes: dict[str, Any]
    """Config paths -> values."""
    plan: Plan
    reason: str
    """One sentence."""

    @property
    def seconds(self) -> float:
        """The estimated time of a step, by which proposals are sorted."""
        return self.plan.time.middle


def overrides_of(changes: Mapping[str, Any]) -> list[str]:
    """Return changes as `key.path=value` arguments."""
    return [f"{path}={json.dumps(value)}" for path, value in changes.items()]


def proposals(
    config: Config, cluster: Cluster, plan: Plan, most: int = 5, seconds: float = SECONDS
) -> list[Proposal]:
    """Find changes that fit, the fastest first; for a config that fits, faster ones; at the same
    global batch.

    If none fits, the one that misses least comes first, and its reason says what would do. Each has
    been simulated; after `seconds` no other simulation begins.
    """
    until = time.monotonic() + seconds
    found = list(_tried(config, cluster, plan, most, until))
    fitting = [proposal for proposal in found if proposal.plan.fits]
    if plan.fits:
        fitting = [proposal for proposal in fitting if proposal.seconds < FASTER * plan.time.middle]
        return sorted(fitting, key=lambda p: rank(p.plan, p.changes))[:most]
    found.sort(key=lambda p: rank(p.plan, p.changes))
    if not fitting:
        best = min([Proposal({}, plan, ""), *found[:1]], key=lambda p: p.plan.needed)
        nodes = nodes_enough(config, cluster, plan, found, until)
        nearest = replace(best, reason=shortfall(plan, best.plan, len(found), nodes))
        found = [nearest, *(proposal for proposal in found if proposal is not best)]
    return found[:most]


def _tried(
    config: Config, cluster: Cluster, plan: Plan, most: int, until: float
) -> Iterator[Proposal]:
    """Yield candidates as they are simulated: each time, the one that looks best by all that is
    known then.
    """
    old, sizes = plan.workload.layout, ModelSizes.of(plan)
    estimates = Estimates(sizes, cluster)
    estimates.learn(old, plan.needed)
    pool, larger = promising(
        candidates(old, cluster, sizes.blocks, sizes.splits), old, plan.room, estimates
    )
    simulated, refused, fitting = 0, 0, 0
    while (pool or larger) and simulated < SIMULATED and refused < REFUSED and fitting < most:
        if not fitting and not any(
            estimates.bytes(layout) <= MARGIN * plan.room for layout in pool
        ):
            pool, larger = [*pool, *larger], []
        if simulated and time.monotonic() > until:
            return
        simple = (
            simulated % 2 == 0
        )  # alternately: the smallest change that is likely to fit, and the fastest
        layout = min(pool, key=lambda layout: _hope(layout, old, plan, estimates, simple))
        if plan.fits and estimates.seconds(layout) >= FASTER * estimates.seconds(old):
            return
        pool.remove(layout)
        try:
            changes, changed = changed_to(config, cluster, old, layout)
            new = planned(changed, cluster)
        except ConfigError:  # no engine runs it, or not with this model
            refused += 1
            continue
        simulated += 1
        estimates.learn(layout, new.needed)
        if new.fits:
            fitting += 1
            pool = [other for other in pool if _is_other(other, layout, old, estimates)]
        yield Proposal(changes, new, reason(plan, new))


def _hope(
    layout: Layout, old: Layout, plan: Plan, estimates: Estimates, simple: bool
) -> tuple[bool, float, float]:
    size, changed, time = (
        estimates.bytes(layout),
        len(differences(old, layout)),
        estimates.seconds(layout),
    )
    if size > MARGIN * plan.room:
        return True, size, changed
    return (False, changed, time) if simple else (False, time * (1 + changed / 100), changed)


def _is_other(layout: Layout, fitting: Layout, old: Layout, estimates: Estimates) -> bool:
    """Return True if it changes other things than one that fits; more changes count only if it is
    faster.
    """
    known, changed = differences(old, fitting), differences(old, layout)
    faster = estimates.seconds(layout) < FASTER * estimates.seconds(fitting)
    return not known <= changed or (faster and known != changed)


def changed_to(
    config: Config, cluster: Cluster, old: Layout, new: Layout
) -> tuple[dict[str, Any], Config]:
    """Return the changes that make a config's layout `new`, and the changed config. Raises
    ConfigError if none do.
    """
    changes = changes_to(config.raw, old, new)
    mesh: dict[str, Any] = {"trainer.mesh.shard": new.shard}
    if config.trainer.mesh.replicate is not None:
        mesh["trainer.mesh.replicate"] = new.replicate
    auto = {"trainer.engine": "auto"}
    for more in ({}, mesh, auto, mesh | auto):
        try:
            changed = replace(load(config.raw, overrides_of(changes | more)), path=config.path)
            composed = on_cluster(changed, cluster)
            composed.engine()  # an error where none can run it
            if composed.layout == new:
                return changes | more, changed
        except ConfigError as error:
            problem = error
            continue
        problem = ConfigError(
            Problem("proposals", new.describe(), "a layout that the config has keys for")
        )
    raise problem


def nodes_enough(
    config: Config, cluster: Cluster, plan: Plan, found: Sequence[Proposal], until: float = math.inf
) -> int | None:
    """Find the least power of two times the nodes on which something fits, by simulation, or None.

    Nothing begins after `until`, a time of `time.monotonic`.
    """
    old, sizes = plan.workload.layout, ModelSizes.of(plan)
    estimates = Estimates(sizes, cluster)
    for layout, needed in (
        (old, plan.needed),
        *((p.plan.workload.layout, p.plan.needed) for p in found),
    ):
        estimates.learn(layout, needed)
    times = 2
    while times <= MOST_NODES and time.monotonic() < until:
        larger = replace(cluster, nodes=cluster.nodes * times)
        times *= 2
        layouts = [
            one
            for one in candidates(old, larger, sizes.blocks, sizes.splits)
            if estimates.bytes(one) <= MARGIN * plan.room
        ]
        for layout in sorted(
            layouts, key=lambda one: (len(differences(old, one)), estimates.bytes(one))
        )[:REFUSED]:
            try:
                _, changed = changed_to(config, larger, old, layout)
                if planned(changed, larger).fits:
                    return larger.nodes
            except ConfigError:
                continue
            break
    return None


def write(
    config_path: str | Path, overrides: Sequence[str], proposal: Proposal, target: str | Path
) -> None:
    """Write the config's JSON, with the overrides and a proposal's changes, to `target`; other keys
    are unchanged.

    Raises ConfigError if another file than the config itself exists there, DiskError if it can't be
    written.
    """
    source, target = path_of(config_path), Path(target)
    raw, _, problems = override(read(source), [*overrides, *overrides_of(proposal.changes)])
    if problems:
        raise ConfigError(*problems)
    if target.is_symlink() or (target.exists() and not target.samefile(source)):
        raise ConfigError(
            Problem(str(target), "is there already", "a new file, or the config itself")
        )
    with disk_errors(target):
        replace_file(target, (json.dumps(raw, indent=2, ensure_ascii=False) + "\n").encode())
