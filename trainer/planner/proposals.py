"""What to change of a layout so that it fits, or is faster: which changes to try, in which order, and why.

A closed form says what can't fit and what is likely to; what is proposed has been simulated.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from trainer.config.read import Json
from trainer.errors import ConfigError
from trainer.layout import Layout, Recompute
from trainer.models.spec import flops_per_token
from trainer.planner.cluster import DEVICES, GIB, RESERVED, Cluster
from trainer.planner.plan import Plan, offloaded

HOST = 25e9
"""Bytes/s that each device's state on the host is moved and updated with: PCIe 4 x16, or a host's memory over 8."""
BLOCK_BYTES = 34
"""Of activations per hidden value and token of a block, without the attention matrix (arXiv 2205.05198, eq. 1)."""
MOST_CHANGES = 3
PIPELINES = (1, 2, 4, 8, 16)
OFFLOADS = (("none", "none"), ("cpu", "none"), ("cpu", "cpu"))
ADAM = ("adam", "adamw", "fusedadam")

BATCH, MICRO, ACCUMULATION = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


@dataclass(frozen=True)
class Sizes:
    """What the closed forms are made of, whatever the layout."""

    parameters: int
    learned: int
    blocks: int
    hidden: int
    sequence: int
    """Tokens of a sample."""
    moments: int
    """Bytes of optimizer state per learned parameter that are certain."""
    flops: float
    """Of a step: forward and backward of all tokens."""

    @classmethod
    def of(cls, plan: Plan) -> Sizes:
        spec, layout = plan.subject.spec, plan.subject.layout
        optimizer = plan.subject.deepspeed.get("optimizer", {})
        sure = str(optimizer.get("type", "")).lower() in ADAM and "bf16" not in str(optimizer.get("params", {}))
        learned = spec.parameters - sum(spec.frozen.values())
        tokens = layout.train_batch * plan.sequence
        return cls(
            spec.parameters,
            learned,
            max(1, len(spec.blocks)),
            spec.language.hidden_size or 0,
            plan.sequence,
            8 if sure else 0,
            flops_per_token(spec, plan.sequence) * tokens,
        )


def candidates(layout: Layout, cluster: Cluster, blocks: int) -> Iterator[Layout]:
    """Layouts of the same global batch on a cluster, `layout` among them where it is one of it.

    Tensor parallel groups stay inside a node. Whether an engine runs them is not asked.
    """
    world, stay = cluster.world_size, {layout.tensor}
    tensors = sorted({t for t in (1, 2, 4, 8) if cluster.devices % t == 0} | stay)
    pipelines = sorted({p for p in PIPELINES if p <= blocks} | {layout.pipeline})
    recomputes = dict.fromkeys((layout.recompute, Recompute(), Recompute("selective"), Recompute("full")))
    offloads = dict.fromkeys(((layout.offload_optimizer, layout.offload_param), *OFFLOADS))
    for tensor, pipeline in product(tensors, pipelines):
        if world % (tensor * pipeline):
            continue
        ranks = world // (tensor * pipeline)
        for stage, micro, (optimizer, param), recompute in product(
            range(4), _micro_batches(layout, ranks), offloads, recomputes
        ):
            if (optimizer != "none" and stage == 0) or (param != "none" and stage < 3):
                continue
            for shard in sorted(_shards(layout, ranks, stage, cluster.devices // tensor)):
                try:
                    yield replace(
                        layout,
                        **{"world_size": world, "pipeline": pipeline, "tensor": tensor, "zero_stage": stage},
                        **{"shard": shard, "replicate": ranks // shard, "micro_batch": micro},
                        accumulation=layout.train_batch // (micro * ranks),
                        offload_optimizer=optimizer,
                        offload_param=param,
                        recompute=recompute,
                    )
                except ConfigError:  # its schedule has too few micro-batches
                    continue


def _micro_batches(layout: Layout, ranks: int) -> list[int]:
    each, rest = divmod(layout.train_batch, ranks)
    sizes = {layout.micro_batch, *(2**k for k in range(7))}
    return [] if rest else sorted(size for size in sizes if each % size == 0)


def _shards(layout: Layout, ranks: int, stage: int, inside: int) -> set[int]:
    if stage == 0:
        return {1}
    return {
        size for size in (ranks, inside, layout.shard) if size > 0 and ranks % size == 0 and (size > 1 or ranks == 1)
    }


def least_bytes(layout: Layout, sizes: Sizes) -> float:
    """Bytes that the fullest device takes at the least: what is above the device's room can't fit.

    State by ZeRO stage (arXiv 1910.02054, section 3), and of activations each block's input alone, or with nothing
    recomputed those of its linear layers.
    """
    each, state = _per_rank(layout), 0.0
    value = 4 if layout.precision == "float32" else 2
    weights, learned = value * sizes.parameters / each, sizes.learned / each
    optimizer = sizes.moments * learned / (layout.shard if layout.zero_stage else 1)
    if not layout.offloads:
        gradients = value * learned / (layout.shard if layout.zero_stage else 1)
        kept = weights / (layout.shard if layout.zero_stage == 3 else 1)
        state = kept + optimizer
        if layout.zero_stage == 0:
            return state + max(gradients, _least_activations(layout, sizes, value))
    return state + _least_activations(layout, sizes, value)


def _least_activations(layout: Layout, sizes: Sizes, value: int) -> float:
    every = layout.recompute.every if layout.recompute.mode == "every" else 1
    inputs = 2 if layout.recompute.mode == "none" and sizes.learned == sizes.parameters else 1 / every
    held = sizes.blocks // layout.stages // max(1, every) * every
    return value * inputs * held * layout.micro_batch * sizes.sequence * sizes.hidden


def _per_rank(layout: Layout) -> int:
    return layout.pipeline * layout.tensor


@dataclass
class Estimates:
    """About what a layout takes, in closed form, drawn nearer to each that has been simulated."""

    sizes: Sizes
    cluster: Cluster
    factors: dict[str, float] = field(default_factory=dict)
    """By mode of recomputation: activations as they are, over those of the closed form."""

    def bytes(self, layout: Layout) -> float:
        """On the fullest device."""
        known = [*self.factors.values(), 1.5]
        return self._state(layout) + self._activations(layout) * self.factors.get(layout.recompute.mode, known[0])

    def learn(self, layout: Layout, needed: float) -> None:
        factor = (needed - self._state(layout)) / max(1.0, self._activations(layout))
        self.factors[layout.recompute.mode] = max(0.1, factor)

    def _state(self, layout: Layout) -> float:
        share = layout.shard if layout.zero_stage else 1
        weights, gradients, optimizer = (4, 4, 8) if layout.precision == "float32" else (2, 2, 12)
        learned = self.sizes.learned / self.sizes.parameters
        if layout.offload_param != "none":
            return 0.0
        if layout.offload_optimizer != "none":
            optimizer = 0
        parts = (weights, 3), (gradients * learned, 2), (optimizer * learned, 1)
        each = sum(size / (share if layout.zero_stage >= stage else 1) for size, stage in parts)
        return self.sizes.parameters / _per_rank(layout) * each

    def _activations(self, layout: Layout) -> float:
        sizes, mode = self.sizes, layout.recompute.mode
        token = sizes.hidden * sizes.sequence * layout.micro_batch * (2 if layout.precision == "float32" else 1)
        whole = token * (10 + (BLOCK_BYTES - 10) / layout.tensor)
        held = sizes.blocks / layout.pipeline * min(layout.pipeline, layout.accumulation)
        if mode == "none":
            return whole * held
        if mode == "selective":
            return whole * held * 0.7
        return whole + held * (2 * token + (1 - 1 / layout.recompute.every) * whole)

    def seconds(self, layout: Layout) -> float:
        """Of a step: midway between all messages hidden and none."""
        sizes, device = self.sizes, self.cluster.device
        flops = sizes.flops * (1 + recomputed(layout))
        compute = flops / layout.world_size / (device.peak if layout.precision != "float32" else device.peak / 2)
        rounds = layout.accumulation * layout.stages_per_rank
        bubble = compute * (layout.pipeline - 1) / rounds if layout.pipeline > 1 else 0.0
        wires = {True: 0.0, False: 0.0}
        for within, size in self._sent(layout):
            wires[within] += size
        inside, between = wires[True] / device.link, wires[False] / device.network
        middle = (max(compute, inside, between) + compute + inside + between) / 2
        return middle + bubble + self._on_host(layout) * 2 / HOST

    def _sent(self, layout: Layout) -> Iterator[tuple[bool, float]]:
        """(whether inside a node, bytes) of one rank: rings over each axis."""
        sizes, devices = self.sizes, self.cluster.devices
        value = 4 if layout.precision == "float32" else 2
        weights = value * sizes.parameters / _per_rank(layout)
        gathers = 2 * layout.accumulation if layout.zero_stage == 3 else 1
        reduces = layout.accumulation if layout.zero_stage >= 2 else 1
        shard, replicate, tensor = layout.shard, layout.replicate, layout.tensor
        yield shard * tensor <= devices, weights * (gathers + reduces) * (shard - 1) / shard
        yield shard * tensor * replicate <= devices, 2 * weights / shard * (replicate - 1) / replicate
        hidden = value * sizes.hidden * sizes.sequence * layout.micro_batch * layout.accumulation
        yield tensor <= devices, 4 * hidden * sizes.blocks / layout.pipeline * 2 * (tensor - 1) / tensor
        yield layout.world_size <= devices, 2 * hidden * (layout.pipeline > 1)

    def _on_host(self, layout: Layout) -> float:
        each = 16 if layout.offload_param != "none" else 12 if layout.offload_optimizer != "none" else 0
        return each * self.sizes.learned / _per_rank(layout) / layout.shard


def recomputed(layout: Layout) -> float:
    """The share of a step's products that is computed again."""
    return 1 / (3 * layout.recompute.every) if layout.recompute.mode in ("full", "every") else 0.0


