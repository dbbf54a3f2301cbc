"""The `config.json` of a base with what training changed in it, and nothing else."""

from __future__ import annotations

import json

import torch
from transformers import PreTrainedConfig

from trainer.models.pretrained.quantised import KEY
from trainer.storage import Json

NOT_ARCHITECTURE = ("_name_or_path", "architectures", "dtype", "transformers_version", "use_cache")
"""Config keys that may differ while the architecture is the same."""
TIES = "tie_word_embeddings"
_DTYPES = ("torch_dtype", "dtype")
"""The keys of a config's dtype, the older one first."""


def architecture(config: PreTrainedConfig) -> Json:
    """Return the part of a config that describes the architecture, as JSON values."""
    values = json.loads(config.to_json_string(use_diff=False))
    return {key: value for key, value in values.items() if key not in NOT_ARCHITECTURE}


def _set_dtype(values: Json, name: str) -> None:
    """Set the dtype of a config, and of its parts that state one."""
    for key, value in values.items():
        if key in _DTYPES and value is not None:
            values[key] = name
        elif isinstance(value, dict):
            _set_dtype(value, name)


def path_to_part(config: PreTrainedConfig, kind: type) -> tuple[str, ...] | None:
    """Return the keys that lead to the part of a config of the type `kind`; None if it has none."""
    if type(config) is kind:
        return ()
    for key, part in vars(config).items():
        if isinstance(part, PreTrainedConfig) and (below := path_to_part(part, kind)) is not None:
            return (key, *below)
    return None


def changed(
    stated: Json,
    before: PreTrainedConfig,
    after: PreTrainedConfig,
    dtype: torch.dtype | None,
) -> Json:
    """Return a base's config, as its file states it, with what training has changed.

    `before`: the config as transformers reads it; `after`: that of the trained model, which may be
    a part of it. `dtype`: that of the trained weights. The result has no `quantization_config`.
    Raises ValueError if `after` is no part.
    """
    place = path_to_part(before, type(after))
    if place is None:
        raise ValueError(f"no {type(after).__name__} in it")
    result: Json = json.loads(json.dumps(stated))
    whole = before
    part = result
    for key in place:
        whole = getattr(whole, key)
        part = part.setdefault(key, {})
    changes = _changes(architecture(whole), architecture(after))
    _update(part, changes)
    if TIES in changes:
        result[TIES] = changes[TIES]
    for one in (result, part):
        one.pop(KEY, None)
    if dtype is not None:
        name = str(dtype).removeprefix("torch.")
        _set_dtype(part, name)
        result[next((key for key in _DTYPES if key in result), "dtype")] = name
    return result


def _changes(before: Json, after: Json) -> Json:
    """Return the entries that are new or different in `after`, nested as they are there."""
    changes = {}
    for key, value in after.items():
        known = before.get(key)
        if key in NOT_ARCHITECTURE:
            continue
        if isinstance(value, dict) and isinstance(known, dict):
            if inner := _changes(known, value):
                changes[key] = inner
        elif key not in before or value != known:
            changes[key] = value
    return changes


def _update(values: Json, changes: Json) -> None:
    for key, value in changes.items():
        if isinstance(value, dict) and isinstance(values.get(key), dict):
            _update(values[key], value)
        else:
            values[key] = value
