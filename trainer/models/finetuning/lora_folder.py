"""An existing adapter, in a folder that PEFT or a run wrote: what `trainer.adapter.path` starts
from.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from trainer.config.grammar import show
from trainer.config.sections import AdapterSection
from trainer.errors import ConfigError, Problem, first_line, listed
from trainer.storage import parse_json, read_file

CONFIG, STEM = "adapter_config.json", "adapter_model"
PLACE = "trainer.adapter.path"
_SAME = {
    "r": "r",
    "alpha": "lora_alpha",
    "targets": "target_modules",
    "bias": "bias",
    "modules_to_save": "modules_to_save",
    "rslora": "use_rslora",
    "dora": "use_dora",
}
"""Our keys that define an adapter -> PEFT's keys."""
_HARMLESS = {
    *(
        "task_type",
        "auto_mapping",
        "peft_version",
        "base_model_name_or_path",
        "revision",
        "inference_mode",
    ),
    *("lora_dropout", "fan_in_fan_out", "init_lora_weights", "qalora_group_size", "megatron_core"),
}
"""PEFT's keys that do not define an adapter, or that follow from the base."""


def completed(options: AdapterSection) -> AdapterSection:
    """Return the section filled in from its folder's adapter; the section itself if it names no
    folder.

    Raises ConfigError if the folder holds no LoRA adapter or one of an unsupported kind, and if a
    key of the section contradicts it.
    """
    if options.path is None:
        return options
    from peft import LoraConfig

    folder = Path(options.path)
    given = _read(folder / CONFIG)
    default = LoraConfig().to_dict()
    strange = [
        f"{key} {show(value)}"
        for key, value in given.items()
        if key not in _HARMLESS
        and key not in _SAME.values()
        and (value or None) != (default.get(key) or None)
    ]
    if not isinstance(given.get("target_modules"), list):
        strange.append(f"target_modules {show(given.get('target_modules'))}")
    if strange:
        expected = "LoRA with the keys of trainer.adapter"
        raise ConfigError(
            Problem(
                f"{PLACE}: {folder / CONFIG}", listed(strange), expected, "Merge it into its base."
            )
        )
    found = {ours: given.get(theirs, default[theirs]) for ours, theirs in _SAME.items()}
    found |= {"modules_to_save": found["modules_to_save"] or [], "alpha": float(found["alpha"])}
    plain = AdapterSection()
    others = [
        Problem(
            f"trainer.adapter.{key}",
            f"saw {show(mine)}",
            f"{show(value)}, as in {folder / CONFIG}",
            "Leave it out.",
        )
        for key, value in found.items()
        if not _alike(mine := getattr(options, key), value)
        and not _alike(mine, getattr(plain, key))
    ]
    if others:
        raise ConfigError(*others)
    return options.model_copy(update=found)


class Started:
    """The values of an existing adapter, by the names in its file."""

    def __init__(self, folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise ConfigError unless the file has exactly the tensors that the model learns, of these
        shapes.
        """
        self._file = folder / f"{STEM}.safetensors"
        found = self._shapes()
        missing, more = sorted(shapes.keys() - found.keys()), sorted(found.keys() - shapes.keys())
        other = [
            name for name in sorted(shapes.keys() & found.keys()) if shapes[name] != found[name]
        ]
        seen = [
            *([f"{len(missing)} tensors are not there ({missing[0]}, ...)"] if missing else []),
            *([f"{len(more)} have no place in the model ({more[0]}, ...)"] if more else []),
            *(
                [f"{other[0]} is {list(found[other[0]])} and not {list(shapes[other[0]])}"]
                if other
                else []
            ),
        ]
        if seen:
            expected = "an adapter of this base: trainer.model.name_or_path"
            raise ConfigError(Problem(f"{PLACE}: {self._file}", "; ".join(seen), expected))

    def read(self, name: str) -> torch.Tensor:
        with safe_open(self._file, "pt") as file:
            return file.get_tensor(name)  # type: ignore[no-any-return]

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        try:
            with safe_open(self._file, "pt") as file:
                return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise ConfigError(
                Problem(f"{PLACE}: {self._file}", first_line(error), "the adapter's safetensors")
            ) from error


def _read(path: Path) -> dict[str, Any]:
    expected = "the folder of a LoRA adapter, as PEFT writes it: final/ of a run"
    try:
        given = parse_json(read_file(path))
    except (OSError, ValueError) as error:
        raise ConfigError(Problem(f"{PLACE}: {path}", first_line(error), expected)) from error
    if not isinstance(given, dict) or given.pop("peft_type", None) != "LORA":
        raise ConfigError(Problem(f"{PLACE}: {path}", "no adapter of the type LORA", expected))
    return given


def _alike(mine: Any, theirs: Any) -> bool:
    """Return True if two values are equal; lists, which name modules, in any order."""
    return (
        sorted(mine) == sorted(theirs)
        if isinstance(mine, list) and isinstance(theirs, list)
        else mine == theirs
    )