def seconds(plan: Plan) -> float:
    """About a step's time: midway between all messages hidden and none, and what is on the host moved."""
    return (plan.time.least + plan.time.most) / 2 + plan.on_host * 2 / HOST


def rank(plan: Plan, changes: Mapping[str, Any]) -> tuple[bool, float, int, float]:
    """By which proposals are sorted: those that fit, the fastest (to a percent), the fewest changes.

    Of those that do not fit, the one that misses least comes first.
    """
    if not plan.fits:
        return True, plan.needed, len(changes), seconds(plan)
    return False, round(math.log(seconds(plan)) * 100), len(changes), seconds(plan)


CHANGES = {
    "pipeline": ("pipeline",),
    "tensor": ("tensor",),
    "shard": ("shard", "replicate"),
    "stage": ("zero_stage",),
    "micro-batch": ("micro_batch",),
    "recompute": ("recompute",),
    "offload": ("offload_optimizer", "offload_param"),
}


def differences(old: Layout, new: Layout) -> frozenset[str]:
    """What is changed, in the words of `CHANGES`; data ranks that follow from a pipeline or tensor are no change."""
    found = {name for name, keys in CHANGES.items() if any(getattr(old, key) != getattr(new, key) for key in keys)}
    kept = (old.replicate == 1) == (new.replicate == 1) and (old.shard == 1) == (new.shard == 1)
    if kept and old.data_ranks != new.data_ranks and 1 in (old.replicate, old.shard):
        found -= {"shard"}
    if old.zero_stage == 0 or new.zero_stage == 0:
        found -= {"shard"}
    return frozenset(found)


