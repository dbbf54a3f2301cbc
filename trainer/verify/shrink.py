"""A config made small enough to verify in a minute, and the samples that it is verified on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trainer.config import Config, Facts, load, mesh_sizes, resolve
from trainer.errors import ConfigError, Problem
from trainer.layout import SCHEDULES, Layout, layout_of
from trainer.models.shrink import SIZES, VOCABULARY
from trainer.optimizers import OPTIMIZERS

MICRO_BATCH, ACCUMULATION, STEPS, LONGEST = 2, 2, 4, 13
LARGEST_WORLD = 8


@dataclass(frozen=True)
class Small:
    """What is verified instead of the run itself."""

    config: Config
    layout: Layout
    changes: tuple[str, ...]
    """What was changed that a person would not expect."""


def shrink(path: str, overrides: list[str], world_size: int | None) -> Small:
    """The config at `path` for a few tiny steps in float32. Raises ConfigError."""
    config = load(path, overrides)
    world_size = world_size or smallest_world(config)
    if config.optimizer.type.lower() not in OPTIMIZERS:
        raise ConfigError(
            Problem(
                "optimizer.type", config.optimizer.type, f"one with a reference in PyTorch: {', '.join(OPTIMIZERS)}"
            )
        )
    sizes = mesh_sizes(config, world_size)
    schedule = SCHEDULES[config.trainer.pipeline_schedule]
    # as many micro-batches as any schedule needs
    accumulation = max(ACCUMULATION, sizes.pipeline * schedule.stages_per_rank if sizes.pipeline > 1 else 1)
    changes = [f"{STEPS} steps of {MICRO_BATCH} x {accumulation} samples a data rank"]
    small = [
        f"train_micro_batch_size_per_gpu={MICRO_BATCH}",
        f"gradient_accumulation_steps={accumulation}",
        f"train_batch_size={MICRO_BATCH * accumulation * sizes.data_ranks}",
    ]
    for section in ("bf16", "fp16"):
        if config.settings.get(section, {}).get("enabled") in (True, "auto"):
            small.append(f"{section}.enabled=false")
            changes.append(f"float32 in place of {section}")
    if config.settings.get("zero_optimization", {}).get("stage") == 3:
        small.append("zero_optimization.stage3_param_persistence_threshold=0")
    if config.optimizer.type.lower() != "sgd":
        small.append("optimizer.params.eps=1e-3")
        changes.append("Adam's eps is 1e-3, so that rounding of tiny gradients is not blown up")
    config = load(path, [*overrides, *small])
    config = resolve(config, Facts(world_size, SIZES["hidden_size"], 100, False, "cpu"))
    return Small(config, layout_of(config, world_size), tuple(changes))


def smallest_world(config: Config) -> int:
    """The fewest processes, up to LARGEST_WORLD, on which every axis that the config uses is there."""
    mesh = config.trainer.mesh
    for world_size in range(2, LARGEST_WORLD + 1):
        try:
            sizes = mesh_sizes(config, world_size)
        except ConfigError:
            continue
        if sizes.data_ranks == 1 and sizes.pipeline * sizes.tensor == 1:
            continue
        if (mesh.replicate == -1 and sizes.replicate < 2) or (mesh.shard == -1 and sizes.shard < 2):
            continue
        return world_size
    seen = f"no number of processes up to {LARGEST_WORLD} fits its mesh"
    raise ConfigError(Problem("--world-size", seen, "one that does", "Override trainer.mesh with smaller sizes"))


def batch(layout: Layout, step: int, data_rank: int) -> list[list[dict[str, np.ndarray]]]:
    """This data rank's samples of a step, [accumulation][micro-batch]: ragged, with very unequal target counts."""
    rng = np.random.default_rng(step)
    samples: list[dict[str, np.ndarray]] = []
    for index in range(layout.train_batch):
        length = int(rng.integers(3, LONGEST))
        ids = rng.integers(1, VOCABULARY, length + 1)
        targets = ids[1:].astype(np.int64)
        targets[: length - 1 if index % 3 == 0 else int(rng.integers(0, 2))] = -100
        samples.append({"input_ids": ids[:-1].astype(np.int32), "targets": targets})
    starts = [(m * layout.data_ranks + data_rank) * layout.micro_batch for m in range(layout.accumulation)]
    return [samples[start : start + layout.micro_batch] for start in starts]
