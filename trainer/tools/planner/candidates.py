"""Changes to a layout that may make it fit or run faster, and the order in which to try them.

A closed form rules out what can't fit and ranks what is likely to; only simulated layouts are
proposed.
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
from trainer.tools.planner.cluster import Cluster, Traffic, time_of
from trainer.tools.planner.estimate import Plan

BLOCK_BYTES = 34
"""Bytes of a block's activations per hidden value and token, without the attention matrix (arXiv
2205.05198, eq. 1).
"""
MOST_CHANGES = 3
PIPELINES = (1, 2, 4, 8, 16)
OFFLOADS = (("none", "none"), ("cpu", "none"), ("cpu", "cpu"))
ADAM = ("adam", "adamw", "fusedadam")

BATCH, MICRO, ACCUMULATION = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
)


@dataclass(frozen=True)
class ModelSizes:
    """The inputs of the closed forms that do not depend on the layout."""

    parameters: int
    learned: int
    blocks: int
    splits: bool
    """True if tensor parallelism supports the model."""
    hidden: int
    """The number of values in one sample's hidden state."""
    kept: int
    """The same as `SampleCost.kept`."""
    moments: int
    """Bytes of optimizer state per trained parameter, at the least."""
    flops: float
    """FLOPs of a step: forward and backward of all samples."""

    @classmethod
    def of(cls, plan: Plan) -> ModelSizes:
        spec = plan.workload.spec
        optimizer = plan.workload.deepspeed.get("optimizer", {})
        sure = str(optimizer.get("type", "")).lower() in ADAM and "bf16" not in str(
            optimizer.get("params", {})
        )
        learned = spec.parameters - sum(spec.training.frozen.values())
        return cls(
            spec.parameters,
            learned,
            max(1, len(spec.blocks)),
            spec.language.vocabulary > 0,
            plan.workload.sample.hidden,
            plan.workload.sample.kept,
            8 if sure else 0,
            plan.step_flops,
        )


def candidates(
    layout: Layout, cluster: Cluster, blocks: int, splits: bool = True
) -> Iterator[Layout]:
    """Yield layouts with the same global batch on a cluster; `layout` itself is among them if it
    runs there.

    `splits`: True if tensor parallelism supports the model; its groups stay inside a node. It is
    not checked if an engine supports a layout.
    """
    world, stay = cluster.world_size, {layout.tensor}
    tensors = sorted({t for t in (1, 2, 4, 8) if splits and cluster.devices % t == 0} | stay)
    pipelines = sorted({p for p in PIPELINES if p <= blocks} | {layout.pipeline})
    recomputes = dict.fromkeys(
        (layout.recompute, Recompute(), Recompute("selective"), Recompute("full"))
    )
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
                        **{"pipeline": pipeline, "tensor": tensor, "zero_stage": stage},
                        **{"shard": shard, "replicate": ranks // shard, "micro_batch": micro},
                        accumulation=layout.train_batch // (micro * ranks),
                        offload_optimizer=optimizer,
                        offload_param=param,
                        recompute=recompute,
                    )
                except ConfigError:  # the schedule needs more micro-batches
                    continue


def _micro_batches(layout: Layout, ranks: int) -> list[int]:
    each, rest = divmod(layout.train_batch, ranks)
    sizes = {layout.micro_batch, *(2**k for k in range(7))}
    return [] if rest else sorted(size for size in sizes if each % size == 0)


def _shards(layout: Layout, ranks: int, stage: int, inside: int) -> set[int]:
    if stage == 0:
        return {1}
    return {
        size
        for size in (ranks, inside, layout.shard)
        if size > 0 and ranks % size == 0 and (size > 1 or ranks == 1)
    }


