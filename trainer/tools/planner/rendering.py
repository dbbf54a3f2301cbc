"""A plan as lines for a terminal and as JSON, and how a proposed change compares with it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping

from trainer.engines.devices import DEVICES, GIB
from trainer.tools.planner.cluster import RESERVED, gib
from trainer.tools.planner.extrapolate import STATE, Plan, Role, offloaded

PARTS = {"inside": "inside nodes", "between": "between nodes"}
"""Names of the parts of a step's time, where they differ from the fields of `Time`."""
LEAST_SHOWN = 1e-3
"""The least share of the whole at which a kind of memory or message is shown."""


def lines(plan: Plan) -> Iterator[str]:
    """Yield the report on a plan: model, layout, memory, largest consumers, traffic and time."""
    layout = plan.workload.layout
    cluster = plan.cluster
    spec = plan.workload.spec
    sample = plan.workload.sample
    count = spec.parameters
    words = f"{count / 1e9:,.2f} B" if count >= 1e9 else f"{count / 1e6:,.1f} M"
    yield f"model   {spec.name}: {words} parameters, on {sample.kind}"
    yield f"layout  {layout.describe()} (engine {plan.workload.engine_name}) on {cluster}"
    compiled = "; with uncompiled blocks" if layout.compile == "blocks" else ""
    yield f"memory  {verdict(plan)}{compiled}"
    for role in plan.roles:
        yield f"  {role.name + ':':<16}{gib(role.peak.size)}, fullest in {role.peak.phase}"
    yield f"the fullest, {plan.fullest.name} (rank {plan.fullest.rank}), by kind:"
    yield from _kinds(plan)
    yield f"host    {_host(plan)}"
    yield "largest consumers:"
    for name, size in plan.fullest.peak.largest:
        yield f"  {gib(size):>12}  {name}"
    yield "traffic of a step, sent by the rank that sends most:"
    yield from _traffic(plan)
    yield f"time    {_time(plan)}"


def verdict(plan: Plan) -> str:
    """Return a sentence that says if the plan fits its devices, and by how much."""
    spare = plan.room - plan.needed
    device = plan.cluster.device
    what = f"{gib(plan.needed)} of tensors on the fullest device, of {gib(plan.room)}"
    rest = f"({gib(device.memory)} less {gib(RESERVED)} for the CUDA context and NCCL)"
    if plan.fits:
        return f"fits: {what} {rest}; {gib(spare)} to spare"
    return f"DOES NOT FIT: {what} {rest}; {gib(-spare)} too much"


def _kinds(plan: Plan) -> Iterator[str]:
    peak = plan.fullest.peak
    host = offloaded(plan.workload)
    for kind, size in sorted(peak.by_kind.items(), key=lambda item: -item[1]):
        if size >= peak.size * LEAST_SHOWN:
            yield f"  {gib(size):>12}  {kind}{' (on the host)' if kind in host else ''}"
    if peak.rounding >= peak.size * LEAST_SHOWN:
        yield f"  {gib(peak.rounding):>12}  rounding by the allocator"


def _host(plan: Plan) -> str:
    copied = f"{gib(plan.background_copy)} for a save in the background"
    on_host = f", {gib(plan.on_host)} offloaded" if plan.on_host else ""
    return f"{gib(plan.loaded)} per process while the model is loaded, {copied}{on_host}"


def _traffic(plan: Plan) -> Iterator[str]:
    role = max(plan.roles, key=lambda role: sum(sent.size for sent in role.sent))
    total = sum(sent.size for sent in role.sent)
    if not total:
        yield "  nothing"
    for sent in sorted(role.sent, key=lambda sent: -sent.size):
        if sent.size >= total * LEAST_SHOWN:
            size = _gigabytes(sent.size)
            along = " x ".join(sent.axes)
            where = "inside a node" if sent.inside else "between nodes"
            messages = f"{sent.count:,.0f} x {sent.name} along {along}, {sent.ranks} ranks, {where}"
            yield f"  {size:>12}  {messages}"


def _gigabytes(size: float) -> str:
    return f"{size / 1e9:,.2f} GB" if size >= 1e8 else f"{size / 1e6:,.2f} MB"


