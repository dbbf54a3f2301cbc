"""A config made small enough to verify in a minute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import sqrt
from pathlib import Path
from typing import Any

from trainer.config import Choice, Config, RuntimeFacts, load, mesh_sizes
from trainer.config.keys import SCHEDULERS
from trainer.errors import ConfigError, Problem
from trainer.layout import PIPELINE_SCHEDULES, Layout
from trainer.models.tiny_config import HIDDEN
from trainer.optim.recipes import No, in_torch
from trainer.run.compose import Composed, compose

MICRO_BATCH, ACCUMULATION, DATA_RANKS = 2, 3, 3
"""The sizes of the small run: with only 2 of the last two, a mean over the wrong one of two groups
is right.
"""
LONGEST = 28
"""The tokens of all samples but one: more than three windows of the small copy's attention."""
LARGEST_WORLD = 8
CLIPPED_STEPS = 3
"""The number of steps whose norms one process computes beforehand."""
APART = 1.01
"""The ratio of two norms at which a limit between them surely separates those of the run."""
UNKNOWN_STEPS = 1000
"""The steps compared for a run that is as long as its data."""
PROBES, PROBE_RATE = 2, 1e-2
"""Steps at the end, at a rate at which all that an optimizer does shows in float32: at 1e-7
rounding hides decay.
"""
SHORT = {
    "warmup_num_steps": 2,
    "cycle_first_step_size": 2,
    "cycle_second_step_size": 2,
    "decay_step_size": 1,
}
SHORT |= {"lr_range_test_step_size": 2}
"""Settings that step through each phase of a schedule in a few steps."""


@dataclass(frozen=True)
class Tiny:
    """The tiny run that is verified instead of the run itself."""

    config: Config
    layout: Layout
    changes: tuple[str, ...]
    """Notes on changes that the user would not expect."""
    steps: int
    """Steps with the config's own schedule; PROBES follow, and between them a step that
    overflows.
    """
    own: Composed
    """The config in the precision and with the steps of the run itself, for its engine and
    schedule.
    """
    row: int = LONGEST
    """The tokens of the longest sample."""

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
        """The number of evaluated samples, which differs between ranks."""
        return self.layout.micro_batch * self.layout.data_ranks + 1


def tiny_run(
    path: str | Path | dict[str, Any],
    overrides: list[str],
    world_size: int | None,
    precision: str = "float32",
) -> Tiny:
    """Shrink the config at `path` to a few tiny steps, in float32 or, if `precision` is "config",
    in its own precision.

    Raises ConfigError.
    """
    config = load(path, overrides)
    world_size = world_size or smallest_world(config)
    sizes = mesh_sizes(config, world_size, local_world_size(config, world_size))
    options = config.trainer
    schedule = PIPELINE_SCHEDULES[options.pipeline_schedule]
    # as many micro-batches as any schedule needs
    accumulation = max(
        ACCUMULATION, sizes.pipeline * schedule.stages_per_rank if sizes.pipeline > 1 else 1
    )
    steps = 3 if config.scheduler is None else 5
    batch = f"{MICRO_BATCH} x {accumulation} samples a data rank"
    changes = [
        (
            f"{steps} steps of {batch}, then {PROBES} at learning rate {PROBE_RATE}, between them "
            "one "
            "that overflows"
        )
    ]
    if sizes.data_ranks < DATA_RANKS:
        changes.append(f"{sizes.data_ranks} data ranks, not {DATA_RANKS}: it proves less")
    small = [
        f"train_micro_batch_size_per_gpu={MICRO_BATCH}",
        f"gradient_accumulation_steps={accumulation}",
        f"train_batch_size={MICRO_BATCH * accumulation * sizes.data_ranks}",
        "trainer.patience=null",  # it was set for the run's steps on its devices
    ]
    if config.trainer.mesh.shard == "node":
        small.append(f"trainer.mesh.shard={sizes.shard}")
        changes.append(f"nodes of {local_world_size(config, world_size)} processes")
    gpu = config.trainer.device != "cpu"
    run_steps = options.steps or UNKNOWN_STEPS
    own = compose(
        load(path, [*overrides, *small]),
        RuntimeFacts(world_size, HIDDEN, run_steps, gpu, "cuda" if gpu else "cpu"),
    )
    for section in ("bf16", "fp16"):
        if (enabled := config.settings.get(section, {}).get("enabled")) in (True, "auto"):
            small += _precision(section, enabled, precision, changes)
    if config.settings.get("zero_optimization", {}).get("stage") == 3:
        # weights are released and prefetched, as those of a model that is not tiny
        zero = {
            "param_persistence_threshold": 0,
            "max_reuse_distance": 0,
            "prefetch_bucket_size": 300,
        }
        small += [f"zero_optimization.stage3_{key}={value}" for key, value in zero.items()]
    if config.scheduler is not None:
        small += [*_short(config.scheduler, steps), "trainer.warmup_ratio=null"]
        known = "" if options.steps else ", as if the data were that long"
        changes.append(
            f"the schedule {config.scheduler.type} in {steps} steps; as a function in "
            f"{run_steps:,}{known}"
        )
    config = load(path, [*overrides, *small])
    composed = compose(config, RuntimeFacts(world_size, HIDDEN, steps, False, "cpu"))
    config = composed.config
    if isinstance(reason := in_torch(config.settings, composed.layout, "cpu", grouped=True), No):
        raise ConfigError(
            Problem("optimizer", config.optimizer.type, "one with a reference in PyTorch", reason)
        )
    return Tiny(config, composed.layout, tuple(changes), steps, own)


