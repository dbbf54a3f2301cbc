"""An existing adapter in a folder, from which training starts: `trainer.adapter.path`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from safetensors import SafetensorError
from torch import nn

from trainer.config.sections.adapter import AdapterSection
from trainer.config.validate import validate
from trainer.errors import ConfigError, Problem, listed, refused, show
from trainer.models.door import check_folder
from trainer.models.language.auto_class import CAUSAL, SEQUENCES, TOKENS, opening_class
from trainer.models.pretrained.weights import SafetensorsFolder
from trainer.storage import Json, parse_json, read_file

CONFIG = "adapter_config.json"
STEM = "adapter_model"
PREFIX = "base_model.model."
"""The beginning of the names of an adapter's tensors."""
PLACE = "trainer.adapter.path"
OPENS = {
    "CAUSAL_LM": "peft.AutoPeftModelForCausalLM.from_pretrained",
    "SEQ_CLS": "peft.AutoPeftModelForSequenceClassification.from_pretrained",
    "TOKEN_CLS": "peft.AutoPeftModelForTokenClassification.from_pretrained",
    None: "peft.AutoPeftModel.from_pretrained",
}
"""PEFT's `task_type` -> the function that opens an adapter; None: on the class in its config."""
TASKS = {CAUSAL: "CAUSAL_LM", SEQUENCES: "SEQ_CLS", TOKENS: "TOKEN_CLS"}
"""Transformers' class that opens the base -> PEFT's `task_type`."""
WEIGHT = ".weight"
"""The end of the name of a linear layer's matrix, as `target_parameters` name it."""
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
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq")
"""PEFT's initialisations that change the base, so that it is not the one that a config names."""
_HARMLESS = {
    *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"),
    *("inference_mode", "lora_dropout", "fan_in_fan_out", "init_lora_weights"),
    *("qalora_group_size", "megatron_core"),
}
"""PEFT's keys that do not define an adapter, or that follow from the base."""


def completed(options: AdapterSection) -> AdapterSection:
    """Return the section filled in from its folder's adapter; the section itself without a folder.

    Raises ConfigError if the folder holds no LoRA adapter or one of an unsupported kind, and if a
    key of the section contradicts it.
    """
    if options.path is None:
        return options
    from peft import LoraConfig

    file = Path(options.path) / CONFIG
    check_folder(file.parent)
    given = _with_parameters(read_config(file), file)
    default = LoraConfig().to_dict()
    known = {*_HARMLESS, *_SAME.values()}
    unsupported = [
        f"{key} {show(value)}"
        for key, value in given.items()
        if key not in known and (value or None) != (default.get(key) or None)
    ]
    if str(begun := given.get("init_lora_weights")).startswith(_CHANGES_BASE):
        unsupported.append(f"init_lora_weights {show(begun)}")
    if not isinstance(given.get("target_modules"), list):
        unsupported.append(f"target_modules {show(given.get('target_modules'))}")
    if unsupported:
        expected = "LoRA with the keys of trainer.adapter"
        hint = "Merge it into its base."
        raise ConfigError(Problem(f"{PLACE}: {file}", listed(unsupported), expected, hint))
    completed = {ours: given.get(theirs, default[theirs]) for ours, theirs in _SAME.items()}
    completed["modules_to_save"] = completed["modules_to_save"] or []
    _, problems = validate({"model": {"name_or_path": "any base"}, "adapter": completed})
    if problems:
        raise ConfigError(*(replace(one, place=f"{file}: {one.place}") for one in problems))
    completed["alpha"] = float(completed["alpha"])
    plain = AdapterSection()
    for key, value in completed.items():
        own = getattr(options, key)
        if not _alike(own, value) and not _alike(own, getattr(plain, key)):
            expected = f"{show(value)}, as in {file}"
            place = f"trainer.adapter.{key}"
            problems.append(Problem(place, f"saw {show(own)}", expected, "Leave it out."))
    if problems:
        raise ConfigError(*problems)
    return options.model_copy(update=completed)


