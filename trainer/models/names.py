"""Tensors and modules by name, and names shortened for the user."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import nn

SHOWN = 6
"""The most modules that a line lists."""


def pattern_of(name: str) -> str:
    """Replace each number in a name by `*`, so that layers and experts share one pattern."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def outermost(names: Sequence[str]) -> list[str]:
    """Return the names of the modules that are inside no other of these modules."""
    return [name for name in names if not any(name.startswith(f"{other}.") for other in names)]


def layer_of(name: str) -> str:
    """Return the name of the layer that `name`, such as `q_proj.lora_A.default`, belongs to."""
    return re.sub(r"(\.base_layer|\.lora_[AB]\.\w+)+$", "", name)


def expert_stacks(model: nn.Module, blocks: Sequence[str]) -> list[str]:
    """List the modules of blocks whose parameters are stacked over a layer's routed experts.

    They are those whose computation transformers lets one choose (`experts_implementation`).
    """
    inside = tuple(f"{block}." for block in blocks)
    named = model.named_modules()
    return [n for n, m in named if n.startswith(inside) and hasattr(type(m), "_apply_gate")]


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Map names to parameters and buffers; a tied one has several names."""
    parameters = model.named_parameters(remove_duplicate=False)
    return dict((*parameters, *model.named_buffers(remove_duplicate=False)))


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Map the name of each parameter that has a gradient to that gradient."""
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def differing(
    ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor], most: float
) -> tuple[str, float] | None:
    """Return the name of the first gradient that differs from `theirs`, and its relative error.

    The error is the largest difference, as a share of the gradient's largest entry in `theirs`.
    Returns None if no error is above `most`. A gradient's largest entry counts as at least a
    thousandth of the largest of all; a missing gradient counts as zeros.
    """
    sizes = [float(gradient.abs().max()) for gradient in theirs.values() if gradient.numel()]
    largest = max(sizes, default=0.0)
    nothing = torch.zeros(())
    for name in dict.fromkeys([*theirs, *ours]):
        a = ours.get(name, nothing)
        b = theirs.get(name, nothing)
        error = float((a - b).abs().max())
        scale = max(float(b.abs().max()), 1e-3 * largest)
        if not error <= most * scale:
            return name, error / max(scale, 1e-30)
    return None


def aliases_of(model: nn.Module) -> dict[str, str]:
    """Map each further name of a tied parameter to its first name."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    named = ((name, first[id(p)]) for name, p in model.named_parameters(remove_duplicate=False))
    return {alias: name for alias, name in named if alias != name}


def in_short(names: Collection[str], others: Collection[str]) -> str:
    """List the largest modules whose tensors are in `names` and not in `others`, by pattern."""
    kept = {pattern_of(name) for name in others}
    shown: dict[str, None] = {}
    for pattern in map(pattern_of, names):
        parts = pattern.split(".")
        heads = (".".join(parts[:depth]) + "." for depth in range(1, len(parts)))
        whole = (head for head in heads if not any(name.startswith(head) for name in kept))
        shown.setdefault(next((f"{head}*" for head in whole), pattern))
    more = f" and {len(shown) - SHOWN} more" if len(shown) > SHOWN else ""
    return ", ".join(list(shown)[:SHOWN]) + more


def units(root: nn.Module, blocks: tuple[str, ...]) -> Iterator[list[tuple[str, nn.Module]]]:
    """Yield the units that are materialised one at a time: each block whole, other modules alone.

    A unit is a list of named modules, children before parents.
    """
    inside = tuple(f"{block}." for block in blocks)
    for name, module in root.named_modules():
        if name in blocks:
            yield list(_children_first(name, module))
        elif not name.startswith(inside):
            yield [(name, module)]


def _children_first(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for child_name, child in module.named_children():
        yield from _children_first(f"{name}.{child_name}", child)
    yield name, module
