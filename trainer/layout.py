"""The resolved parallel plan of a run, as an object that can't have invalid values."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Literal, cast

from trainer.config import Config, MeshSizes, mesh_sizes, secondary_shard
from trainer.config.keys.key import AUTO
from trainer.errors import ConfigError, Problem
from trainer.storage import Json

Device = Literal["none", "cpu", "nvme"]
Partition = Literal["best", "parameters", "uniform"]
Precision = Literal["float32", "bfloat16", "float16"]
Compile = Literal["auto", "none", "loss", "blocks"]
Float8 = Literal["none", "tensorwise", "rowwise"]
RecomputeMode = Literal["none", "full", "every", "selective", "offload"]

SECONDARY = "zero_optimization.zero_hpz_partition_size"
AXES = ("pipeline", "replicate", "shard", "tensor")
"""The axes of the mesh, outermost first; ranks are numbered in row-major order."""


@dataclass(frozen=True)
class Recompute:
    """The blocks whose activations are recomputed in the backward pass."""

    mode: RecomputeMode = "none"
    every: int = 1
    """The N of mode `every`, each Nth block; of `selective`, each Nth matrix product."""
    tile: int = 0
    """The most tokens that a block's MLP computes at a time, and again; 0: all, once."""

    def chooses(self, block: int) -> bool:
        """Return True if the block of this number is recomputed."""
        return self.mode != "none" and (self.mode != "every" or block % self.every == 0)

    def __str__(self) -> str:
        return f"{self.mode}:{self.every}" if self.mode == "every" or self.every > 1 else self.mode


@dataclass(frozen=True)
class PipelineSchedule:
    """How blocks are divided into pipeline stages, and micro-batches ordered, by PyTorch's name."""

    name: str
    stages_per_rank: int = 1
    folded: bool = False
    """True if rank r of p holds the stages r and 2p - 1 - r; otherwise it holds r, r + p, ..."""
    splits_backward: bool = False
    """True if gradients of weights are computed apart from those of activations."""
    partition: Partition = "best"
    """The rule by which blocks are assigned to the stages."""
    row: int = 1
    """The tokens of a sequence, by which `best` weighs attention."""

    def problem(self, micro_batches: int, ranks: int) -> tuple[str, str] | None:
        """Return (actual, expected) if so many micro-batches can't run on `ranks` ranks."""
        stages = ranks * self.stages_per_rank
        least = stages if self.folded else ranks
        actual = f"{micro_batches} micro-batches for {stages} pipeline stages under {self.name}"
        if micro_batches < least:
            return actual, f"at least {least}"
        rounds = micro_batches // ranks
        if self.stages_per_rank > 1 and not self.folded and micro_batches % rounds:
            return actual, f"a multiple of {rounds}, the rounds of {ranks} ranks"
        return None

    def bubble(self, micro_batches: int, ranks: int) -> float:
        """Return the share of a step in which a rank waits for others (arXiv 2104.04473, 2.2).

        Schedules that split the backward pass wait for less.
        """
        waits = ranks - 1
        return waits / (micro_batches * self.stages_per_rank + waits)


PIPELINE_SCHEDULES = {
    schedule.name: schedule
    for schedule in (
        PipelineSchedule("GPipe"),
        PipelineSchedule("1F1B"),
        PipelineSchedule("Interleaved1F1B", 2),
        PipelineSchedule("InterleavedZeroBubble", 2, splits_backward=True),
        PipelineSchedule("ZBVZeroBubble", 2, folded=True, splits_backward=True),
        PipelineSchedule("DualPipeV", 2, folded=True, splits_backward=True),
    )
}
"""Sources: arXiv 1811.06965 (GPipe), 2104.04473 (1F1B, interleaved), 2401.10241 (zero bubble),
2412.19437 (DualPipeV).
"""


@dataclass(frozen=True)
class RunSizes(MeshSizes):
    """The mesh axes and the batch sizes."""

    micro_batch: int
    """Samples in one forward pass of one data rank."""
    accumulation: int
    """Micro-batches per step (gradient accumulation)."""

    def check(self, world_size: int, train_batch: int) -> None:
        """Raise ConfigError unless all sizes are above 0 and give so many processes and samples."""
        axes = {name: getattr(self, name) for name in AXES}
        batch = {
            "micro-batch": self.micro_batch,
            "accumulation": self.accumulation,
            "data ranks": self.data_ranks,
        }
        problems = _misfit("mesh", axes, world_size, "processes")
        problems += _misfit("train_batch_size", batch, train_batch, "samples")
        if problems:
            raise ConfigError(*problems)

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return self.pipeline * self.replicate * self.shard * self.tensor

    @property
    def train_batch(self) -> int:
        """Samples per step, over all data ranks (the global batch)."""
        return self.micro_batch * self.accumulation * self.data_ranks


