"""Parameters with a learning rate or a weight decay of their own, by patterns of names:
`trainer.parameter_groups`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from trainer.config.sections import ParameterGroup
from trainer.errors import ConfigError, Problem, listed
from trainer.models.finetuning.frozen import tiny_with, unmatched
from trainer.models.names import aliases_of
from trainer.models.spec import ModelSpec, Tuning


def tuned(spec: ModelSpec, groups: Sequence[ParameterGroup], *, copied: bool = False) -> ModelSpec:
    """Return the spec with each group's settings for the trainable parameters that match its
    patterns (`fnmatch`).

    The first group that matches counts; a tied parameter matches by any of its names. Raises
    ConfigError for a pattern that matches nothing and for a group that has nothing left, unless the
    spec is that of a smaller model, `copied` from the one the patterns were written for.
    """
    if not groups:
        return spec
    model = spec.build()
    aliases = aliases_of(model)
    sizes = {
        name: p.numel()
        for name, p in model.named_parameters(remove_duplicate=False)
        if p.requires_grad
    }
    found: dict[str, Tuning] = {}
    wrong, notes = list[Problem](), []
    for index, group in enumerate(groups):
        place = f"trainer.parameter_groups[{index}].names"
        matched = {
            pattern: [name for name in sizes if fnmatchcase(name, pattern)]
            for pattern in group.patterns
        }
        missed = [
            unmatched(place, pattern, list(sizes))
            for pattern in group.patterns
            if not matched[pattern]
        ]
        names = {
            aliases.get(name, name) for some in matched.values() for name in some
        } - found.keys()
        if not names and not missed:
            seen, expected = (
                "earlier groups have all that matches",
                "a parameter that is in none of them",
            )
            missed = [Problem(place, seen, expected, "The first group that matches counts.")]
        wrong += missed
        found |= dict.fromkeys(names, Tuning(group.lr_multiplier, group.weight_decay))
        if names:
            notes.append(_said(group, len(names), sum(sizes[name] for name in names), index))
    if wrong and not copied:
        raise ConfigError(*wrong)
    whole = _tuning(replace(spec, notes=(*spec.notes, *notes)), found)
    return tiny_with(whole, found, _tuning, "some of trainer.parameter_groups")


def _tuning(spec: ModelSpec, found: Mapping[str, Tuning]) -> ModelSpec:
    return replace(spec, training=replace(spec.training, tuned=found))


def _said(group: ParameterGroup, count: int, values: int, index: int) -> str:
    decay = [] if group.weight_decay is None else [f"weight decay {group.weight_decay:g}"]
    what = ", ".join([f"{group.lr_multiplier:g} x the learning rate", *decay])
    where = f"trainer.parameter_groups[{index}]: {listed(group.patterns)}"
    return f"{count} parameters ({values / 1e6:,.1f} M values) with {what} ({where})"
