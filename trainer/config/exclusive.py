"""Keys that exclude one another: the command line takes precedence over the file."""

from __future__ import annotations

from collections.abc import Sequence

from trainer.config.grammar import AUTO, show
from trainer.config.keys import OFFLOADS, RENAMED, ZERO
from trainer.config.read import Json, at

BATCH, MICRO, ACCUMULATION = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
WARMUP = "scheduler.params.warmup_num_steps"
OLD_NAMES = RENAMED | {ZERO + old: ZERO + new for old, new in OFFLOADS.items()}
GROUPS = (
    ("trainer.steps", "trainer.epochs"),
    ("trainer.model.name_or_path", "trainer.model.config"),
    ("trainer.data.path", "trainer.data.sources"),
    ("trainer.warmup_ratio", WARMUP),
    ("trainer.mesh.shard", "zero_optimization.mics_shard_size"),
    ("fp16.enabled", "bf16.enabled"),
    (ACCUMULATION, MICRO, BATCH),  # the batch stays unless both of the others are given
    *OLD_NAMES.items(),
)
"""Groups of keys that can't all be given; of those in the file, the first gives way."""


def give_way(raw: Json, overridden: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Remove from `raw` the file's values that contradict the command line; return their origins and notes."""
    origins, notes = {}, []
    for group in GROUPS:
        values = {path: at(raw, path) for path in group}
        said = {path: value for path, value in values.items() if value not in (None, AUTO, []) and value is not False}
        line = [path for path in said if any(_within(path, over) or _within(over, path) for over in overridden)]
        loser = next((path for path in group if path not in line), None)
        together = "model" in group[0] and at(raw, "trainer.task") == "image_classification"
        if len(said) < len(group) or together or not line or loser is None:
            continue
        section, _, name = loser.rpartition(".")
        del at(raw, section)[name]
        if loser == WARMUP:
            at(raw, section)[name] = AUTO  # the ratio decides it
        winner = f"{' and '.join(line)} on the command line"
        origins[loser] = f"auto: the file's {show(said[loser])} gives way to {winner}"
        notes.append(f"{loser} {show(said[loser])} in the file gives way to {winner}")
    return origins, notes


def _within(path: str, section: str) -> bool:
    return f"{path}.".startswith(f"{section}.")
