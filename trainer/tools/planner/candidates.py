"""The layouts that may replace a config's own, and the config keys that make the change."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import product
from typing import Any

from trainer.errors import ConfigError
from trainer.layout import SECONDARY, Layout, Recompute
from trainer.storage import Json
from trainer.tools.planner.cluster import Cluster

TENSORS = (1, 2, 4, 8)
EXPERTS = (2, 4, 8, 16, 32, 64)
CONTEXTS = (1, 2, 4, 8, 16, 32)
PIPELINES = (1, 2, 4, 8, 16)
MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64)
OFFLOADS = (("none", "none"), ("cpu", "none"), ("cpu", "cpu"))
BATCH = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"
ACCUMULATION = "gradient_accumulation_steps"


def candidates(
    layout: Layout,
    cluster: Cluster,
    blocks: int,
    splits: bool = True,
    heads: int = 0,
    experts: int = 0,
) -> Iterator[Layout]:
    """Yield layouts with the same global batch on a cluster, among them `layout` if it runs there.

    `blocks`, `heads` and `experts`: the model's blocks, attention heads, and routed experts of a
    layer. `splits`: True if tensor parallelism supports the model; its groups stay inside a node.
    Context parallelism grows only where the micro-batch is 1 and all is recomputed. Expert
    parallelism is added only under ZeRO-3, inside a node, and a second copy of the weights on each
    node (hpZ) where ZeRO-3's shards are on several. Whether an engine supports a layout is not
    checked.
    """
    tensors = {layout.tensor, *(t for t in TENSORS if splits and cluster.devices % t == 0)}
    contexts = {layout.context, *(n for n in CONTEXTS if n == 1 or heads % n == 0 < heads)}
    pipelines = {layout.pipeline, *(stages for stages in PIPELINES if stages <= blocks)}
    kept = layout.recompute
    tile = layout.recompute.tile
    others = Recompute("none", 1, tile), Recompute("selective", 1, tile), Recompute("full", 1, tile)
    offloads = (layout.offload_optimizer, layout.offload_param), *OFFLOADS
    for tensor, pipeline, context in product(*map(sorted, (tensors, pipelines, contexts))):
        ranks, rest = divmod(cluster.world_size, tensor * pipeline)
        # the config's own ranks may be more than the heads; those that are proposed divide them
        whole = tensor if context == layout.context else tensor * context
        if rest or ranks % context or heads % whole:
            continue
        micros = _micro_batches(layout, ranks // context)
        changes = product(range(4), micros, dict.fromkeys(offloads), dict.fromkeys((kept, *others)))
        for stage, micro, (optimizer, param), recompute in changes:
            unfit = (optimizer != "none" and stage == 0) or (param != "none" and stage < 3)
            least = micro == 1 and recompute.mode in ("full", "offload")
            if unfit or (context > layout.context and not least):
                continue
            for sharding in _shardings(layout, stage, tensor, ranks, cluster, experts):
                new: dict[str, Any] = {"pipeline": pipeline, "tensor": tensor, "context": context}
                new |= {"zero_stage": stage, "micro_batch": micro, "recompute": recompute}
                new |= {"offload_optimizer": optimizer, "offload_param": param, **sharding}
                new["accumulation"] = layout.train_batch // (micro * (ranks // context))
                with suppress(ConfigError):  # more micro-batches, or a divisor of the shards
                    yield replace(layout, **new)


def _shardings(
    layout: Layout, stage: int, tensor: int, ranks: int, cluster: Cluster, experts: int
) -> Iterator[dict[str, int]]:
    """Yield the fields of a layout that say how weights are shared out over `ranks`."""
    spread = {layout.expert, 1, *(EXPERTS if stage == 3 else ())}
    usual = {layout.secondary_shard, 1} if stage == 3 else {1}
    for shard in sorted(_shards(layout, ranks, stage, cluster.devices // tensor)):
        on_several_nodes = stage == 3 and tensor == 1 and shard > cluster.devices
        copies = {*usual, cluster.devices} if on_several_nodes else usual
        for expert, secondary in product(sorted(spread), sorted(copies)):
            divisors = math.gcd(shard * tensor, experts or 1, cluster.devices)
            if expert == layout.expert or divisors % expert == 0:
                sharing = {"shard": shard, "replicate": ranks // shard, "expert": expert}
                yield sharing | {"secondary_shard": secondary}


def _micro_batches(layout: Layout, ranks: int) -> list[int]:
    each, rest = divmod(layout.train_batch, ranks)
    sizes = {layout.micro_batch, *MICRO_BATCHES}
    return [] if rest else sorted(size for size in sizes if each % size == 0)


def _shards(layout: Layout, ranks: int, stage: int, inside: int) -> set[int]:
    if stage == 0 or ranks == 1:
        return {1}
    return {size for size in (ranks, inside, layout.shard) if size > 1 and ranks % size == 0}


KEYS = {
    "pipeline": "pipeline.stages",
    "tensor": "tensor_parallel.autotp_size",
    "context": "sequence_parallel_size",
    "expert": "expert_parallel.autoep_size",
    "zero_stage": "zero_optimization.stage",
    "secondary_shard": SECONDARY,
}
"""Fields of a layout that one key of a config sets, and the key."""

CHANGES = {
    **{name: (name,) for name in (*KEYS, "micro_batch", "recompute")},
    "shard": ("shard", "replicate"),
    "offload": ("offload_optimizer", "offload_param"),
}
"""The fields of a layout that count as one change, by its name."""


def differences(old: Layout, new: Layout) -> frozenset[str]:
    """Return the names of `CHANGES` that differ, without "shard" if it follows from the others."""
    changed = {
        name
        for name, keys in CHANGES.items()
        if any(getattr(old, key) != getattr(new, key) for key in keys)
    }
    kept = (old.replicate == 1) == (new.replicate == 1) and (old.shard == 1) == (new.shard == 1)
    follows = kept and old.data_ranks != new.data_ranks and 1 in (old.replicate, old.shard)
    counts = not follows and 0 not in (old.zero_stage, new.zero_stage)
    return frozenset(changed if counts else changed - {"shard"})


def overrides_of(changes: Mapping[str, object]) -> list[str]:
    """Return changes as `key.path=value` arguments."""
    return [f"{path}={json.dumps(value)}" for path, value in changes.items()]


def changes_to(raw: Json, old: Layout, new: Layout) -> dict[str, object]:
    """Return the config keys to change, with their values; resolving the config sets the mesh."""
    moved = [name for name in KEYS if getattr(old, name) != getattr(new, name)]
    changes: dict[str, object] = {KEYS[name]: getattr(new, name) for name in moved}
    if "expert_parallel.autoep_size" in changes:
        changes["expert_parallel.enabled"] = True
    if old.recompute != new.recompute:
        changes["trainer.activation_checkpointing"] = str(new.recompute)
    zero = raw.get("zero_optimization") or {}
    for key in ("offload_optimizer", "offload_param"):
        if (device := getattr(new, key)) != getattr(old, key):
            path = f"zero_optimization.{key}"
            known = isinstance(zero.get(key), dict)
            changes |= {f"{path}.device": device} if known else {path: {"device": device}}
    return changes | _batch_changes(raw, new)


def _batch_changes(raw: Json, new: Layout) -> dict[str, int]:
    """Return the batch keys to set: the wrong ones, and the first two if the config lacks them.

    There are none if the config has at least two, and all are right.
    """
    wanted = {BATCH: new.train_batch, MICRO: new.micro_batch, ACCUMULATION: new.accumulation}
    written = {key: raw[key] for key in wanted if isinstance(raw.get(key), int)}
    wrong = {key for key in written if written[key] != wanted[key]}
    if not wrong and len(written) > 1:
        return {}
    needed = wrong | ({BATCH, MICRO} - written.keys())
    return {key: wanted[key] for key in wanted if key in needed}
