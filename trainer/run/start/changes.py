"""The changes since a checkpoint or an earlier start: which of them make it another run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer import checkpoint
from trainer.config import leaves
from trainer.data.dataset import BY_VALUE
from trainer.errors import ConfigError, DataError, Problem, listed
from trainer.storage import Json

BESIDE = {
    "": (
        "steps_per_print",
        "wall_clock_breakdown",
        "memory_breakdown",
        "dump_state",
        "flops_profiler",
        "comms_logger",
    ),
    "trainer": ("log", "checkpoint", "generate", "patience", "plan", "profile", "hub"),
}
"""Keys that may differ within one run: they only decide what is reported and kept of it."""

NOT_COMPARED = "not compared with the checkpoint's"

SPECIAL_IDS = ("bos_token_id", "eos_token_id")
"""Keys of a model's config that are the tokenizer's, whose changes are found in the data."""


def refuse_changed(source: Path, description: Json) -> list[str]:
    """List other changes since the checkpoint, a line each; an imported one does not record data
    and config.

    Raises DataError if data or tokenizer changed, ConfigError if the model or its code did: it
    would not be the same run.
    """
    saved = checkpoint.read_description(source)
    hint = "Undo the change, start a new run with --fresh, or resume anyway with --resume-anyway"
    known, notes = _comparable(saved.get("data", description["data"]), description["data"])
    if data := differences(known, description["data"]):
        expected = "what the checkpoint was made with"
        raise DataError(Problem(f"data or tokenizer: {source}", listed(data), expected, hint))
    before = saved.get("model") or description["model"]
    now = description["model"]
    if "base" in before and "base" in now and before["base"] != now["base"]:
        actual = f"fingerprint {now['base'][:12]}..."
        expected = f"the base of the adapter, {before['base'][:12]}..."
        raise ConfigError(Problem(f"trainer.model.name_or_path: {source}", actual, expected, hint))
    before, now = (_apart_from(SPECIAL_IDS, one) for one in (before, now))
    if model := differences(before, now):
        expected = "the model of the checkpoint"
        raise ConfigError(Problem(f"model: {source}", listed(model), expected, hint))
    sources = description.get("sources") or {}
    if "sources" not in saved and saved.get("code") and sources:
        notes.append(f"your code is {NOT_COMPARED}: an earlier version took other digests of it")
    if code := _edited(saved.get("sources") or {}, sources):
        raise ConfigError(Problem(f"code: {source}", listed(code), hint=hint))
    changed = differences(_steering(saved), _steering(description)) if "config" in saved else []
    with_it = saved.get("versions") or {}  # DeepSpeed's alone, of an imported one
    versions = description.get("versions") or with_it
    changed += differences(with_it, {name: versions.get(name) for name in with_it})
    return [*notes, *(f"changed since the checkpoint: {line}" for line in changed)]


def _comparable(saved: Json | None, here: Mapping[str, object]) -> tuple[object, list[str]]:
    """Return a checkpoint's description of its data, with what can be compared alone, and a note.

    Earlier versions hashed pickles of own data, which differ between processes.
    """
    now = str(here.get("fingerprint", ""))
    before = (saved or {}).get("fingerprint")
    if not now.startswith(BY_VALUE) or str(before).startswith(BY_VALUE):
        return saved, []
    note = f"the data is {NOT_COMPARED}: an earlier version kept no hash of it"
    return {**(saved or {}), "fingerprint": now}, [note]


def _apart_from(keys: Sequence[str], model: Json) -> Json:
    return {key: value for key, value in model.items() if key not in keys}


def without_place(request: object) -> object:
    """Return a config as given, without the place of its run."""
    keys = training_keys(request)
    if isinstance(keys, dict) and isinstance(section := keys.get("trainer"), dict):
        return keys | {"trainer": {key: value for key, value in section.items() if key != "run"}}
    return keys


def training_keys(request: object) -> object:
    """Return a config as given, without keys that do not affect the numbers of training."""
    if not isinstance(request, dict) or not isinstance(section := request.get("trainer", {}), dict):
        return request
    own = {key: value for key, value in section.items() if key not in BESIDE["trainer"]}
    whole = {key: value for key, value in request.items() if key not in BESIDE[""]}
    return whole | {"trainer": own}


def _steering(description: Json) -> Json:
    """Return what decides the numbers of a run, besides data, model and layout."""
    config = description.get("config", {})
    section = config.get("trainer") or {}
    top = ("optimizer", "scheduler", "gradient_clipping", "train_batch_size")
    noise = "label_smoothing", "neftune_alpha"
    own = "freeze", "parameter_groups", *noise, "router_bias_update_rate"
    return {
        **{name: config.get(name) for name in top},
        "seed": description.get("seed"),
        **{name: section.get(name) or [] for name in own},  # older checkpoints have none
    }


def _edited(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """List what was edited; code that came or went shows in the code that uses it."""
    both = {name: (str(before[name]), now[name]) for name in sorted(before.keys() & now.keys())}
    return [
        f"{name} was edited" if "sha256" in was else f"{name} {was} -> {is_now}"
        for name, (was, is_now) in both.items()
        if was != is_now
    ]


def differences(saved: Any, here: Any) -> list[str]:
    """List what differs of two configs or descriptions: key, old and new value."""
    before = dict(leaves(saved))
    now = dict(leaves(here))
    keys = sorted(key for key in {**before, **now} if before.get(key) != now.get(key))
    return [f"{key} {json.dumps(before.get(key))} -> {json.dumps(now.get(key))}" for key in keys]
