"""A config made small enough to verify in a minute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import sqrt
from pathlib import Path

from trainer.config import (
    RECOMPUTE,
    Choice,
    Config,
    RuntimeFacts,
    load,
    mesh_sizes,
    recompute_note,
    recomputing,
)
from trainer.config.keys import SCHEDULERS
from trainer.config.keys.key import AUTO
from trainer.config.read import at
from trainer.errors import ConfigError, Problem
from trainer.layout import PIPELINE_SCHEDULES, Layout
from trainer.models.spec import ModelSpec
from trainer.models.tiny_config import HIDDEN
from trainer.optim.builders import No, in_torch
from trainer.run.compose import Composed, compose
from trainer.storage import Json, installed

MICRO_BATCH = 2
ACCUMULATION = 3
DATA_RANKS = 3
"""The sizes of the tiny run: with only 2 micro-batches or 2 data ranks, a mean over the wrong group
could be right."""
LONGEST = 28
"""The most tokens of a sample, except of one: over three windows of the tiny copy's attention."""
TILE = 5
"""The most tokens of an MLP's tile: most sequences, and a rank's part of the longest, have several
tiles."""
LARGEST_WORLD = 8
CLIPPED_STEPS = 3
"""The number of steps whose norms one process computes beforehand."""
APART = 1.01
"""The least ratio of two norms for which a limit between them also separates the run's norms."""
UNKNOWN_STEPS = 1000
"""The number of steps assumed for a run that is as long as its data."""
PROBES = 2
PROBE_RATE = 1e-2
"""The steps at the end, and their learning rate: all that an optimizer does shows in float32."""
MOST = "full"
"""The mode of activation checkpointing that recomputes most; on a tiny copy every mode fits."""
SHORT = {
    "warmup_num_steps": 2,
    "cycle_first_step_size": 2,
    "cycle_second_step_size": 2,
    "decay_step_size": 1,
    "lr_range_test_step_size": 2,
}
"""Settings that step through each phase of a schedule in a few steps."""
RELEASED = [
    "zero_optimization.stage3_param_persistence_threshold=0",
    "zero_optimization.stage3_max_reuse_distance=0",
    "zero_optimization.stage3_prefetch_bucket_size=300",
]
"""Overrides by which ZeRO-3 releases and prefetches weights, as it does if a model is large."""
Change = tuple[list[str], list[str]]
"""Overrides of the config, and notes on what the user would not expect."""


@dataclass(frozen=True)
class Tiny:
    """The tiny run that is verified instead of the run itself."""

    config: Config
    layout: Layout
    changes: tuple[str, ...]
    """Notes on changes that the user would not expect."""
    steps: int
    """Steps with the config's schedule; PROBES follow, and between them a step that overflows."""
    own: Composed
    """The config in the run's own precision and steps: it decides the engine and the schedule."""
    request: Json
    """The config as it was given, with the overrides."""
    row: int = LONGEST
    """The tokens of the longest sample."""

    def noting(self, *notes: str) -> Tiny:
        """Return the same with more notes."""
        return replace(self, changes=(*self.changes, *notes))

    def with_blocks(self, blocks: Sequence[str]) -> Tiny:
        """Return the same for a model of these blocks: if there are none, "auto" takes "none"."""
        if blocks or at(self.request, RECOMPUTE) != AUTO:
            return self
        reason = "none, as the model has no blocks"
        config = recomputing(self.config, "none", reason)
        layout = replace(self.layout, recompute=replace(self.layout.recompute, mode="none"))
        notes = tuple(note for note in self.changes if not note.startswith(RECOMPUTE))
        without = replace(self, config=config, layout=layout, changes=notes)
        return without.noting(recompute_note(reason))

    @property
    def packed(self) -> bool:
        """True if a sample may have several documents that are not to attend to one another."""
        return self.config.trainer.data.packs

    @property
    def low_precision(self) -> bool:
        return self.layout.precision != "float32"

    @property
    def middle(self) -> int:
        """The number of steps before the checkpoint."""
        return self.steps - 1

    @property
    def overflow_step(self) -> int:
        return self.steps + 1

    @property
    def total(self) -> int:
        return self.steps + PROBES + 1

    @property
    def held_out(self) -> int:
        """The number of evaluated samples: one more than a micro-batch on each data rank."""
        return self.layout.micro_batch * self.layout.data_ranks + 1


