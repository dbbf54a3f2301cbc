"""The problems of keys that are unknown, or whose value does not fit, with hints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher, get_close_matches
from types import MappingProxyType

from trainer.config.keys.key import Key, Table
from trainer.errors import Problem, show


def unknown(
    path: str,
    value: object,
    known: Sequence[str],
    useless: Mapping[str, str] = MappingProxyType({}),
) -> Problem:
    """Build the problem of a key that is not in the table, with the nearest of the `known` paths.

    `useless` has the known paths that must not be suggested, each with the reason.
    """
    section = path.rpartition(".")[0]
    where = f'the section "{section}"' if section else "the top level"
    expected = f"a known key of {where}"
    hint = _hint(path, known, useless)
    return Problem(path, f"saw {show(value)}", expected, hint)


def useless(table: Table) -> dict[str, str]:
    """Return the reason for each key that has no effect or is refused, itself or by its section."""
    why = {path: key.refused or key.idle for path, key in table.items() if key.refused or key.idle}
    for path in table:
        section = path.rpartition(".")[0]
        if section in why:
            why.setdefault(path, why[section])
    return why


def _hint(path: str, known: Sequence[str], useless: Mapping[str, str]) -> str:
    section, _, name = path.rpartition(".")
    if not known or len(name) > LONGEST_NAME:
        return "Remove it."
    if path in known:
        return "Write it as a section in a section, without the dot."
    siblings = {
        other.rpartition(".")[2]: other for other in known if other.rpartition(".")[0] == section
    }
    named = (other for other in known if other.rpartition(".")[2] == name)
    elsewhere = sorted({other for other in named if other not in useless}, key=_depth)
    if (other := OTHER_NAMES.get(name)) in known:
        elsewhere = [str(other)]
    near = get_close_matches(name, siblings, n=2, cutoff=0.5)
    if elsewhere or section in TRAINS_OTHERWISE:
        near = [other for other in near if _is_typo(name, other)]
    if near:
        likeness = {other: SequenceMatcher(None, name, other).ratio() for other in near}
        best = [other for other in near if likeness[other] == max(likeness.values())]
        if useful := [f'"{other}"' for other in best if siblings[other] not in useless]:
            return f"Did you mean {' or '.join(useful)}?"
        why = useless[siblings[best[0]]]
        return f'Remove it: "{best[0]}", which is like it, does nothing here ({why}).'
    return f"Did you mean {' or '.join(elsewhere)}?" if 1 <= len(elsewhere) <= 3 else "Remove it."


def _depth(path: str) -> tuple[int, str]:
    return path.count("."), path


def _is_typo(name: str, other: str) -> bool:
    """Return True if a name is a misspelling of another, and not a name of other words."""
    one = name.split("_")
    two = other.split("_")
    alike = len(one) == len(two) and all(
        SequenceMatcher(None, *pair).ratio() >= _TYPO for pair in zip(one, two, strict=True)
    )
    return alike or SequenceMatcher(None, "".join(one), "".join(two)).ratio() >= _SAME_LETTERS


def misfit(path: str, value: object, key: Key) -> Problem:
    """Build the problem of a value that its key does not accept."""
    huge = key.kind == "int" and isinstance(value, int) and value.bit_length() > 63
    return Problem(path, f"saw {show(value)}", key.expected + " in 64 bits" * huge)


_TYPO = 0.65
"""The least similarity of each word of a misspelt name, from 0 to 1."""
_SAME_LETTERS = 0.95
"""The least similarity of all letters of a name whose words are split elsewhere, from 0 to 1."""
TRAINS_OTHERWISE = ("optimizer.params", "scheduler.params")
"""Sections where another key would train differently: only corrected misspellings are suggested."""
OTHER_NAMES = {
    "adam_beta1": "optimizer.params.betas",
    "adam_beta2": "optimizer.params.betas",
    "adam_epsilon": "optimizer.params.eps",
    "batch_size": "train_batch_size",
    "dataset": "trainer.data.path",
    "eval_steps": "trainer.evaluation.every",
    "learning_rate": "optimizer.params.lr",
    "lora": "trainer.adapter",
    "peft": "trainer.adapter",
    "logging_steps": "trainer.log.every",
    "lora_alpha": "trainer.adapter.alpha",
    "lora_r": "trainer.adapter.r",
    "lr_scheduler_type": "scheduler.type",
    "max_grad_norm": "gradient_clipping",
    "max_length": "trainer.data.sequence_length",
    "max_seq_length": "trainer.data.sequence_length",
    "max_steps": "trainer.steps",
    "model_name_or_path": "trainer.model.name_or_path",
    "num_train_epochs": "trainer.epochs",
    "output_dir": "trainer.run.folder",
    "per_device_train_batch_size": "train_micro_batch_size_per_gpu",
    "save_steps": "trainer.checkpoint.every",
    "seq_length": "trainer.data.sequence_length",
    "warmup_steps": "scheduler.params.warmup_num_steps",
}
"""Other trainers' names for keys -> ours."""
LONGEST_NAME = 100
"""The most characters of a key's name for which similar keys are searched."""
