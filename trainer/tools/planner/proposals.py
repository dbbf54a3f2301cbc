"""Changes to a config that make it fit a cluster, or faster: a short list of layouts, simulated.

A closed form of memory and time orders the list; only simulated layouts are proposed.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, takewhile
from pathlib import Path

from trainer.config import Config, load
from trainer.config.compiled import path_of
from trainer.config.read import override, read
from trainer.errors import ConfigError, Problem
from trainer.layout import Layout
from trainer.storage import disk_errors, replace_file
from trainer.tools.planner.candidates import candidates, changes_to, differences, overrides_of
from trainer.tools.planner.closed_form import ClosedForm
from trainer.tools.planner.cluster import Cluster
from trainer.tools.planner.extrapolate import Plan
from trainer.tools.planner.from_config import on_cluster, planned
from trainer.tools.planner.rendering import compared, shortfall

SIMULATED = 8
"""The most layouts that are simulated on a cluster."""
FASTER = 0.98
"""The largest share of the present step time at which an optional change is proposed."""
MARGIN = 0.9
"""The largest share of a device's room that an estimate may fill to count as fitting."""
MORE_NODES = (2, 4, 8, 16, 32, 64)
"""The multiples of the present nodes that are tried to find how many are enough."""


@dataclass(frozen=True)
class Proposal:
    """A change to a config, and its result."""

    changes: dict[str, object]
    """Config paths -> values."""
    plan: Plan
    comparison: str
    """The figures that differ from the present plan's; if none fits, what would be enough."""


def rank(proposal: Proposal) -> tuple[bool, float, int, float]:
    """Return the sort key: what fits by time (to a percent) and changes, then what misses least."""
    plan = proposal.plan
    count = len(proposal.changes)
    if not plan.fits:
        return True, plan.needed, count, plan.time.middle
    return False, round(math.log(plan.time.middle) * 100), count, plan.time.middle


def proposals(
    config: Config, cluster: Cluster, plan: Plan, most: int = 5, seconds: float = math.inf
) -> list[Proposal]:
    """Find up to `most` changes that fit, the fastest first; for a config that fits, faster ones.

    All keep the global batch and have been simulated. After `seconds` no other simulation begins.
    If none fits, the one that misses least comes first, and its comparison says what would be
    enough.
    """
    until = time.monotonic() + seconds
    ranked = sorted(_tried(config, cluster, plan, until, most=most), key=rank)
    if plan.fits:
        most_seconds = FASTER * plan.time.middle
        return [p for p in ranked if p.plan.fits and p.plan.time.middle < most_seconds][:most]
    if not any(proposal.plan.fits for proposal in ranked):
        best = min([Proposal({}, plan, ""), *ranked[:1]], key=lambda one: one.plan.needed)
        nodes = nodes_enough(config, cluster, plan, until)
        nearest = replace(best, comparison=shortfall(best.plan, len(ranked), nodes))
        ranked = [nearest, *(proposal for proposal in ranked if proposal is not best)]
    return ranked[:most]


def grid(plan: Plan, form: ClosedForm) -> list[Layout]:
    """List the other layouts on the form's cluster."""
    spec = plan.workload.spec
    old = plan.workload.layout
    blocks = max(1, len(spec.blocks))
    splits = spec.language.vocabulary > 0
    every = candidates(
        old, form.cluster, blocks, splits, spec.language.attention.heads, form.experts
    )
    return [one for one in every if one != old]


def shortlist(plan: Plan, form: ClosedForm) -> list[Layout]:
    """List the layouts to try: in turn the next with the fewest changes, and the next fastest.

    All are estimated to fit and, if the present plan fits, to be faster than it.
    """
    old = plan.workload.layout
    likely = [one for one in grid(plan, form) if form.bytes(one) <= MARGIN * plan.room]
    count = {one: len(differences(old, one)) for one in likely}
    seconds = {one: form.seconds(one) for one in likely}
    if plan.fits:
        likely = [one for one in likely if seconds[one] < FASTER * form.seconds(old)]
    simplest = sorted(likely, key=lambda one: (count[one], seconds[one]))
    fastest = sorted(likely, key=lambda one: (seconds[one] * (1 + count[one] / 100), count[one]))
    return list(dict.fromkeys(chain.from_iterable(zip(simplest, fastest, strict=True))))


