"""LoRA in other trainers' configs."""

from __future__ import annotations

import re

from trainer.tools.importers.draft import Draft, Entry, Roles, names
from trainer.tools.importers.tables import read_table

_ADAPTER = read_table("arguments")["values"]["adapter"]


def adapter(draft: Draft, keys: Roles) -> None:
    """Convert LoRA, if requested. Raises ConfigError for another method."""
    kind = keys["use_peft"]
    dropout = keys["lora_dropout"]
    folder = keys["lora_path"]
    same = [(keys[name], ours) for name, ours in _ADAPTER.items()]
    targets = [keys[name] for name in _TARGETS]
    rest = [*(entry for entry, _ in same), *targets, keys["lora_modules_to_save"]]
    if not kind.key:
        _needs_adapter(draft, keys)
        return
    if not kind.is_set or kind.value in (0, "full"):
        draft.skip(kind, dropout, folder, keys["loraplus_lr_ratio"], *rest)
        _needs_adapter(draft, keys)
        return
    if kind.value not in (1, "lora", "qlora"):
        raise kind.refused("lora, qlora or full: no other method is offered")
    draft.put(kind, "trainer.adapter.type", "lora")
    _bits(draft, keys)
    _faster_b(draft, keys)
    if dropout.value:
        draft.put(dropout, "trainer.adapter.dropout", dropout.value)
    draft.skip(*(() if dropout.value else (dropout,)))
    if folder.value:
        draft.put(folder, "trainer.adapter.path", folder.value)
        draft.skip(*rest)
        return
    for entry, ours in same:
        if entry.value not in (None, False, ""):
            draft.put(entry, f"trainer.adapter.{ours}", entry.value)
    _modules(draft, keys)
    given = {"r": keys["lora_r"].is_set, "alpha": keys["lora_alpha"].is_set}
    given |= {"dropout": dropout.is_set, "targets": any(entry.is_set for entry in targets)}
    if missing := [name for name, known in given.items() if not known]:
        draft.lose(kind, f"the config does not set LoRA's {', '.join(missing)}")


def _needs_adapter(draft: Draft, keys: Roles) -> None:
    """Lose a request for a quantised base, which is for adapters."""
    for name in ("load_in_4bit", "load_in_8bit", "quantization_bit"):
        if keys[name].value:
            draft.lose(keys[name], "a quantised base needs an adapter")


def _bits(draft: Draft, keys: Roles) -> None:
    """Set a quantised base, if requested: NF4 or 8-bit integers, as in bitsandbytes."""
    kind = keys["use_peft"]
    four = keys["load_in_4bit"]
    eight = keys["load_in_8bit"]
    bits = keys["quantization_bit"]
    nested = keys["double_quant"]
    if kind.value == "qlora" and four.value is not True:
        draft.lose(kind, "it needs load_in_4bit: true")
        if eight.value:
            draft.lose(eight, "Axolotl takes it with adapter: lora")
    elif kind.value == "lora" and four.value is True:
        draft.lose(four, "with adapter: lora Axolotl takes FP4, not NF4: set adapter: qlora")
    elif four.value is True and eight.value is True:
        draft.lose(eight, "load_in_4bit is set, too: leave one out")
    elif four.value is True or bits.value == 4:
        entry = four if four.value is True else bits
        _quantised(draft, keys, entry, "nf4")
        decides = nested if nested.key else kind
        double = bool(nested.value) or kind.value == "qlora"
        draft.put(decides, "trainer.adapter.quantize.double_quant", double)
    elif eight.value is True or bits.value == 8:
        entry = eight if eight.value is True else bits
        _quantised(draft, keys, entry, "int8")
        draft.note(entry, "only weights are in 8 bits here; there, the inputs of layers are, too")
        draft.skip(nested)
    else:
        draft.skip(nested)


def _quantised(draft: Draft, keys: Roles, entry: Entry, form: str) -> None:
    """Set the format of the base, which an `entry` requests; say what else differs."""
    draft.put(entry, "trainer.adapter.quantize.type", form)
    draft.note(entry, "other parameters are in the run's precision, not all in float32")
    experts = keys["quantize_moe_experts"]
    if experts.value:
        draft.skip(experts)
    else:
        draft.note(entry, "routed experts are quantised here, in 16 bits there")


def _faster_b(draft: Draft, keys: Roles) -> None:
    """Set the learning rate of the matrices B to a multiple of the others' (arXiv 2402.12354)."""
    ratio = keys["loraplus_lr_ratio"]
    others = [keys[name] for name in ("lora_bias", "use_dora", "lora_modules_to_save")]
    vectors = any(entry.value not in (None, False, "", "none") for entry in others)
    if not ratio.is_set:
        draft.skip(ratio)
    elif vectors:
        draft.lose(ratio, "there other trained parameters that are vectors have the rate of B, too")
    else:
        group = {"names": "*lora_B*", "lr_multiplier": ratio.value}
        draft.put(ratio, "trainer.parameter_groups", [group])


_TARGETS = ("lora_target_modules", "lora_target", "lora_target_linear", "lora_target_parameters")
_NAME = re.compile(r"[\w.-]+")


def _modules(draft: Draft, keys: Roles) -> None:
    """Set the modules that are adapted, and those that are trained as a whole.

    The former are names, or text that PEFT takes as a regular expression.
    """
    save = keys["lora_modules_to_save"]
    linear = keys["lora_target_linear"]
    if save.is_set:
        draft.put(save, "trainer.adapter.modules_to_save", names(save.value))
    expressions = bool(keys["lora_target_modules"].key)
    entry = keys["lora_target_modules"] if expressions else keys["lora_target"]
    modules = names(entry.value) if entry.is_set else []
    if linear.value:
        draft.put(linear, "trainer.adapter.targets", "all-linear")
        if all(name.endswith("_proj") for name in modules):
            draft.skip(entry)  # Axolotl joins both, and all-linear contains these
    elif modules == (["all-linear"] if expressions else ["all"]):
        draft.put(entry, "trainer.adapter.targets", "all-linear")
    elif modules and all(map(_NAME.fullmatch, modules)):
        draft.put(entry, "trainer.adapter.targets", modules)
    elif modules and expressions and isinstance(entry.value, str):
        draft.put(entry, "trainer.adapter.targets", entry.value)
    elif modules:
        draft.lose(entry, "PEFT takes each item of a list as a name, and no layer has such a name")
    _stacks(draft, keys["lora_target_parameters"])


def _stacks(draft: Draft, parameters: Entry) -> None:
    """Add stacks of experts, which PEFT has apart, to the modules that are adapted."""
    if not parameters.is_set:
        draft.skip(parameters)
        return
    place = "trainer.adapter.targets"
    modules = draft.get(place) or []
    if isinstance(modules, str) and modules != "all-linear":
        draft.lose(parameters, "a regular expression for modules can't be joined with names")
        return
    layers = [modules] if isinstance(modules, str) else modules
    draft.put(parameters, place, [*layers, *names(parameters.value)])