def _precision(section: str, enabled: bool | str, precision: str, changes: list[str]) -> list[str]:
    """Return overrides of the precision; "auto" means what it would on a capable GPU."""
    if precision == "float32" or (section, enabled) == ("fp16", "auto"):
        changes.append(f"float32 in place of {section}")
        return [f"{section}.enabled=false"]
    # at the default of 2^16 the first steps would be skipped
    return [
        f"{section}.enabled=true",
        *(["fp16.initial_scale_power=8"] if section == "fp16" else []),
    ]


def _short(scheduler: Choice, steps: int) -> list[str]:
    """Return overrides that fit a schedule into so many steps, with all its phases."""
    known = SCHEDULERS[scheduler.type]
    long = {"warmup_num_steps", "cycle_first_step_size", "lr_range_test_step_size"} & {*known}
    lengths = {
        key: steps for key, steps in SHORT.items() if key in long or scheduler.params.get(key)
    }
    lengths |= {"total_num_steps": steps} if "total_num_steps" in known else {}
    return [f"scheduler.params.{key}={length}" for key, length in lengths.items()]


def local_world_size(config: Config, world_size: int) -> int:
    """Return the processes of a node: half of all for a mesh laid out by nodes, as if there were
    two.
    """
    return max(1, world_size // 2) if config.trainer.mesh.shard == "node" else world_size


def smallest_world(config: Config) -> int:
    """Find the fewest processes, up to LARGEST_WORLD, for which every axis that the config uses is
    larger than 1.

    Prefers DATA_RANKS data ranks, and differing numbers of replicas and shards. Raises ConfigError
    if none fits.
    """
    mesh, found = config.trainer.mesh, dict[int, int]()
    for world_size in range(2, LARGEST_WORLD + 1):
        try:
            sizes = mesh_sizes(config, world_size, local_world_size(config, world_size))
        except ConfigError:
            continue
        if sizes.data_ranks == 1 and sizes.pipeline * sizes.tensor == 1:
            continue
        by_node = mesh.shard == "node"
        if (mesh.replicate == -1 or by_node) and sizes.replicate < 2:
            continue
        if (mesh.shard == -1 or by_node) and sizes.shard < 2:
            continue
        unequal = sizes.replicate != sizes.shard or sizes.data_ranks == 1
        found.setdefault(2 * min(sizes.data_ranks, DATA_RANKS) + unequal, world_size)
    if found:
        return found[max(found)]
    seen = f"no number of processes up to {LARGEST_WORLD} fits its mesh"
    raise ConfigError(
        Problem("--world-size", seen, "one that does", "Override trainer.mesh with smaller sizes")
    )


def clipping(small: Tiny, norms: Sequence[float]) -> Tiny:
    """Set the limit between the two adjacent `norms` that are furthest apart, if the config has
    one.
    """
    settings = small.config.settings
    if not float(settings.get("gradient_clipping", 0.0)):
        return small
    low, high = max(pairwise(sorted(norms)), key=lambda pair: pair[1] / pair[0])
    if not high > APART * low:
        less = (
            "all its steps have one gradient norm, which is over the limit or under it: it "
            "proves less"
        )
        return replace(small, changes=(*small.changes, less))
    limit = sqrt(low * high)

    def steps(over: bool) -> str:
        return " and ".join(str(i) for i, norm in enumerate(norms) if (norm > limit) is over)

    said = (
        f"gradient_clipping {limit:.4g}: over it in step {steps(True)}, under it in step "
        f"{steps(False)}"
    )
    config = replace(small.config, settings={**settings, "gradient_clipping": limit})
    return replace(small, config=config, changes=(*small.changes, said))