def opened_as(model: nn.Module) -> Json:
    """Return PEFT's config keys for the class on which an adapter of this model is opened.

    That is an auto class for a causal language model and for one with a head for labels, and the
    model's own class for any other.
    """
    task = TASKS.get(opening_class(model))  # type: ignore[arg-type]
    return {"task_type": task} if task else opened_by_class(model)


def opened_by_class(model: nn.Module) -> Json:
    """Return PEFT's config keys by which an adapter is opened on this model's own class."""
    kind = {"base_model_class": type(model).__name__, "parent_library": "transformers"}
    return {"task_type": None, "auto_mapping": kind}


def _with_parameters(given: Json, file: Path) -> Json:
    """Return PEFT's config with the names in `target_parameters` moved to `target_modules`.

    A linear layer is moved under its own name, and a stack of experts under the parameter's. Raises
    ConfigError for a parameter that is named without its module.
    """
    parameters = given.get("target_parameters")
    modules = given.get("target_modules") or []
    names = parameters if isinstance(parameters, list) else []
    if not names or not isinstance(modules, list):
        return given
    if not all(isinstance(name, str) for name in names):
        return given
    if alone := [name for name in names if "." not in name]:
        actual = f'target_parameters: "{alone[0]}" without its module'
        hint = "Change it there: PEFT opens both."
        raise ConfigError(Problem(f"{PLACE}: {file}", actual, f'"experts.{alone[0]}"', hint))
    moved = [name.removesuffix(WEIGHT) for name in names]
    return {**given, "target_modules": [*modules, *moved], "target_parameters": None}


def opened_values(folder: Path, published: Sequence[Mapping[str, str]]) -> SafetensorsFolder:
    """Open an adapter's values under the names of the trained parameters.

    `published`: alternatives, each the names of these parameters -> those in files. The one with
    exactly the names in the file is used, or the first if there is none.
    """
    stored = SafetensorsFolder(folder, STEM).names()
    known = (names for names in published if {*names.values()} == stored)
    return SafetensorsFolder(folder, STEM, next(known, published[0]))


def started(
    folder: Path,
    of_model: Mapping[str, tuple[int, ...]],
    published: Sequence[Mapping[str, str]],
) -> SafetensorsFolder:
    """Open an adapter's values.

    Raises ConfigError unless names and shapes are exactly those of the trained parameters.
    `of_model`: the shapes of the trained parameters; `published`: as for `opened_values`.
    """
    place = f"{PLACE}: {folder / STEM}.safetensors"
    with refused(place, "the adapter's safetensors", OSError, SafetensorError):
        weights = opened_values(folder, published)
        shapes = {theirs: of_model[ours] for ours, theirs in weights.renamed.items()}
        there = {name: tuple(weights[name].shape) for name in weights.names()}
    differences = []
    missing = sorted(shapes.keys() - there.keys())
    more = sorted(there.keys() - shapes.keys())
    if missing:
        differences.append(f"{len(missing)} tensors are not there ({missing[0]}, ...)")
    if more:
        differences.append(f"{len(more)} have no place in the model ({more[0]}, ...)")
    for name in sorted(shapes.keys() & there.keys()):
        if shapes[name] != there[name]:
            differences.append(f"{name} is {list(there[name])} and not {list(shapes[name])}")
            break
    if differences:
        expected = "an adapter of this base: trainer.model.name_or_path"
        raise ConfigError(Problem(place, "; ".join(differences), expected))
    return weights


def read_config(file: Path) -> Json:
    """Return PEFT's config of a LoRA adapter. Raises ConfigError for any other file."""
    expected = "the folder of a LoRA adapter, as PEFT writes it: final/ of a run"
    with refused(f"{PLACE}: {file}", expected, OSError, ValueError):
        given = parse_json(read_file(file))
    if not isinstance(given, dict) or given.pop("peft_type", None) != "LORA":
        raise ConfigError(Problem(f"{PLACE}: {file}", "no adapter of the type LORA", expected))
    return given


def _alike(own: object, other: object) -> bool:
    """Return True if two values are equal; lists, which name modules, in any order."""
    if isinstance(own, list) and isinstance(other, list):
        return sorted(own) == sorted(other)
    return bool(own == other)