def tiny_run(
    path: str | Path | Json,
    overrides: list[str],
    world_size: int | None,
    precision: str = "float32",
) -> Tiny:
    """Shrink a config to a few tiny steps on `world_size` processes; None: the fewest that suffice.

    The steps are in float32 or, if `precision` is "config", in the config's own precision. Raises
    ConfigError for an unfit config, and for an optimizer without a reference in PyTorch.
    """
    config = given = load(path, overrides)
    world_size = world_size or smallest_world(config)
    steps = 3 if config.scheduler is None else 5
    run_steps = config.trainer.steps or UNKNOWN_STEPS
    sized, notes = _sized(config, world_size, steps)
    if config.trainer.activation_checkpointing == AUTO:
        sized.append(f"{RECOMPUTE}={MOST}")
        notes.append(
            f'{RECOMPUTE}="{MOST}" in place of "auto", which may take a mode that does less'
        )
    gpu = config.trainer.device != "cpu"
    small = [*overrides, *sized]
    facts = RuntimeFacts(world_size, HIDDEN, run_steps, gpu, "cuda" if gpu else "cpu")
    own = compose(load(path, small), facts)
    for more, lines in (_in_precision(config, precision), _in_steps(config, steps, run_steps)):
        small += more
        notes += lines
    if config.settings.get("zero_optimization", {}).get("stage") == 3:
        small += RELEASED
    if config.trainer.tiled_mlp:
        small.append(f"trainer.tiled_mlp={min(TILE, config.trainer.tiled_mlp)}")
    if config.trainer.float8 != "none":
        if installed("torchao"):
            notes.append("float8 emulated, in layers of any size; its rounding is measured")
        else:
            small += ["trainer.float8=none", "trainer.float8_head=false"]
            notes.append("products in the run's precision: torchao is not installed")
    facts = RuntimeFacts(world_size, HIDDEN, steps, False, "cpu")
    composed = compose(load(path, small), facts)
    config = composed.config
    layout = composed.layout
    if isinstance(reason := in_torch(config.settings, layout, "cpu", grouped=True), No):
        expected = "one with a reference in PyTorch"
        raise ConfigError(Problem("optimizer", config.optimizer.type, expected, reason))
    return Tiny(config, layout, tuple(notes), steps, own, given.raw)


def _sized(config: Config, world_size: int, steps: int) -> Change:
    """Return the change to `steps` steps of few samples."""
    local = local_world_size(config, world_size)
    sizes = mesh_sizes(config, world_size, local)
    options = config.trainer
    accumulation = ACCUMULATION
    if sizes.pipeline > 1:  # as many micro-batches as any schedule needs
        stages = PIPELINE_SCHEDULES[options.pipeline_schedule].stages_per_rank
        accumulation = max(accumulation, sizes.pipeline * stages)
    notes = [
        f"{steps} steps of {MICRO_BATCH} x {accumulation} samples a data rank, then {PROBES} at "
        f"learning rate {PROBE_RATE}, between them one that overflows"
    ]
    small = [
        f"train_micro_batch_size_per_gpu={MICRO_BATCH}",
        f"gradient_accumulation_steps={accumulation}",
        f"train_batch_size={MICRO_BATCH * accumulation * sizes.data_ranks}",
        "trainer.patience=null",  # its seconds were set for the run's own steps
    ]
    if sizes.data_ranks < DATA_RANKS:
        notes.append(f"{sizes.data_ranks} data ranks, not {DATA_RANKS}: it proves less")
    if options.mesh.shard == "node":
        small.append(f"trainer.mesh.shard={sizes.shard}")
        notes.append(f"nodes of {local} processes")
    return small, notes


def _in_precision(config: Config, precision: str) -> Change:
    """Return the change of precision; "auto" means what it does on a GPU with bfloat16."""
    small = list[str]()
    notes = list[str]()
    for section in ("bf16", "fp16"):
        enabled = config.settings.get(section, {}).get("enabled")
        if enabled not in (True, "auto"):
            continue
        if precision == "float32" or (section, enabled) == ("fp16", "auto"):
            notes.append(f"float32 in place of {section}")
            small.append(f"{section}.enabled=false")
            continue
        small.append(f"{section}.enabled=true")
        if section == "fp16":  # at the default of 2^16 the first steps would be skipped
            small.append("fp16.initial_scale_power=8")
    reduced = config.settings.get("communication_data_type")
    if config.settings.get("bf16", {}).get("bf16_master_weights_and_grads") is True:
        small += ["bf16.bf16_optimizer_states=false", "bf16.bf16_master_weights_and_grads=false"]
        small.append("data_types.grad_accum_dtype=null")  # that of bfloat16 alone
        notes.append("float32 weights and optimizer state in place of bfloat16 alone")
    if reduced in ("bf16", "fp16") and f"{reduced}.enabled=true" not in small:
        notes.append(f"gradients reduced in float32 in place of {reduced}")
        small.append("communication_data_type=fp32")
    return small, notes