def _time(plan: Plan) -> str:
    time = plan.time
    sample = plan.workload.sample
    rate = plan.workload.layout.train_batch * sample.units / time.least
    named = ((PARTS.get(name, name), part) for name, part in vars(time).items() if part)
    parts = [f"{name} {in_seconds(part)}" for name, part in named]
    return (
        f"an optimistic estimate from data sheets: {in_seconds(time.least)} a step if all "
        f"messages are hidden, {in_seconds(time.most)} if none is ({', '.join(parts)}); "
        f"at most {rate:,.0f} {sample.unit}/s"
    )


def as_json(plan: Plan) -> dict[str, object]:
    """Return the plan as JSON values, in bytes and seconds."""
    peak = plan.fullest.peak
    return {
        "layout": plan.workload.layout.describe(),
        "engine": plan.workload.engine_name,
        "fits": plan.fits,
        "needed": round(plan.needed),
        "room": round(plan.room),
        "memory": {"peak_bytes": peak.size, "by_kind": peak.by_kind},
        "host": {"loaded": plan.loaded, "copied": plan.background_copy, "offloaded": plan.on_host},
        "roles": [_role(role) for role in plan.roles],
        "time": {**vars(plan.time), "least": plan.time.least, "most": plan.time.most},
    }


def _role(role: Role) -> dict[str, object]:
    return {
        "name": role.name,
        "rank": role.rank,
        "phases": {
            peak.phase: {"peak_bytes": peak.size, "by_kind": peak.by_kind} for peak in role.peaks
        },
        "largest": dict(role.peak.largest),
        "sent": [
            {"what": sent.name, "bytes": sent.size}
            | {key: getattr(sent, key) for key in ("axes", "ranks", "inside", "count")}
            for sent in role.sent
        ],
    }


def in_seconds(time: float) -> str:
    return f"{time:.3g} s" if time >= 1 else f"{time * 1e3:.3g} ms"


# Proposed changes, and what they change


def proposal_lines(
    number: int, plan: Plan, changes: Mapping[str, object], comparison: str
) -> Iterator[str]:
    """Yield one proposal: if it fits, what differs from the present plan, and the config keys."""
    fits = "fits" if plan.fits else "does not fit"
    step = f"{in_seconds(plan.time.least)} a step at least"
    yield f"propose {number}. {fits}, {gib(plan.needed)}, {step}: {comparison}"
    yield from (f"          + {path}: {json.dumps(value)}" for path, value in changes.items())


MEMORY = {
    "state": STATE,
    "activations": ("activations", "logits", "temporaries", "data"),
    "communication buffers": ("communication",),
}


def compared(old: Plan, new: Plan) -> str:
    """List the figures of two plans that differ, as `name old -> new`."""
    before = _figures(old)
    after = _figures(new)
    changed = [name for name in after if before[name] != after[name]]
    return ", ".join(f"{name} {before[name]} -> {after[name]}" for name in changed)


def _figures(plan: Plan) -> dict[str, str]:
    """Return the figures by which two plans are compared, of the fullest device and of a step."""
    memory = {name: gib(plan.on_device(kinds)) for name, kinds in MEMORY.items()}
    return {
        "engine": plan.workload.engine_name,
        **memory,
        "sent inside nodes": _gigabytes(plan.traffic(inside=True).size),
        "between nodes": _gigabytes(plan.traffic(inside=False).size),
        "a step": in_seconds(plan.time.middle),
    }


def shortfall(best: Plan, tried: int, nodes: int | None) -> str:
    """Say by how much the best layout fails to fit, and what would make it fit."""
    missing = best.needed - best.room
    larger = [device for device in DEVICES.values() if device.memory - RESERVED >= best.needed]
    named = f" ({min(larger, key=lambda device: device.memory).name})" if larger else ""
    remedies = [f"{nodes} nodes of {best.cluster.devices}"] if nodes else []
    remedies.append(f"devices of {math.ceil((best.needed + RESERVED) / GIB)} GiB{named}")
    split = best.on_device(MEMORY["activations"])
    short = f"; sequence_parallel_size can't help: it divides only {gib(split)} of activations"
    misses = f"misses by {gib(missing)} of {gib(best.room)}, and would fit {' or '.join(remedies)}"
    tries = f"none of the {tried} layouts that were tried fits {best.cluster}"
    return f"{tries}; the nearest {misses}" + (short if split < missing else "")
