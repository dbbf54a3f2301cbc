"""The reasons for which a change to a layout is proposed, as sentences."""

from __future__ import annotations

import math
from collections.abc import Iterator

from trainer.layout import Layout
from trainer.planner.cluster import DEVICES, GIB, RESERVED
from trainer.planner.describe import gib
from trainer.planner.plan import Plan
from trainer.planner.proposals import differences
from trainer.planner.roofline import recomputed

RECOMPUTES = {"none": "recompute nothing", "full": "recompute all blocks", "selective": "recompute selectively"}


def words(old: Layout, new: Layout) -> str:
    """List the changes between two layouts as part of a sentence."""
    said = {
        "pipeline": f"{new.pipeline} pipeline stages instead of {old.pipeline}",
        "tensor": f"tensor parallel over {new.tensor} instead of {old.tensor}",
        "shard": f"shard over {new.shard} instead of {old.shard}",
        "stage": f"ZeRO-{new.zero_stage} instead of ZeRO-{old.zero_stage}",
        "micro-batch": f"a micro-batch of {new.micro_batch} instead of {old.micro_batch}",
        "recompute": RECOMPUTES.get(new.recompute.mode, f"recompute every {new.recompute.every}. block"),
        "offload": f"{_on_host(new)} on the host",
    }
    changed = differences(old, new)
    return _listed([text for name, text in said.items() if name in changed]) or "another engine"


def _on_host(layout: Layout) -> str:
    if layout.offload_param != "none":
        return "weights and optimizer state"
    return "the optimizer's state" if layout.offload_optimizer != "none" else "nothing"


def _listed(texts: list[str]) -> str:
    return " and ".join([*([", ".join(texts[:-1])] if texts[1:] else []), *texts[-1:]])


MEMORY = {
    "state": ("weights", "gradients", "optimizer"),
    "activations": ("activations", "logits", "temporaries", "data"),
    "communication buffers": ("communication",),
}


def reason(old: Plan, new: Plan) -> str:
    """Return one sentence on the gains and the costs of a change."""
    gains: list[str] = []
    costs: list[str] = []
    for said, less in _effects(old, new):
        (gains if less else costs).append(said)
    changed = words(old.subject.layout, new.subject.layout)
    if old.subject.engine_name != new.subject.engine_name:
        changed += f" (engine {new.subject.engine_name})"
    text = _listed(gains) or "no gain"
    return f"{changed}: {text}" + (f", for {_listed(costs)}" if costs else "")


def _effects(old: Plan, new: Plan) -> Iterator[tuple[str, bool]]:
    """Yield (text, True if less) for each figure that changes by 1 % of the whole or more."""
    whole = max(old.needed, new.needed)
    for name, kinds in MEMORY.items():
        change = new.on_device(kinds) - old.on_device(kinds)
        if abs(change) >= whole / 100:
            yield f"{gib(abs(change))} {_less(change)} {name} per GPU", change < 0
    for name, inside in (("inside nodes", True), ("between nodes", False)):
        before, after = old.traffic(inside).size, new.traffic(inside).size
        if abs(after - before) >= 1e8 and abs(after - before) >= 0.01 * max(before, after):
            yield f"{abs(after - before) / 1e9:,.1f} GB {_less(after - before)} {name}", after < before
    again = recomputed(new.subject.layout) - recomputed(old.subject.layout)
    if again:
        yield f"{abs(again):.0%} {_less(again)} to compute", again < 0
    before, after = old.time.middle, new.time.middle
    if abs(after / before - 1) >= 0.01:
        yield f"about {abs(after / before - 1):.0%} {_less(after - before)} time per step", after < before


def _less(change: float) -> str:
    return "less" if change < 0 else "more"


def shortfall(old: Plan, best: Plan, tried: int, nodes: int | None) -> str:
    """Say by how much the best layout fails to fit, and what would make it fit."""
    missing, device = best.needed - best.room, best.cluster.device
    larger = [found for found in DEVICES.values() if found.memory - RESERVED >= best.needed]
    named = f" ({min(larger, key=lambda found: found.memory).name})" if larger else ""
    mends = [f"{nodes} nodes of {best.cluster.devices}"] if nodes else []
    mends.append(f"devices of {math.ceil((best.needed + RESERVED) / GIB)} GiB{named}")
    best_words = words(old.subject.layout, best.subject.layout) if best is not old else "as it is"
    where = f"{best.cluster.nodes} x {best.cluster.devices} {device.name}"
    return (
        f"of {tried} layouts that were tried none fits {where}; {best_words} misses by {gib(missing)} of "
        f"{gib(best.room)}, and would fit {' or '.join(mends)}"
    )
