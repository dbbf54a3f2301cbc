"""The choice of the modules that get an adapter, and of those that are trained as a whole."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from torch import nn
from transformers.pytorch_utils import Conv1D

from trainer.errors import ConfigError, Problem, listed, show, suggestion
from trainer.models.finetuning.lora_experts import stacks_among, stacks_of
from trainer.models.names import pattern_of
from trainer.models.spec import ModelSpec

if TYPE_CHECKING:
    from trainer.config.sections.adapter import AdapterSection

LINEAR = (nn.Linear, Conv1D)
ALL_LINEAR = "all-linear"
"""The target that stands for all linear layers of the blocks, as in PEFT."""
_NOT_FOR_STACKS = {
    "dropout": "0 beside it: its adapter is added to the matrices, and sees no input",
    "dora": "false beside it: PEFT has no DoRA for it",
}
"""The keys of `trainer.adapter` that can't be set with stacks -> what is expected."""
_TARGETS = "trainer.adapter.targets"
_SAVED = "trainer.adapter.modules_to_save"


def chosen_targets(model: nn.Module, spec: ModelSpec, wanted: str | Sequence[str]) -> list[str]:
    """Return what `trainer.adapter.targets` selects in blocks: linear layers, stacks of experts.

    `wanted`: "all-linear", a regular expression of whole names, or a list of names or of their ends
    after a dot, in which "all-linear" may be one. A stack must be named with its module,
    "experts.down_proj", as many linear layers have a name like its own. Raises ConfigError if a
    target selects none, or if the expression matches any other module.
    """
    linear = [name for name, module in _in_blocks(model, spec) if type(module) in LINEAR]
    stacks = stacks_of(model, spec)
    if isinstance(wanted, str):
        if not linear:
            expected = "a model with blocks that have one"
            raise ConfigError(Problem(_TARGETS, "no linear layer", expected))
        return linear if wanted == ALL_LINEAR else _matched(model, wanted, linear, stacks)
    problems = []
    chosen = set[str]()
    known = [*linear, *stacks]
    for index, target in enumerate(wanted):
        names = [name for name in (known if "." in target else linear) if _names(target, name)]
        names = linear if target == ALL_LINEAR else names
        chosen.update(names)
        if not names:
            problems.append(_no_target(f"{_TARGETS}[{index}]", target, model, linear, stacks))
    if not wanted:
        problems.append(_no_target(_TARGETS, "", model, linear, stacks))
    if problems:
        raise ConfigError(*problems)
    return [name for name in known if name in chosen]


def _matched(
    model: nn.Module, pattern: str, linear: Sequence[str], stacks: Sequence[str]
) -> list[str]:
    """Return the modules whose whole name matches a regular expression, as in PEFT.

    Raises ConfigError if there is none, or one that is not in `linear`.
    """
    matched = [
        name for name, module in model.named_modules() if name and re.fullmatch(pattern, name)
    ]
    others = [name for name in matched if name not in linear]
    if others or not matched:
        actual = f"{show(pattern)} matches {listed(others) if matched else 'no module'}"
        expected = f"linear layers of the blocks alone: {listed(_patterns(linear), 12)}"
        named = short_names(name for name in stacks if re.fullmatch(pattern, name))
        hint = f"Stacks of experts are named in a list: {listed(named)}." if named else ""
        raise ConfigError(Problem(_TARGETS, actual, expected, hint))
    return matched


def left_out(
    model: nn.Module, spec: ModelSpec, wanted: str | Sequence[str], targets: Iterable[str]
) -> Iterator[str]:
    """Yield a note on the matrices of blocks that have no adapter, as they are in no linear layer.

    With `"all-linear"` it lists all of them: stacks of experts, routers, convolutions. With other
    targets it lists the stacks that a user could mistake for a target: `gate_up_proj` beside
    `up_proj`, or one that a regular expression matches. Without any, it yields nothing.
    """
    chosen = set(targets)
    inside = {
        f"{name}.{key}": parameter
        for name, module in _in_blocks(model, spec)
        if type(module) not in LINEAR
        for key, parameter in module.named_parameters(recurse=False)
        if f"{name}.{key}" not in chosen
    }
    if ALL_LINEAR in (wanted if isinstance(wanted, list) else [wanted]):
        sizes = {name: p.numel() for name, p in inside.items() if p.ndim > 1}
        kind = '"all-linear" leaves'
        there = "matrices"
    else:
        words = {word for name in chosen for word in _words(name)} - {"proj"}
        stacked = {name: p.numel() for name, p in inside.items() if p.ndim == 3}
        pattern = wanted if isinstance(wanted, str) else ""
        sizes = {
            name: size
            for name, size in stacked.items()
            if words & _words(name) or re.fullmatch(pattern, name)
        }
        kind = "names linear layers, which leaves"
        there = "stacks of experts' matrices"
    if sizes:
        values = f"{sum(sizes.values()) / 1e6:,.1f} M values"
        shown = listed(_patterns(sizes))
        matrices = f"{_TARGETS} {kind} {len(sizes)} {there} ({values})"
        yield f"{matrices} without an adapter, as they are in no linear layer: {shown}"
        if stacks := sorted(sizes.keys() & stacks_of(model, spec)):
            names = listed(short_names(stacks))
            yield f"to adapt the experts, too, list their stacks in {_TARGETS}: {names}"