@dataclass(frozen=True)
class StateLayout(RunSizes):
    """Those sizes, and where the model's state is kept, and in which precision."""

    zero_stage: int
    offload_optimizer: Device
    offload_param: Device
    precision: Precision

    @property
    def offloads(self) -> bool:
        """True if any state is kept off the device."""
        return self.offload_optimizer != "none" or self.offload_param != "none"


@dataclass(frozen=True)
class Layout(StateLayout):
    """The whole plan. Raises ConfigError for bad sizes."""

    recompute: Recompute
    schedule: PipelineSchedule = PIPELINE_SCHEDULES["1F1B"]
    """Has no effect if `pipeline` is 1."""
    sync_batch_norm: bool = False
    """True if batch norm computes the statistics of a micro-batch over all data ranks together."""
    compile: Compile = "none"
    """The parts that `torch.compile` compiles; "auto": blocks, on a GPU; "loss": it alone.

    "blocks" compiles the loss, too.
    """
    float8: Float8 = "none"
    """How the factors of float8 products are scaled, in large linear layers of blocks."""
    float8_head: bool = False
    """True if the head multiplies in float8, too; not without `float8`."""
    sequence_parallel: bool = False
    """True if between the split matrices each tensor rank has a part of each row's tokens."""
    updated: Precision = "float32"
    """The precision of the weights that are updated, and of the optimizer's state."""
    router_bias_rate: float = 0.0
    """How far a step moves the biases by which routers choose experts; 0: they stay."""
    secondary_shard: int = 1
    """The neighbours on `shard` that share a second copy of the weights between the two passes.

    ZeRO++'s hierarchical partitioning (hpZ, arXiv 2306.10209, section 3.2), of ZeRO-3; 1: none.
    """

    def __post_init__(self) -> None:
        self.check(self.world_size, self.train_batch)
        if self.shard % self.secondary_shard:
            share = "that share one copy of the weights (trainer.mesh.shard)"
            actual = f"{self.secondary_shard} for {self.shard} ranks {share}"
            hint = "Set it to the GPUs of a node, or to 1 for no second copy."
            expected = f"a divisor of {self.shard}"
            raise ConfigError(Problem(SECONDARY, actual, expected, hint))
        problem = self.schedule.problem(self.accumulation, self.pipeline)
        if self.pipeline > 1 and problem:
            key = "gradient_accumulation_steps"
            hint = f"Raise {key}: a pipeline's micro-batches are its accumulation."
            raise ConfigError(Problem(key, *problem, hint))

    @property
    def regathered(self) -> int:
        """The ranks over which ZeRO-3 gathers blocks for the backward pass; 0: as the forward."""
        return self.secondary_shard if 1 < self.secondary_shard < self.shard else 0

    @property
    def stages(self) -> int:
        """The number of pipeline stages on all ranks."""
        return self.pipeline * self.schedule.stages_per_rank if self.pipeline > 1 else 1

    @property
    def stages_per_rank(self) -> int:
        return self.stages // self.pipeline

    def data_rank(self, rank: int) -> int:
        """Return the index of the share of the samples that process `rank` trains on."""
        return rank // self.tensor % self.averaging_ranks // self.context

    def row_groups(self, heads: int) -> int:
        """Count the groups of ranks that share a row, each as large as the heads allow."""
        return self.context // math.gcd(self.context, heads // self.tensor)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the position of process `rank` on each axis."""
        coordinates = {}
        for axis in reversed(AXES):
            rank, coordinates[axis] = divmod(rank, getattr(self, axis))
        return coordinates

    def ranks_of(self, pipeline_rank: int) -> range:
        """Return the processes at this coordinate of the pipeline."""
        each = self.world_size // self.pipeline
        return range(pipeline_rank * each, (pipeline_rank + 1) * each)

    def axes_of(self, group: Iterable[int]) -> tuple[str, ...]:
        """Return the axes along which any two processes of a group differ."""
        places = [self.coordinates(rank) for rank in group]
        return tuple(axis for axis in AXES if len({place[axis] for place in places}) > 1)

    def stages_of(self, pipeline_rank: int) -> list[int]:
        """Return the pipeline stages of the ranks at this coordinate, in order."""
        if self.pipeline == 1:
            return [0]
        if self.schedule.folded:
            return [pipeline_rank, self.stages - 1 - pipeline_rank]
        return list(range(pipeline_rank, self.stages, self.pipeline))

    def to_json(self) -> Json:
        """Return the fields and the two totals, as they stand in a run's records."""
        return {"world_size": self.world_size, "train_batch": self.train_batch, **asdict(self)}

    def describe(self) -> str:
        """Describe the layout on one line."""
        axes = [f"{name} {getattr(self, name)}" for name in AXES]
        mesh = " x ".join(axis for axis in axes if not axis.endswith(" 1")) or "one process"
        batch = f"{self.micro_batch} x {self.accumulation} x {self.data_ranks}"
        offloads = {"optimizer": self.offload_optimizer, "parameters": self.offload_param}
        words = [
            mesh,
            f"ZeRO-{self.zero_stage}",
            *([f"hpZ over {self.secondary_shard} ranks"] if self.secondary_shard > 1 else []),
            *([f"context {self.context}"] if self.context > 1 else []),
            *([f"experts over {self.expert} ranks"] if self.expert > 1 else []),
            *(["sequence parallel"] if self.sequence_parallel else []),
            *(f"{what} on {device}" for what, device in offloads.items() if device != "none"),
            self.precision,
            f"batch {self.train_batch} = {batch}",
        ]
        if self.pipeline > 1:
            words.append(self.schedule.name)
        if self.recompute.mode != "none":
            words.append(f"recompute {self.recompute}")
        if self.recompute.tile:
            words.append(f"MLPs in tiles of {self.recompute.tile} tokens")
        if self.compile == "blocks":
            words.append("compiled blocks")
        if self.updated != "float32":
            words.append(f"updated in {self.updated}")
        if self.float8 != "none":
            head = " with the head" if self.float8_head else ""
            words.append(f"float8 {self.float8}{head}")
        return ", ".join(words)