def promising(layouts: Iterable[Layout], base: Layout, room: float, estimates: Estimates) -> list[Layout]:
    """Of layouts those that may fit and change few things."""
    return [
        layout
        for layout in layouts
        if layout != base
        and len(differences(base, layout)) <= MOST_CHANGES
        and least_bytes(layout, estimates.sizes) <= room
    ]


def changes_to(raw: Json, old: Layout, new: Layout) -> dict[str, Any]:
    """The keys of a config to change, and their values; the mesh is left to what the config then resolves to."""
    found: dict[str, Any] = {}
    if old.pipeline != new.pipeline:
        found["pipeline.stages"] = new.pipeline
    if old.tensor != new.tensor:
        found["tensor_parallel.autotp_size"] = new.tensor
    if old.zero_stage != new.zero_stage:
        found["zero_optimization.stage"] = new.zero_stage
    if old.recompute != new.recompute:
        every = f":{new.recompute.every}" if new.recompute.mode == "every" else ""
        found["trainer.activation_checkpointing"] = f"{new.recompute.mode}{every}"
    zero = raw.get("zero_optimization") or {}
    for key in ("offload_optimizer", "offload_param"):
        if (device := getattr(new, key)) != getattr(old, key):
            path = f"zero_optimization.{key}"
            found |= {f"{path}.device": device} if isinstance(zero.get(key), dict) else {path: {"device": device}}
    return found | _batch_changes(raw, new)


