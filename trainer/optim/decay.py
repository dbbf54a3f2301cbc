"""The optimizer's parameter groups, and the parameters that weight decay spares."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from torch import nn

from trainer.models.spec import ModelSpec, Tuning
from trainer.tasks.task import bare_name

Group = dict[str, Any]
"""A parameter group: its "params", and the optimizer's arguments for them."""

_SPARED = re.compile(r"bias|layernorm|rmsnorm|(^|\.)norm(\.|$)|_norm(\.|$)")
"""Matches lower-case names that are spared, as in `Trainer.get_decay_parameter_names`."""


def norms_and_biases(model: nn.Module) -> dict[str, int]:
    """Return the sizes of trainable norms and biases by name; all of a LayerNorm is one."""
    modules = [name for name, module in model.named_modules() if isinstance(module, nn.LayerNorm)]
    norms = tuple(f"{name}." for name in modules if name)
    return {
        name: parameter.numel()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and (name.startswith(norms) or _SPARED.search(name.lower()))
    }


def spared(excludes: str, spec: ModelSpec) -> dict[str, int]:
    """Return the sizes of the parameters that the optimizer's weight decay spares, by name.

    Those that `trainer.weight_decay_excludes` (`excludes`) names, and those with a decay of their
    own.
    """
    model = spec.build()
    excluded = {} if excludes == "nothing" else norms_and_biases(model)
    own = {name for name, tuning in spec.training.tuned.items() if tuning.weight_decay is not None}
    return excluded | {n: p.numel() for n, p in model.named_parameters() if n in own}


def groups_of(
    named: Iterable[tuple[str, nn.Parameter]],
    undecayed: Collection[str],
    weight_decay: float,
    tuned: Mapping[str, Tuning],
    matrices: Collection[str] = (),
) -> list[Group]:
    """Group a `ModelWithLoss`'s trainable parameters by mesh, learning rate and weight decay.

    One call of DTensor's kernels takes tensors of one mesh. The schedule's rate is multiplied by a
    group's `lr_multiplier`. The groups of `matrices` have `muon`.
    """
    groups: dict[tuple[object, ...], Group] = {}
    for name, parameter in named:
        if parameter.requires_grad:
            multiplier, decay = tuned.get(bare_name(name), Tuning())
            if decay is None and weight_decay > 0 and bare_name(name) in undecayed:
                decay = 0.0
            muon = bare_name(name) in matrices
            key = (getattr(parameter, "device_mesh", None), multiplier, decay, muon)
            own = {
                **({"muon": True} if muon else {}),
                "lr_multiplier": multiplier,
                "weight_decay": weight_decay if decay is None else decay,
            }
            groups.setdefault(key, {"params": [], **own})["params"].append(parameter)
    return list(groups.values())