def layout_of(config: Config, world_size: int) -> Layout:
    """Build the layout of a resolved config for `world_size` processes, or raise ConfigError."""
    settings = config.settings
    zero = settings.get("zero_optimization", {})
    bf16 = settings.get("bf16", {})
    low = bf16.get("bf16_master_weights_and_grads") is bf16.get("bf16_optimizer_states") is True
    layout = Layout(
        **vars(mesh_sizes(config, world_size)),
        micro_batch=settings["train_micro_batch_size_per_gpu"],
        accumulation=settings["gradient_accumulation_steps"],
        zero_stage=zero.get("stage", 0),
        offload_optimizer=(zero.get("offload_optimizer") or {}).get("device", "none"),
        offload_param=(zero.get("offload_param") or {}).get("device", "none"),
        precision=_precision(config),
        recompute=_recompute(config.trainer.activation_checkpointing, config.trainer.tiled_mlp),
        schedule=replace(
            PIPELINE_SCHEDULES[config.trainer.pipeline_schedule],
            partition=settings.get("pipeline", {}).get("partition", "best"),
            row=config.trainer.data.sequence_length,
        ),
        sync_batch_norm=config.trainer.sync_batch_norm,
        compile=config.trainer.compile,
        float8=config.trainer.float8,
        float8_head=config.trainer.float8_head,
        router_bias_rate=config.trainer.router_bias_update_rate,
        sequence_parallel=settings.get("tensor_parallel", {}).get("sequence_parallel", False),
        updated="bfloat16" if low and _precision(config) == "bfloat16" else "float32",
        secondary_shard=secondary_shard(settings),
    )
    layout.check(world_size, settings["train_batch_size"])
    return layout


def _precision(config: Config) -> Precision:
    if config.settings.get("bf16", {}).get("enabled"):
        return "bfloat16"
    return "float16" if config.settings.get("fp16", {}).get("enabled") else "float32"


def _recompute(text: str, tile: int | None) -> Recompute:
    if text == AUTO:  # sizes and batches are checked before a mode is chosen
        text = "none"
    mode, _, every = text.partition(":")
    return Recompute(cast(RecomputeMode, mode), int(every or 1), tile or 0)


def _misfit(path: str, factors: dict[str, int], whole: int, unit: str) -> list[Problem]:
    """Return a problem if the product of the factors is not `whole`, or one is below 1."""
    product = math.prod(factors.values())
    if product == whole and min(factors.values()) >= 1:
        return []
    text = " x ".join(f"{size} ({name})" for name, size in factors.items())
    return [Problem(path, f"{text} = {product}", f"{whole} {unit} from sizes of at least 1")]
