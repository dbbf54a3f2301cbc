"""The config of a Hugging Face model: as `trainer.model` states it, or as its folder does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from transformers import AutoConfig, PreTrainedConfig

from trainer.errors import ConfigError, Problem, refused
from trainer.models.door import (
    BUILD_MEMORY,
    BUILD_SECONDS,
    CHECK_PATH,
    HUB_TRIED,
    bounded,
    check_counts,
    check_folder,
    check_name,
    opening,
)
from trainer.models.pretrained import quantised
from trainer.models.tiny_config import KEPT, tiny_config
from trainer.storage import Json, parse_json, read_file

if TYPE_CHECKING:
    from trainer.config.sections.model_and_data import ModelSection

EMBEDDED: Json = {
    "model_type": "llama",
    "vocab_size": 4096,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "initializer_range": 0.06,  # the usual 0.02 is for wider models: 1 / sqrt(128) is 0.09
    "tie_word_embeddings": True,
}
"""The config used when no model is named: 1.3 million parameters, for the embedded tokenizer."""

NAMES = {
    "attn_implementation": (
        *("eager", "sdpa", "flex_attention"),
        *("flash_attention_2", "flash_attention_3", "flash_attention_4"),
    ),
    "experts_implementation": ("eager", "batched_mm", "grouped_mm"),
}
"""The implementations in transformers; any other name is a repository of compiled code to load."""


def pretrained_blocks(options: ModelSection, layers: int, blocks: int) -> PreTrainedConfig:
    """Return a base's config, from its folder, with the first `layers` of its `blocks` alone.

    A quantised base keeps its `quantization_config`, which then says to dequantise it.
    """
    config = pretrained_config(options)
    stored = quantised.stored_config(config)
    quantised.remove_config(config)
    kept: PreTrainedConfig = tiny_config(config, KEPT, range(layers), blocks)
    if stored is not None:
        kept.update({quantised.KEY: {**stored, "dequantize": True}})
    return kept


def read_config(options: ModelSection) -> PreTrainedConfig:
    """Read and check the architecture of `trainer.model`; it is not built. Raises ConfigError."""
    if options.name_or_path is not None:
        config = pretrained_config(options)
        quantised.remove_config(config)
        return config
    values = EMBEDDED if options.config is None else stated(options.config)
    place = "trainer.model.config"
    if isinstance(options.config, str):
        place = f"{place}: {options.config}"
    if "model_type" not in values:
        expected = 'an architecture, such as "model_type": "llama"'
        raise ConfigError(Problem(place, "no model_type", expected))
    check_counts(values, place)
    # transformers raises errors of many kinds for a bad value
    with opening(place, "a config that transformers accepts"), bounded(BUILD_MEMORY, BUILD_SECONDS):
        config = AutoConfig.for_model(**values)
    quantised.remove_config(config)
    check_kernels(config, place)
    return config


def stated(config: Json | str | None) -> Json:
    """Return what `trainer.model.config`, an object or a file, states of a new model.

    Raises ConfigError for a file that has no JSON object.
    """
    return _read_json(Path(config)) if isinstance(config, str) else config or {}


def state_vocabulary(model: Json, rows: int) -> None:
    """Set the vocabulary size of a new model, in place, to `rows` if `trainer.model` states none.

    Raises ConfigError as `stated` does.
    """
    if model["name_or_path"] is None:
        own = stated(model["config"])
        model["config"] = {"vocab_size": rows, **own} if own else {**EMBEDDED, "vocab_size": rows}


def pretrained_config(options: ModelSection) -> PreTrainedConfig:
    """Read and check the config of `trainer.model.name_or_path`. Raises ConfigError."""
    name = options.name_or_path
    assert name is not None
    place = f"trainer.model.name_or_path: {options.name_or_path}"
    folder = Path(name)
    expected = "a folder that save_pretrained wrote"
    check_name(name, place)
    check_folder(folder)
    if folder.is_dir() and not (folder / "config.json").is_file():
        actual = "no config.json in it"
        hint = ""
        if (folder / "adapter_config.json").is_file():
            actual = "an adapter, which is no model by itself"
            hint = "Name its base, or the model that it was merged into (trainer.adapter.merge)."
        raise ConfigError(Problem(place, actual, expected, hint))
    # network, JSON and value errors alike
    expected = "a folder or hub id that transformers opens"
    start = "" if folder.is_dir() else HUB_TRIED
    hint = "" if folder.is_dir() else CHECK_PATH
    with opening(place, expected, start, hint), bounded(BUILD_MEMORY, BUILD_SECONDS):
        config = AutoConfig.from_pretrained(name, **_source(options))
    check_kernels(config, place)
    return config


def _source(options: ModelSection) -> Json:
    return {"revision": options.revision, "trust_remote_code": options.trust_remote_code}


def _read_json(path: Path) -> Json:
    place = f"trainer.model.config: {path}"
    with refused(place, "a JSON file", OSError, ValueError):
        values = parse_json(read_file(path))
    if not isinstance(values, dict):
        raise ConfigError(Problem(place, type(values).__name__, "a JSON object"))
    return values


def check_kernels(config: PreTrainedConfig, place: str) -> None:
    """Raise ConfigError for a kernel that is not in NAMES, in the config or in one of its parts."""
    for part in _parts(config):
        for key, known in NAMES.items():
            value = getattr(part, f"_{key}", None)
            if value is not None and value not in known:
                actual = f"{key} {str(value)!r:.100}, whose code would be fetched and run"
                raise ConfigError(Problem(place, actual, f"none, or one of {', '.join(known)}"))


def _parts(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    yield config
    for value in vars(config).values():
        if isinstance(value, PreTrainedConfig):
            yield from _parts(value)
