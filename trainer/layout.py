"""The resolved parallel plan of a run, as an object that can't have invalid values."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, cast

from trainer.config import Config, mesh_sizes
from trainer.errors import ConfigError, Problem

Device = Literal["none", "cpu", "nvme"]
Partition = Literal["best", "parameters", "uniform"]
Precision = Literal["float32", "bfloat16", "float16"]
RecomputeMode = Literal["none", "full", "every", "selective"]

AXES = ("pipeline", "replicate", "shard", "tensor")
"""The axes of the mesh, outermost first."""


@dataclass(frozen=True)
class Recompute:
    """The blocks whose activations are recomputed in the backward pass (activation
    checkpointing).
    """

    mode: RecomputeMode = "none"
    every: int = 1
    """The N of mode `every`: each Nth block is recomputed."""


@dataclass(frozen=True)
class PipelineSchedule:
    """The order in which a pipeline runs its micro-batches, by PyTorch's name for it."""

    name: str
    stages_per_rank: int = 1
    folded: bool = False
    """True if rank r of p holds the stages r and 2p - 1 - r, so that rank 0 has first and last;
    else r, r + p, ...
    """
    splits_backward: bool = False
    """True if gradients of weights are computed separately from those of activations, to fill the
    bubble.
    """

    def problem(self, micro_batches: int, ranks: int) -> tuple[str, str] | None:
        """Return why this many micro-batches can't run on `ranks` pipeline ranks, as (seen,
        expected), or None.
        """
        stages = ranks * self.stages_per_rank
        least = stages if self.folded else ranks
        seen = f"{micro_batches} micro-batches for {stages} pipeline stages under {self.name}"
        if micro_batches < least:
            return seen, f"at least {least}"
        rounds = micro_batches // ranks
        if self.stages_per_rank > 1 and not self.folded and micro_batches % rounds:
            return seen, f"a multiple of {rounds}, the rounds of {ranks} ranks"
        return None


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
"""GPipe: arXiv 1811.06965; 1F1B and interleaved: 2104.04473; zero bubble: 2401.10241; DualPipeV:
2412.19437.
"""