def short_names(stacks: Iterable[str]) -> list[str]:
    """Return the shortest names by which `trainer.adapter.targets` can name stacks of experts."""
    return list(dict.fromkeys(".".join(name.split(".")[-2:]) for name in stacks))


def _words(name: str) -> set[str]:
    return set(name.rpartition(".")[2].split("_"))


def _names(target: str, name: str) -> bool:
    """Return True if `target` is the name, or its end after a dot, as in PEFT."""
    return name == target or name.endswith(f".{target}")


def _patterns(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(map(pattern_of, names)))


def _last_parts(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(name.rpartition(".")[2] for name in names))


def _in_blocks(model: nn.Module, spec: ModelSpec) -> list[tuple[str, nn.Module]]:
    """Return the named modules inside the blocks; all modules where no blocks are known."""
    inside = tuple(f"{block}." for block in spec.blocks) or ("",)
    return [(name, module) for name, module in model.named_modules() if name.startswith(inside)]


def _no_target(
    place: str, target: str, model: nn.Module, linear: Sequence[str], stacks: Sequence[str]
) -> Problem:
    short = _last_parts(linear)
    known = [name for name, _ in model.named_modules() if target and _names(target, name)]
    either = "no linear layer of a block, and no stack of experts" if stacks else ""
    actual = f'"{target}" names {either or "no linear layer of a block"}'
    if known:
        actual += f" ({known[0]} is {type(model.get_submodule(known[0])).__name__})"
    longer = [pattern.rpartition(".*.")[2] for pattern in _patterns(linear)]
    hint = suggestion(target, [*short, *dict.fromkeys(longer), *short_names(stacks)], cutoff=0.5)
    if known and not hint:
        hint = f"{_SAVED} trains a module as a whole."
    expected = f'"all-linear", or some of {listed([*short, *short_names(stacks)], 12)}'
    return Problem(place, actual, expected, hint)


def check_stacks(model: nn.Module, options: AdapterSection, targets: Iterable[str]) -> None:
    """Raise ConfigError for an option that is not for stacks of experts, if a target is one."""
    stacks = stacks_among(model, targets)
    refused = [
        Problem(f"trainer.adapter.{key}", f"{stacks[0]} is a stack of experts", expected)
        for key, expected in _NOT_FOR_STACKS.items()
        if stacks and getattr(options, key)
    ]
    if refused:
        raise ConfigError(*refused)


def check_saved(
    model: nn.Module, spec: ModelSpec, wanted: Sequence[str], targets: Sequence[str]
) -> None:
    """Raise ConfigError for a name in `modules_to_save` whose module can't be trained as a whole.

    The module must have parameters, and contain no adapter, no tied parameter and no buffer that
    is saved.
    """
    modules = dict(model.named_modules())
    tied = {*spec.tied, *spec.tied.values()}
    problems = []
    for index, name in enumerate(wanted):
        place = f"{_SAVED}[{index}]"
        matching = [module for module in modules if module.endswith(name) and name]
        inside = [t for t in targets for m in matching if f"{t}.".startswith(f"{m}.")]
        shared = [n for n in tied for m in matching if n.startswith(f"{m}.")]
        buffers = [key for m in matching for key in _buffers(modules[m])]
        if not any(any(True for _ in modules[module].parameters()) for module in matching):
            hint = suggestion(name, _last_parts(module for module in modules if module))
            actual = f'"{name}" names no module with parameters'
            problems.append(Problem(place, actual, "the name of one", hint))
        elif inside:
            actual = f'"{name}" has {inside[0]}, which has an adapter'
            problems.append(Problem(place, actual, "one or the other"))
        elif shared:
            actual = f'"{name}" has {sorted(shared)[0]}, which is tied'
            parts = "Trained alone, it would differ from the parameter that it is tied to"
            hint = f"{parts}: no merged model could have both."
            problems.append(Problem(place, actual, "a module that shares no parameter", hint))
        elif buffers:
            actual = f'"{name}" has the buffer {buffers[0]}, which PEFT would save with it'
            problems.append(Problem(place, actual, "a module with parameters alone"))
    if problems:
        raise ConfigError(*problems)


def _buffers(module: nn.Module) -> list[str]:
    """Return the names of a module's buffers that are saved."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    return [name for name in module.state_dict() if name not in parameters]
