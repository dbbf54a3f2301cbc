"""Parameters with a learning rate or a weight decay of their own, by patterns of names: `trainer.parameter_groups`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from trainer.config.sections import ParameterGroup
from trainer.errors import ConfigError, Problem, listed
from trainer.models.frozen import stand_ins, unmatched
from trainer.models.names import aliases_of
from trainer.models.spec import ModelSpec, Tuning


def tuned(spec: ModelSpec, groups: Sequence[ParameterGroup], *, copied: bool = False) -> ModelSpec:
    """Return the spec with each group's settings for the trainable parameters that match its patterns (`fnmatch`).

    The first group that matches counts; a tied parameter matches by any of its names. Raises
    ConfigError for a pattern that matches nothing and for a group that has nothing left, unless the
    spec is that of a smaller model, `copied` from the one the patterns were written for.
    """
    if not groups:
        return spec
    model = spec.build()
    aliases = aliases_of(model)
    sizes = {name: p.numel() for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad}
    found: dict[str, Tuning] = {}
    wrong, notes = list[Problem](), []
    for index, group in enumerate(groups):
        place = f"trainer.parameter_groups[{index}].names"
        matched = {pattern: [name for name in sizes if fnmatchcase(name, pattern)] for pattern in group.patterns}
        missed = [unmatched(place, pattern, list(sizes)) for pattern in group.patterns if not matched[pattern]]
        names = {aliases.get(name, name) for some in matched.values() for name in some} - found.keys()
        if not names and not missed:
            seen, expected = "earlier groups have all that matches", "a parameter that is in none of them"
            missed = [Problem(place, seen, expected, "The first group that matches counts.")]
        wrong += missed
        found |= dict.fromkeys(names, Tuning(group.lr_multiplier, group.weight_decay))
        if names:
            notes.append(_said(group, len(names), sum(sizes[name] for name in names), index))
    if wrong and not copied:
        raise ConfigError(*wrong)
    shrunk = None if spec.shrunk is None else _copies(spec.shrunk, found, spec.blocks)
    return replace(spec, tuned=found, shrunk=shrunk, notes=(*spec.notes, *notes))


def _copies(
    shrunk: Callable[..., ModelSpec], found: Mapping[str, Tuning], blocks: Sequence[str]
) -> Callable[..., ModelSpec]:
    """Make tiny copies in which each block has the settings of the model's block that it stands for."""
    kinds = [
        frozenset((name.removeprefix(f"{block}."), own) for name, own in found.items() if name.startswith(f"{block}."))
        for block in blocks
    ]
    within = {f"{block}.{key}" for block, kind in zip(blocks, kinds, strict=True) for key, _ in kind}

    def copy(layers: int = 3, split: int = 1) -> ModelSpec:
        small = shrunk(layers, split)
        known = {name for name, _ in small.build().named_parameters()}
        chosen = stand_ins(kinds, len(small.blocks)) if blocks else []
        wanted = {name: own for name, own in found.items() if name not in within}
        for block, index in zip(small.blocks, chosen, strict=False):
            wanted |= {f"{block}.{key}": own for key, own in kinds[index]}
        missing = set(kinds) - {kinds[index] for index in chosen}
        lacks = (*small.lacks, *(["some of trainer.parameter_groups"] if missing else []))
        return replace(small, tuned={name: own for name, own in wanted.items() if name in known}, lacks=lacks)

    return copy


def _said(group: ParameterGroup, count: int, values: int, index: int) -> str:
    decay = [] if group.weight_decay is None else [f"weight decay {group.weight_decay:g}"]
    what = ", ".join([f"{group.lr_multiplier:g} x the learning rate", *decay])
    where = f"trainer.parameter_groups[{index}]: {listed(group.patterns)}"
    return f"{count} parameters ({values / 1e6:,.1f} M values) with {what} ({where})"
