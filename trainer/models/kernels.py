"""The kernels that a config may name: those of PyTorch and transformers, and no others."""

from __future__ import annotations

from collections.abc import Iterator

from transformers import PreTrainedConfig

from trainer.errors import ConfigError, Problem

NAMES = {
    "attn_implementation": (
        *("eager", "sdpa", "flex_attention"),
        *("flash_attention_2", "flash_attention_3", "flash_attention_4"),
    ),
    "experts_implementation": ("eager", "batched_mm", "grouped_mm"),
}
"""The implementations in transformers; any other name is a repository of compiled code to load."""


def check_kernels(config: PreTrainedConfig, place: str) -> None:
    """Raise ConfigError for a kernel that is not in NAMES, in the config or in one of its parts."""
    for part in _parts(config):
        for key, known in NAMES.items():
            value = getattr(part, f"_{key}", None)
            if value is not None and value not in known:
                seen = f"{key} {str(value)!r:.100}, whose code would be fetched and run"
                raise ConfigError(Problem(place, seen, f"none, or one of {', '.join(known)}"))


def _parts(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    yield config
    for value in vars(config).values():
        if isinstance(value, PreTrainedConfig):
            yield from _parts(value)
