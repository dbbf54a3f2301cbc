"""Parameters with a learning rate or a weight decay of their own: `trainer.parameter_groups`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from trainer.config.sections.model_and_data import ParameterGroup
from trainer.errors import ConfigError, Problem, listed
from trainer.models.finetuning.frozen import tiny_with, unmatched
from trainer.models.names import aliases_of
from trainer.models.spec import ModelSpec, Tuning


def tuned(spec: ModelSpec, groups: Sequence[ParameterGroup], *, copied: bool = False) -> ModelSpec:
    """Return the spec with each group's settings for the parameters that match it (`fnmatch`).

    The first group that matches counts; a tied parameter matches by any of its names. Raises
    ConfigError for a pattern that matches nothing, and for a group whose parameters are all in
    earlier groups. With `copied`, neither is an error: the spec is that of a smaller copy of the
    model for which the patterns were written.
    """
    if not groups:
        return spec
    model = spec.build()
    aliases = aliases_of(model)
    named = model.named_parameters(remove_duplicate=False)
    sizes = {name: p.numel() for name, p in named if p.requires_grad}
    tunings: dict[str, Tuning] = {}
    problems = list[Problem]()
    notes = list[str]()
    for index, group in enumerate(groups):
        place = f"trainer.parameter_groups[{index}].names"
        missed = False
        names = set[str]()
        for pattern in group.patterns:
            matched = [name for name in sizes if fnmatchcase(name, pattern)]
            names.update(aliases.get(name, name) for name in matched)
            if not matched:
                problems.append(unmatched(place, pattern, list(sizes)))
                missed = True
        names -= tunings.keys()
        if names:
            notes.append(_note(group, len(names), sum(sizes[name] for name in names), index))
        elif not missed:
            actual = "earlier groups have all that matches"
            expected = "a parameter that is in none of them"
            problems.append(
                Problem(place, actual, expected, "The first group that matches counts.")
            )
        tunings |= dict.fromkeys(names, Tuning(group.lr_multiplier, group.weight_decay))
    if problems and not copied:
        raise ConfigError(*problems)
    whole = _tuning(replace(spec, notes=(*spec.notes, *notes)), tunings)
    return tiny_with(whole, tunings, _tuning, "some of trainer.parameter_groups")


def _tuning(spec: ModelSpec, tunings: Mapping[str, Tuning]) -> ModelSpec:
    return replace(spec, training=replace(spec.training, tuned=tunings))


def _note(group: ParameterGroup, count: int, values: int, index: int) -> str:
    rates = [f"{group.lr_multiplier:g} x the learning rate"]
    if group.weight_decay is not None:
        rates.append(f"weight decay {group.weight_decay:g}")
    where = f"trainer.parameter_groups[{index}]: {listed(group.patterns)}"
    return f"{count} parameters ({values / 1e6:,.1f} M values) with {', '.join(rates)} ({where})"