def _tried(
    config: Config,
    cluster: Cluster,
    plan: Plan,
    until: float,
    most: int = 1,
    tries: int = SIMULATED,
) -> Iterator[Proposal]:
    """Simulate a cluster's short list until `most` layouts fit or `tries` are simulated.

    Layouts that earlier ones rule out are skipped; after the time `until` no other simulation
    begins but the first. If nothing is estimated to fit, the smallest are simulated.
    """
    old = plan.workload.layout
    form = replace(ClosedForm.of(plan), cluster=cluster)
    listed = shortlist(plan, form)
    if not listed and not plan.fits:
        listed = sorted(grid(plan, form), key=form.bytes)
    # the ratio of simulated to estimated bytes, by what is recomputed and offloaded
    errors: dict[tuple[str, ...], float] = {}
    fitting: list[Layout] = []
    simulated = 0
    for layout in listed:
        kind = layout.recompute.mode, layout.offload_optimizer, layout.offload_param
        size = form.bytes(layout) * errors.get(kind, 0.0)
        if size > plan.room or any(_adds_nothing(layout, one, old, form) for one in fitting):
            continue
        late = simulated > 0 and time.monotonic() > until
        if late or simulated == tries or len(fitting) == most:
            return
        try:
            changes, changed = changed_to(config, cluster, old, layout)
            new = planned(changed, cluster)
        except ConfigError:  # no engine runs it, or not with this model
            continue
        simulated += 1
        errors[kind] = new.needed / form.bytes(layout)
        if new.fits:
            fitting.append(layout)
        yield Proposal(changes, new, compared(plan, new))


def _adds_nothing(layout: Layout, fitting: Layout, old: Layout, form: ClosedForm) -> bool:
    """Return True if `layout` changes all that `fitting` does, and gains nothing by the rest."""
    known = differences(old, fitting)
    changed = differences(old, layout)
    slower = form.seconds(layout) >= FASTER * form.seconds(fitting)
    return known == changed or (known < changed and slower)


def changed_to(
    config: Config, cluster: Cluster, old: Layout, new: Layout
) -> tuple[dict[str, object], Config]:
    """Return the changes that make the layout `new`, and the config with them.

    Raises ConfigError if no engine runs that layout, or no keys make it.
    """
    changes = changes_to(config.raw, old, new)
    mesh: dict[str, object] = {"trainer.mesh.shard": new.shard}
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
        expected = "a layout that the config has keys for"
        problem = ConfigError(Problem("proposals", new.describe(), expected))
    raise problem


def nodes_enough(
    config: Config, cluster: Cluster, plan: Plan, until: float = math.inf
) -> int | None:
    """Return the fewest nodes, of MORE_NODES times the present, on which one simulated layout fits.

    None if there are none, or none by the time `until`.
    """
    every = (replace(cluster, nodes=cluster.nodes * times) for times in MORE_NODES)
    for larger in takewhile(lambda _: time.monotonic() < until, every):
        if any(p.plan.fits for p in _tried(config, larger, plan, until, tries=1)):
            return larger.nodes
    return None


def write(
    config_path: str | Path, overrides: Sequence[str], proposal: Proposal, target: str | Path
) -> None:
    """Write the config's JSON, with the overrides and a proposal's changes, to `target`.

    Raises ConfigError for another existing file, DiskError if it can't be written.
    """
    source = path_of(config_path)
    target = Path(target)
    raw, _, problems = override(read(source), [*overrides, *overrides_of(proposal.changes)])
    if problems:
        raise ConfigError(*problems)
    if target.is_symlink() or (target.exists() and not target.samefile(source)):
        expected = "a new file, or the config itself"
        raise ConfigError(Problem(str(target), "is there already", expected))
    with disk_errors(target):
        replace_file(target, (json.dumps(raw, indent=2, ensure_ascii=False) + "\n").encode())