def _batch_changes(raw: Json, new: Layout) -> dict[str, int]:
    """The global batch is written down where it followed from the others; accumulation follows where it did."""
    wanted = {BATCH: new.train_batch, MICRO: new.micro_batch, ACCUMULATION: new.accumulation}
    written = {key: raw[key] for key in wanted if isinstance(raw.get(key), int)}
    if all(wanted[key] == value for key, value in written.items()) and len(written) > 1:
        return {}
    wrong = {key for key in written if written[key] != wanted[key]}
    needed = wrong | ({BATCH, MICRO} - written.keys())
    return {key: wanted[key] for key in wanted if key in needed}


RECOMPUTES = {"none": "recompute nothing", "full": "recompute all blocks", "selective": "recompute selectively"}


def words(old: Layout, new: Layout) -> str:
    """What is changed, for a sentence."""
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
    """What a change brings and costs, in one sentence."""
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
    """(what is said, whether it is less) of each figure that changes by 1 % of the whole or more."""
    whole = max(old.needed, new.needed)
    for name, kinds in MEMORY.items():
        change = _on_device(new, kinds) - _on_device(old, kinds)
        if abs(change) >= whole / 100:
            yield f"{_gib(change)} {_less(change)} {name} per GPU", change < 0
    for name, inside in (("inside nodes", True), ("between nodes", False)):
        before, after = (_wire(plan, inside) for plan in (old, new))
        if abs(after - before) >= 1e8 and abs(after - before) >= 0.01 * max(before, after):
            yield f"{abs(after - before) / 1e9:,.1f} GB {_less(after - before)} {name}", after < before
    again = recomputed(new.subject.layout) - recomputed(old.subject.layout)
    if again:
        yield f"{abs(again):.0%} {_less(again)} to compute", again < 0
    before, after = seconds(old), seconds(new)
    if abs(after / before - 1) >= 0.01:
        yield f"about {abs(after / before - 1):.0%} {_less(after - before)} time per step", after < before


def _on_device(plan: Plan, kinds: Iterable[str]) -> float:
    away = offloaded(plan.subject)
    return sum(plan.fullest.peak.by_kind.get(kind, 0) for kind in kinds if kind not in away)


def _wire(plan: Plan, inside: bool) -> float:
    return max(sum(sent.size for sent in role.sent if sent.inside is inside) for role in plan.roles)


def _less(change: float) -> str:
    return "less" if change < 0 else "more"


def _gib(size: float) -> str:
    return f"{abs(size) / GIB:,.1f} GiB" if abs(size) >= 0.1 * GIB else f"{abs(size) / 2**20:,.1f} MiB"


def shortfall(old: Plan, best: Plan, nodes: int | None) -> str:
    """Why nothing fits, by how much the best misses, and what would do."""
    missing, device = best.needed - best.room, best.cluster.device
    larger = [found for found in DEVICES.values() if found.memory - RESERVED >= best.needed]
    named = f" ({min(larger, key=lambda found: found.memory).name})" if larger else ""
    mends = [f"{nodes} nodes of {best.cluster.devices}"] if nodes else []
    mends.append(f"devices of {math.ceil((best.needed + RESERVED) / GIB)} GiB{named}")
    best_words = words(old.subject.layout, best.subject.layout) if best is not old else "as it is"
    return (
        f"nothing fits {best.cluster.nodes} x {best.cluster.devices} {device.name}; {best_words} misses by "
        f"{_gib(missing)} of {_gib(best.room)}, and would fit {' or '.join(mends)}"
    )
