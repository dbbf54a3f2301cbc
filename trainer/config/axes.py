"""The division of a run's processes over the axes of the mesh."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from trainer.config.compiled import Config
from trainer.errors import ConfigError, Problem
from trainer.storage import Json


@dataclass(frozen=True)
class MeshSizes:
    """The number of processes along each axis; their product is the world size."""

    pipeline: int
    replicate: int
    shard: int
    tensor: int
    context: int = field(default=1, kw_only=True)
    """The ranks along `replicate` x `shard` that share samples, with a part of the tokens each."""
    expert: int = field(default=1, kw_only=True)
    """The neighbours on `shard` x `tensor` that have a part of the routed experts each."""

    @property
    def averaging_ranks(self) -> int:
        """The number of processes over which gradients are averaged."""
        return self.replicate * self.shard

    @property
    def data_ranks(self) -> int:
        """The number of groups of processes that see different samples."""
        return self.averaging_ranks // self.context


def mesh_sizes(config: Config, world_size: int, local_world_size: int | None = None) -> MeshSizes:
    """Compute the mesh of `config` on `world_size` processes.

    `local_world_size` of them are on a node; None: all. Raises ConfigError if it does not fit.
    """
    pipeline = _size(config.settings.get("pipeline", {}).get("stages", 1))
    tensor = _size(config.settings.get("tensor_parallel", {}).get("autotp_size", 1))
    if world_size % (pipeline * tensor):
        group = pipeline * tensor
        axes = f"{pipeline} (pipeline) x {tensor} (tensor)"
        actual = f"{world_size} processes are not divisible by {axes}"
        expected = f"a multiple of {group} processes, {nearest(world_size, group)}"
        hint = "Change pipeline.stages or tensor_parallel.autotp_size."
        raise ConfigError(Problem("world size", actual, expected, hint))
    ranks = world_size // (pipeline * tensor)
    inside = ranks_inside(local_world_size or world_size, tensor, ranks)
    replicate, shard = _data_axes(config, ranks, inside)
    context = _size(config.settings.get("sequence_parallel_size", 1))
    if ranks % context:
        actual = f"{ranks} data-parallel processes are not divisible by it"
        expected = f"a multiple of {context} processes, {nearest(ranks, context)}"
        raise ConfigError(Problem(f"sequence_parallel_size {context}", actual, expected))
    expert = _experts(config.settings.get("expert_parallel", {}), shard, tensor)
    return MeshSizes(pipeline, replicate, shard, tensor, context=context, expert=expert)


def _experts(settings: Json, shard: int, tensor: int) -> int:
    size = _size(settings.get("autoep_size", 1)) if settings.get("enabled") else 1
    whole = shard * tensor
    place = f"expert_parallel.autoep_size {size}"
    if size > 1 and size % tensor:
        actual = f"it is no multiple of {tensor} (tensor)"
        raise ConfigError(Problem(place, actual, f"a multiple of {tensor}"))
    if whole % size:
        sharing = "that share one copy of the weights (ZeRO)"
        expected = f"a multiple of {size} processes, {nearest(whole, size)}, {sharing}"
        actual = f"{shard} (shard) x {tensor} (tensor) are not divisible by it"
        raise ConfigError(Problem(place, actual, expected))
    return size


def ranks_inside(local_world_size: int, tensor: int, ranks: int) -> int:
    """Return the size of a shard group within a node of `local_world_size` processes.

    It is all `ranks`, those of a pipeline stage along `replicate` x `shard`, if a node has only one
    of them or if a tensor-parallel group spans nodes.
    """
    inside = math.gcd(local_world_size // tensor, ranks) if local_world_size % tensor == 0 else 1
    return inside if inside > 1 else ranks


def nearest(number: int, divisor: int) -> str:
    """Name the two multiples of `divisor` next to `number`, which is not one, for the user."""
    lower = number // divisor * divisor or divisor
    return f"such as {lower} or {lower + divisor}"


def secondary_shard(settings: Json) -> int:
    """Return the ranks that share a second copy of ZeRO-3's weights (hpZ); 1: there is none."""
    zero = settings.get("zero_optimization", {})
    return _size(zero.get("zero_hpz_partition_size", 1)) if zero.get("stage", 0) == 3 else 1


def _size(value: int | str) -> int:
    return 1 if value == "auto" else max(1, int(value))


def _data_axes(config: Config, ranks: int, inside: int) -> tuple[int, int]:
    mesh = config.trainer.mesh
    stage = config.settings.get("zero_optimization", {}).get("stage", 0)
    if mesh.replicate is None and mesh.shard is None:
        return (1, ranks) if stage else (ranks, 1)
    # an axis that is not given gets what is left; -1 leaves nothing
    replicate = mesh.replicate or (1 if mesh.shard == -1 else -1)
    rest = 1 if mesh.replicate == -1 else -1
    shard = inside if mesh.shard == "node" else mesh.shard or rest
    given = max(replicate, 1) * max(shard, 1)
    if ranks % given or (given != ranks and -1 not in (replicate, shard)):
        actual = f"saw {replicate} (replicate) x {shard} (shard)"
        hint = "Set one of them to -1, for what is left, or change the number of processes."
        raise ConfigError(Problem("trainer.mesh", actual, f"a product of {ranks} data ranks", hint))
    rest = ranks // given
    replicate = rest if replicate == -1 else replicate
    shard = rest if shard == -1 else shard
    if shard > 1 and not stage:
        actual = f"saw {shard} with ZeRO stage 0"
        hint = "Set zero_optimization.stage to 1, 2 or 3, or shard to 1."
        raise ConfigError(Problem("trainer.mesh.shard", actual, "1", hint))
    return replicate, shard
