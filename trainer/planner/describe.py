"""A plan as lines for a terminal, and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trainer.planner.cluster import GIB, RESERVED
from trainer.planner.plan import Plan, Role, Sent, offloaded

LEAST_SHOWN = 1e-3
"""The share of the whole below which kinds of memory and messages are not shown."""


def lines(plan: Plan) -> Iterator[str]:
    """Yield the report on a plan: model, layout, memory, largest consumers, traffic and time."""
    layout, cluster = plan.subject.layout, plan.cluster
    where = f"{cluster.nodes} x {cluster.devices} {cluster.device.name}"
    spec = plan.subject.spec
    yield f"model   {spec.name}: {in_words(spec.parameters)} parameters, on {plan.subject.sample.kind}"
    yield f"layout  {layout.describe()} (engine {plan.subject.engine_name}) on {where}"
    yield f"memory  {verdict(plan)}"
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
    return f"{'fits' if spare >= 0 else 'DOES NOT FIT'}: {what} {rest}; {gib(abs(spare))} " + (
        "to spare" if spare >= 0 else "too much"
    )


def _kinds(plan: Plan) -> Iterator[str]:
    peak, host = plan.fullest.peak, offloaded(plan.subject)
    for kind, size in sorted(peak.by_kind.items(), key=lambda item: -item[1]):
        if size >= peak.size * LEAST_SHOWN:
            yield f"  {gib(size):>12}  {kind}{' (on the host)' if kind in host else ''}"
    if peak.rounding >= peak.size * LEAST_SHOWN:
        yield f"  {gib(peak.rounding):>12}  what the allocator rounds up"


def _host(plan: Plan) -> str:
    """Return the line on the memory that each process takes on its node's host."""
    told = f"{gib(plan.loaded)} a process while the model is loaded, {gib(plan.copied)} for a save in the background"
    return told + (f", {gib(plan.on_host)} offloaded" if plan.on_host else "")


def _traffic(plan: Plan) -> Iterator[str]:
    role = max(plan.roles, key=lambda role: sum(sent.size for sent in role.sent))
    total = sum(sent.size for sent in role.sent)
    if not total:
        yield "  nothing"
    for sent in sorted(role.sent, key=lambda sent: -sent.size):
        if sent.size >= total * LEAST_SHOWN:
            yield f"  {decimal(sent.size):>12}  {said(sent)}"


def said(sent: Sent) -> str:
    """Describe messages in a line: 33 x all-reduce along replicate, 8 ranks, between nodes."""
    along = " x ".join(sent.axes)
    return f"{sent.count:,.0f} x {sent.name} along {along}, {sent.ranks} ranks, " + (
        "inside a node" if sent.inside else "between nodes"
    )


def _time(plan: Plan) -> str:
    time, sample = plan.time, plan.subject.sample
    rate = plan.subject.layout.train_batch * sample.units / time.least
    parts = {
        "compute": time.compute,
        "bubble": time.bubble,
        "inside nodes": time.inside,
        "between nodes": time.between,
        "update": time.update,
        "host": time.host,
    }
    told = ", ".join(f"{name} {in_seconds(part)}" for name, part in parts.items() if part > 0)
    return (
        f"an estimate from data sheets, and no faster: {in_seconds(time.least)} a step if all messages are hidden, "
        f"{in_seconds(time.most)} if none is ({told}); at most {rate:,.0f} {sample.unit}s/s"
    )


def as_json(plan: Plan) -> dict[str, Any]:
    """Return the plan as JSON values, in bytes and seconds."""
    peak = plan.fullest.peak
    return {
        "layout": plan.subject.layout.describe(),
        "engine": plan.subject.engine_name,
        "fits": plan.fits,
        "needed": round(plan.needed),
        "room": round(plan.room),
        "memory": {"peak_bytes": peak.size, "by_kind": peak.by_kind},
        "host": {"loaded": plan.loaded, "copied": plan.copied, "offloaded": plan.on_host},
        "roles": [_role(role) for role in plan.roles],
        "time": {**vars(plan.time), "least": plan.time.least, "most": plan.time.most},
    }


def _role(role: Role) -> dict[str, Any]:
    return {
        "name": role.name,
        "rank": role.rank,
        "phases": {peak.phase: {"peak_bytes": peak.size, "by_kind": peak.by_kind} for peak in role.peaks},
        "largest": dict(role.peak.largest),
        "sent": [
            {"what": s.name, "axes": s.axes, "ranks": s.ranks, "inside": s.inside, "count": s.count, "bytes": s.size}
            for s in role.sent
        ],
    }


def gib(size: float) -> str:
    return f"{size / GIB:,.2f} GiB" if size >= GIB / 100 else f"{size / 2**20:,.2f} MiB"


def decimal(size: float) -> str:
    return f"{size / 1e9:,.2f} GB" if size >= 1e8 else f"{size / 1e6:,.2f} MB"


def in_seconds(time: float) -> str:
    return f"{time:.3g} s" if time >= 1 else f"{time * 1e3:.3g} ms"


def in_words(count: float) -> str:
    return f"{count / 1e9:,.2f} B" if count >= 1e9 else f"{count / 1e6:,.1f} M"
