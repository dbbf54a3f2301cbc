"""Parameters that are not trained because the config says so: `trainer.freeze`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TypeVar

from torch import nn

from trainer.errors import ConfigError, Problem, listed, suggestion
from trainer.models.names import aliases_of, pattern_of
from trainer.models.spec import ModelSpec

Value = TypeVar("Value")


def frozen(spec: ModelSpec, patterns: Sequence[str], *, copied: bool = False) -> ModelSpec:
    """Return the spec with every parameter frozen that matches one of the `patterns` (`fnmatch`).

    A tied parameter matches by any of its names. Raises ConfigError if no parameter is left to
    train, and for a pattern that matches nothing. With `copied`, a pattern may match nothing: the
    spec is that of a smaller copy of the model for which the patterns were written.
    """
    if not patterns:
        return spec
    model = spec.build()
    aliases = aliases_of(model)
    known = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    names = set[str]()
    problems = []
    for index, pattern in enumerate(patterns):
        matched = [name for name in known if fnmatchcase(name, pattern)]
        names.update(aliases.get(name, name) for name in matched)
        if not matched:
            problems.append(unmatched(f"trainer.freeze[{index}]", pattern, known))
    if problems and not copied:
        raise ConfigError(*problems)
    notes = [_note(model, names, patterns)] if names else []
    frozen_spec = replace(_holding(spec, names), notes=(*spec.notes, *notes))
    lacking = "some of the ways in which blocks are frozen"
    return tiny_with(frozen_spec, dict.fromkeys(names, True), _holding, lacking)


def _holding(spec: ModelSpec, names: Collection[str]) -> ModelSpec:
    """Freeze the parameters called `names`. Raises ConfigError if no other parameter is trained."""
    parameters = dict(spec.build().named_parameters())
    if all(name in names or not p.requires_grad for name, p in parameters.items()):
        actual = f"all {len(parameters)} parameters are frozen"
        hint = "Leave out of it what is to be trained."
        raise ConfigError(Problem("trainer.freeze", actual, "some that are left to train", hint))
    sizes = {**spec.training.frozen, **{name: parameters[name].numel() for name in names}}
    return replace(spec.with_frozen(names), training=replace(spec.training, frozen=sizes))


def _note(model: nn.Module, names: Collection[str], patterns: Sequence[str]) -> str:
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    values = sum(sizes[name] for name in names) / 1e6
    counts = f"{len(names)} of {len(sizes)} parameters ({values:,.1f} M values)"
    return f"{counts} are frozen (trainer.freeze): {listed(patterns)}"


def tiny_with(
    spec: ModelSpec,
    of_whole: Mapping[str, Value],
    change: Callable[[ModelSpec, dict[str, Value]], ModelSpec],
    lacking: str,
) -> ModelSpec:
    """Return the spec with tiny copies that get the same `change`.

    `of_whole`: what `change` does to each parameter of the whole model, by name. `lacking`: what a
    copy lacks if it has too few blocks for all that is changed.
    """
    tiny_copy = spec.tiny.copy
    blocks = spec.blocks
    if tiny_copy is None:
        return spec

    def copy(layers: int = 3, split: int = 1) -> ModelSpec:
        small = tiny_copy(layers, split)
        wanted, complete = carried(of_whole, blocks, small.blocks, small.build())
        lacks = small.tiny.lacks if complete else (*small.tiny.lacks, lacking)
        changed = change(small, wanted)
        return replace(changed, tiny=replace(changed.tiny, lacks=lacks))

    return replace(spec, tiny=replace(spec.tiny, copy=copy))


def carried(
    of_whole: Mapping[str, Value], blocks: Sequence[str], small: Sequence[str], copy: nn.Module
) -> tuple[dict[str, Value], bool]:
    """Carry values of parameters over from a model with `blocks` to a copy with the blocks `small`.

    Each block of the copy gets the values of the block that it stands for. Also returns True if the
    copy has a block for every distinct set of values.
    """
    wanted = dict(of_whole)
    kinds = []
    for block in blocks:
        inside = [name for name in of_whole if name.startswith(f"{block}.")]
        own = ((name.removeprefix(f"{block}."), wanted.pop(name)) for name in inside)
        kinds.append(frozenset(own))
    chosen = stand_ins(kinds, len(small)) if kinds else []
    for block, index in zip(small if kinds else (), chosen, strict=True):
        wanted |= {f"{block}.{key}": value for key, value in kinds[index]}
    known = {name for name, _ in copy.named_parameters()}
    complete = set(kinds) == {kinds[index] for index in chosen}
    return {name: value for name, value in wanted.items() if name in known}, complete


def stand_ins(kinds: Sequence[object], count: int) -> list[int]:
    """Choose, by index and in order, the blocks that the `count` blocks of a tiny copy stand for.

    They are the first of each run of equal kinds if there are enough blocks, else the first of each
    kind, else some of these.
    """
    starts = [i for i, kind in enumerate(kinds) if i == 0 or kind != kinds[i - 1]]
    if len(starts) > count:
        starts = sorted({kinds[i]: i for i in reversed(starts)}.values())
    return [starts[i * len(starts) // count] for i in range(count)]


def unmatched(place: str, pattern: str, known: Sequence[str]) -> Problem:
    """Build the problem of a pattern that matches no known parameter, with close matches."""
    names = dict.fromkeys(map(pattern_of, known))
    modules = _modules_of(names)
    parents = _modules_of(module.removesuffix(".*") for module in modules)
    hint = suggestion(pattern, [*names, *modules, *parents], cutoff=0.5)
    actual = f'"{pattern}" matches no parameter'
    return Problem(place, actual, f'a name such as "{known[0]}", * for any characters', hint)


def _modules_of(names: Iterable[str]) -> list[str]:
    parents = (name.rpartition(".")[0] for name in names if "." in name)
    return list(dict.fromkeys(f"{parent}.*" for parent in parents))