@dataclass(frozen=True)
class Layout:
    """Mesh axes, batch sizes and the sharding of state. Raises ConfigError if made with sizes that
    do not fit.
    """

    world_size: int
    pipeline: int
    replicate: int
    shard: int
    tensor: int
    micro_batch: int
    """Samples in one forward pass of one data rank."""
    accumulation: int
    """Micro-batches per step (gradient accumulation)."""
    train_batch: int
    """Samples per step, over all data ranks (the global batch)."""
    zero_stage: int
    offload_optimizer: Device
    offload_param: Device
    precision: Precision
    recompute: Recompute
    schedule: PipelineSchedule = PIPELINE_SCHEDULES["1F1B"]
    """The schedule; it has no effect if `pipeline` is 1."""
    partition: Partition = "best"
    """The rule by which blocks are divided over pipeline stages."""
    sync_batch_norm: bool = False
    """True if batch norm computes the statistics of a micro-batch over all data ranks together."""

    def __post_init__(self) -> None:
        axes = {name: getattr(self, name) for name in AXES}
        batch = {
            "micro-batch": self.micro_batch,
            "accumulation": self.accumulation,
            "data ranks": self.data_ranks,
        }
        problems = [
            *_product("mesh", axes, self.world_size, "processes"),
            *_product("train_batch_size", batch, self.train_batch, "samples"),
        ]
        if self.pipeline > 1 and (
            problem := self.schedule.problem(self.accumulation, self.pipeline)
        ):
            mend = (
                "Raise gradient_accumulation_steps: a pipeline's micro-batches are its "
                "accumulation."
            )
            problems.append(Problem("gradient_accumulation_steps", *problem, mend))
        if problems:
            raise ConfigError(*problems)

    @property
    def offloads(self) -> bool:
        """True if any state is kept off the device."""
        return self.offload_optimizer != "none" or self.offload_param != "none"

    @property
    def stages(self) -> int:
        """The number of pipeline stages on all ranks."""
        return self.pipeline * self.schedule.stages_per_rank if self.pipeline > 1 else 1

    @property
    def stages_per_rank(self) -> int:
        return self.stages // self.pipeline

    @property
    def data_ranks(self) -> int:
        """The number of groups of processes that see different samples."""
        return self.replicate * self.shard

    def data_rank(self, rank: int) -> int:
        """Return the index of process `rank`'s share of the samples: the mesh is row-major, tensor
        innermost.
        """
        return rank // self.tensor % self.data_ranks

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the position of process `rank` on each axis."""
        found = {}
        for axis in reversed(AXES):
            rank, found[axis] = divmod(rank, getattr(self, axis))
        return found

    def rank_at(
        self, pipeline: int = 0, replicate: int = 0, shard: int = 0, tensor: int = 0
    ) -> int:
        """Return the process at these coordinates."""
        return ((pipeline * self.replicate + replicate) * self.shard + shard) * self.tensor + tensor

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

    def describe(self) -> str:
        """Describe the layout on one line."""
        axes = [f"{name} {getattr(self, name)}" for name in AXES]
        mesh = " x ".join(axis for axis in axes if not axis.endswith(" 1")) or "one process"
        offloads = {"optimizer": self.offload_optimizer, "parameters": self.offload_param}
        words = [
            mesh,
            f"ZeRO-{self.zero_stage}",
            *(f"{what} on {device}" for what, device in offloads.items() if device != "none"),
            self.precision,
            (
                f"batch {self.train_batch} = {self.micro_batch} x {self.accumulation} x "
                f"{self.data_ranks}"
            ),
        ]
        if self.pipeline > 1:
            words.append(self.schedule.name)
        if self.recompute.mode != "none":
            every = f" {self.recompute.every}" if self.recompute.mode == "every" else ""
            words.append(f"recompute {self.recompute.mode}{every}")
        return ", ".join(words)


def layout_of(config: Config, world_size: int) -> Layout:
    """Build the layout of a resolved config. Raises ConfigError if it does not fit `world_size`
    processes.
    """
    sizes = mesh_sizes(config, world_size)
    settings = config.settings
    zero = settings.get("zero_optimization", {})
    return Layout(
        world_size=world_size,
        pipeline=sizes.pipeline,
        replicate=sizes.replicate,
        shard=sizes.shard,
        tensor=sizes.tensor,
        micro_batch=settings["train_micro_batch_size_per_gpu"],
        accumulation=settings["gradient_accumulation_steps"],
        train_batch=settings["train_batch_size"],
        zero_stage=zero.get("stage", 0),
        offload_optimizer=(zero.get("offload_optimizer") or {}).get("device", "none"),
        offload_param=(zero.get("offload_param") or {}).get("device", "none"),
        precision=_precision(config),
        recompute=_recompute(config.trainer.activation_checkpointing),
        schedule=PIPELINE_SCHEDULES[config.trainer.pipeline_schedule],
        partition=settings.get("pipeline", {}).get("partition", "best"),
        sync_batch_norm=config.trainer.sync_batch_norm,
    )


def _precision(config: Config) -> Precision:
    if config.settings.get("bf16", {}).get("enabled"):
        return "bfloat16"
    return "float16" if config.settings.get("fp16", {}).get("enabled") else "float32"


def _recompute(text: str) -> Recompute:
    mode, _, every = text.partition(":")
    return Recompute(cast(RecomputeMode, mode), int(every or 1))


def _product(path: str, factors: dict[str, int], whole: int, unit: str) -> list[Problem]:
    """Return a problem if the product of sizes is not `whole`, or one is below 1."""
    product = 1
    for size in factors.values():
        product *= size
    if product == whole and min(factors.values()) >= 1:
        return []
    text = " x ".join(f"{size} ({name})" for name, size in factors.items())
    return [Problem(path, f"{text} = {product}", f"{whole} {unit} from sizes of at least 1")]