def least_bytes(layout: Layout, sizes: ModelSizes) -> float:
    """Return a lower bound on the bytes of the fullest device; a layout whose bound exceeds its
    memory can't fit.

    State by ZeRO stage (arXiv 1910.02054, section 3); of activations only each block's input, or
    those of its linear layers if nothing is recomputed.
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


def _least_activations(layout: Layout, sizes: ModelSizes, value: int) -> float:
    every = layout.recompute.every if layout.recompute.mode == "every" else 1
    inputs = (
        sizes.kept
        if layout.recompute.mode == "none" and sizes.learned == sizes.parameters
        else 1 / every
    )
    held = sizes.blocks // layout.stages // max(1, every) * every
    return value * inputs * held * layout.micro_batch * sizes.hidden


def _per_rank(layout: Layout) -> int:
    return layout.pipeline * layout.tensor


@dataclass
class Estimates:
    """Closed-form estimates of memory and time, corrected by each layout that has been
    simulated.
    """

    sizes: ModelSizes
    cluster: Cluster
    factors: dict[str, float] = field(default_factory=dict)
    """The ratio of simulated to estimated activations, by mode of recomputation."""

    def bytes(self, layout: Layout) -> float:
        """Estimate the bytes on the fullest device."""
        known = [*self.factors.values(), 1.5]
        return self._state(layout) + self._activations(layout) * self.factors.get(
            layout.recompute.mode, known[0]
        )

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
        values = sizes.hidden * layout.micro_batch * (2 if layout.precision == "float32" else 1)
        whole = values * (10 + (BLOCK_BYTES - 10) / layout.tensor)
        held = sizes.blocks / layout.pipeline * min(layout.pipeline, layout.accumulation)
        if mode == "none":
            return whole * held
        if mode == "selective":
            return whole * held * 0.7
        return whole + held * (2 * values + (1 - 1 / layout.recompute.every) * whole)

    def seconds(self, layout: Layout) -> float:
        """Estimate the seconds of a step, midway between all messages hidden and none."""
        wires = {True: Traffic(), False: Traffic()}
        for inside, count, size in self._sent(layout):
            wires[inside] += Traffic(count, size)
        device, host = self.cluster.device, self._on_host(layout)
        return time_of(
            layout, device, self.sizes.flops, wires[True], wires[False], on_host=host
        ).middle

    def _sent(self, layout: Layout) -> Iterator[tuple[bool, float, float]]:
        """Yield (inside a node, messages, bytes) sent by one rank for each axis, in rings."""
        sizes, devices = self.sizes, self.cluster.devices
        value = 4 if layout.precision == "float32" else 2
        weights = value * sizes.parameters / _per_rank(layout)
        gathers = 2 * layout.accumulation if layout.zero_stage == 3 else 1
        reduces = layout.accumulation if layout.zero_stage >= 2 else 1
        shard, replicate, tensor = layout.shard, layout.replicate, layout.tensor
        blocks = sizes.blocks / layout.pipeline
        times = float(gathers + reduces) if shard > 1 else 0.0
        yield shard * tensor <= devices, times * blocks, times * weights * (shard - 1) / shard
        times = blocks if replicate > 1 else 0.0
        yield (
            shard * tensor * replicate <= devices,
            times,
            2 * weights / shard * (replicate - 1) / replicate,
        )
        hidden = value * sizes.hidden * layout.micro_batch * layout.accumulation
        times = 4 * blocks if tensor > 1 else 0.0
        yield (
            tensor <= devices,
            times * layout.accumulation,
            times * hidden * 2 * (tensor - 1) / tensor,
        )
        times = 2.0 if layout.pipeline > 1 else 0.0
        yield layout.world_size <= devices, times * layout.accumulation, times * hidden

    def _on_host(self, layout: Layout) -> float:
        each = (
            16
            if layout.offload_param != "none"
            else 12
            if layout.offload_optimizer != "none"
            else 0
        )
        return each * self.sizes.learned / _per_rank(layout) / layout.shard


def rank(plan: Plan, changes: Mapping[str, Any]) -> tuple[bool, float, int, float]:
    """Return the sort key of a proposal: those that fit first, then time (to a percent), then
    number of changes.

    Of those that do not fit, the one that misses least comes first.
    """
    if not plan.fits:
        return True, plan.needed, len(changes), plan.time.middle
    return False, round(math.log(plan.time.middle) * 100), len(changes), plan.time.middle


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
    """Return the names of `CHANGES` that differ; data ranks that follow from pipeline or tensor do
    not count.
    """
    found = {
        name
        for name, keys in CHANGES.items()
        if any(getattr(old, key) != getattr(new, key) for key in keys)
    }
    kept = (old.replicate == 1) == (new.replicate == 1) and (old.shard == 1) == (new.shard == 1)
    if kept and old.data_ranks != new.data_ranks and 1 in (old.replicate, old.shard):
        found -= {"shard"}
    if old.zero_stage == 0 or new.zero_stage == 0:
        found -= {"shard"}
    return frozenset(found)


def promising(
    layouts: Iterable[Layout], base: Layout, room: float, estimates: Estimates
) -> tuple[list[Layout], list[Layout]]:
    """Select the layouts that may fit, in two lists: those with few changes, and those with
    more.
    """
    few: list[Layout] = []
    more: list[Layout] = []
    for layout in layouts:
        if layout != base and least_bytes(layout, estimates.sizes) <= room:
            (few if len(differences(base, layout)) <= MOST_CHANGES else more).append(layout)
    return few, more


def changes_to(raw: Json, old: Layout, new: Layout) -> dict[str, Any]:
    """Return the config keys to change, with their values; the mesh follows when the config is
    resolved.
    """
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
            found |= (
                {f"{path}.device": device}
                if isinstance(zero.get(key), dict)
                else {path: {"device": device}}
            )
    return found | _batch_changes(raw, new)


def _batch_changes(raw: Json, new: Layout) -> dict[str, int]:
    """Return the batch keys to change; the global batch becomes explicit, accumulation follows
    where it did before.
    """
    wanted = {BATCH: new.train_batch, MICRO: new.micro_batch, ACCUMULATION: new.accumulation}
    written = {key: raw[key] for key in wanted if isinstance(raw.get(key), int)}
    if all(wanted[key] == value for key, value in written.items()) and len(written) > 1:
        return {}
    wrong = {key for key in written if written[key] != wanted[key]}
    needed = wrong | ({BATCH, MICRO} - written.keys())
    return {key: wanted[key] for key in wanted if key in needed}