def _in_steps(config: Config, steps: int, run_steps: int) -> Change:
    """Return the change that fits a schedule into `steps` steps, with all its phases."""
    scheduler: Choice | None = config.scheduler
    if scheduler is None:
        return [], []
    known = SCHEDULERS[scheduler.type]
    long = {"warmup_num_steps", "cycle_first_step_size", "lr_range_test_step_size"} & {*known}
    used = [key for key in SHORT if key in long or scheduler.params.get(key)]
    lengths = {key: SHORT[key] for key in used}
    if "total_num_steps" in known:
        lengths["total_num_steps"] = steps
    small = [f"scheduler.params.{key}={length}" for key, length in lengths.items()]
    as_if = "" if config.trainer.steps else ", as if the data were that long"
    note = f"the schedule {scheduler.type} in {steps} steps; as a function in {run_steps:,}{as_if}"
    return [*small, "trainer.warmup_ratio=null"], [note]


def local_world_size(config: Config, world_size: int) -> int:
    """Return the processes on a node: half of all if the mesh shards by node, else all."""
    return max(1, world_size // 2) if config.trainer.mesh.shard == "node" else world_size


def smallest_world(config: Config) -> int:
    """Find the fewest processes, up to LARGEST_WORLD, for which every axis that the config uses is
    larger than 1.

    Prefers DATA_RANKS data ranks, and differing numbers of replicas and shards. Raises ConfigError
    if none fits.
    """
    mesh = config.trainer.mesh
    worlds = dict[int, int]()
    by_node = mesh.shard == "node"
    for world_size in range(2, LARGEST_WORLD + 1):
        try:
            sizes = mesh_sizes(config, world_size, local_world_size(config, world_size))
        except ConfigError:
            continue
        lone = sizes.data_ranks == 1 and sizes.pipeline * sizes.tensor == 1
        lacks_replicas = (mesh.replicate == -1 or by_node) and sizes.replicate < 2
        lacks_shards = (mesh.shard == -1 or by_node) and sizes.shard < 2
        uneven = config.trainer.float8 == "tensorwise" and sizes.shard % 2 > 0
        if lone or lacks_replicas or lacks_shards or uneven:
            continue
        unequal = sizes.replicate != sizes.shard or sizes.data_ranks == 1
        worlds.setdefault(2 * min(sizes.data_ranks, DATA_RANKS) + unequal, world_size)
    if worlds:
        return worlds[max(worlds)]
    actual = f"no number of processes up to {LARGEST_WORLD} fits its mesh"
    hint = "Override trainer.mesh with smaller sizes"
    raise ConfigError(Problem("--world-size", actual, "one that does", hint))


def clipping(small: Tiny, norms: Sequence[float]) -> Tiny:
    """Set the clipping limit, if there is one, between the two neighbours with the largest ratio.

    `norms` has the gradient norm of each step; neighbours are adjacent when it is sorted.
    """
    settings = small.config.settings
    if not float(settings.get("gradient_clipping", 0.0)):
        return small
    apart = [(low, high) for low, high in pairwise(sorted(norms)) if high > APART * low > 0]
    if not apart:
        note = "all its steps have one gradient norm, on one side of the limit: it proves less"
        return small.noting(note)
    low, high = max(apart, key=lambda pair: pair[1] / pair[0])
    limit = sqrt(low * high)
    over = " and ".join(str(step) for step, norm in enumerate(norms) if norm > limit)
    under = " and ".join(str(step) for step, norm in enumerate(norms) if not norm > limit)
    config = replace(small.config, settings={**settings, "gradient_clipping": limit})
    return replace(small, config=config).noting(
        f"gradient_clipping {limit:.4g}: over it in step {over}, under it in step {under}"
    )


def engine_of(small: Tiny, device: str, spec: ModelSpec | None = None) -> str:
    """Choose the run's own engine, one that can train the model of `spec`.

    In float32 "auto" may choose another. Raises ConfigError.
    """
    from trainer.run.engine_choice import choice_of  # it imports all engines

    own = small.own.knowing(device=device)
    wanted: str = small.config.trainer.engine
    if wanted == "auto":
        wanted = choice_of(own, spec=spec).name
    tiny = replace(own, config=small.config, layout=small.layout)
    return choice_of(tiny, wanted, spec).name
