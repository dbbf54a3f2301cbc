"""A tiny copy of an architecture, with the same kinds of blocks and transitions between them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from trainer.models.language.forward import without_cache
from trainer.models.materialise import on_host
from trainer.models.spec import ModelSpec
from trainer.models.tiny_config import SIZES, Sizes, scale_of, tiny_config

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

LARGEST = 64_000_000
"""The most parameters that a copy may have."""

Kind = frozenset[str]


class CopySize(NamedTuple):
    """The size of a tiny copy."""

    layers: int = 3
    """Its least number of layers."""
    split: int = 1
    """Sizes that are multiples of it stay multiples of it."""
    sizes: Sizes = SIZES


@dataclass(frozen=True)
class Structure:
    """The structure of a model, without sizes and without the numbers of layers and experts."""

    blocks: tuple[Kind, ...]
    around: Kind
    """Modules that are not part of a block."""
    names: tuple[str, ...] = field(compare=False)

    def lacks(self, copy: Structure) -> Iterator[str]:
        """Yield each feature of this structure that `copy` does not have, for the user."""
        there = set(copy.blocks)
        steps = set(pairwise(copy.blocks))
        outside = self.around - copy.around
        yield from sorted(f"{part.split(':')[0]} outside the blocks" for part in outside)
        for kind in dict.fromkeys(kind for kind in self.blocks if kind not in there):
            yield f"a block like {self.names[self.blocks.index(kind)]}"
        for index, step in enumerate(pairwise(self.blocks)):
            if step not in steps and there.issuperset(step):
                steps.add(step)
                yield f"the step from {self.names[index]} to {self.names[index + 1]}"


def structure_of(model: nn.Module, blocks: Sequence[str]) -> Structure:
    """Read each block's classes, parameters, flags and strings, and which parameters are shared."""
    owners = {id(parameter): name for name, parameter in model.named_parameters()}
    inside = tuple(f"{block}." for block in blocks)
    around = frozenset(
        f"{_pattern(name)}: {type(module).__name__}"
        for name, module in model.named_modules()
        if not f"{name}.".startswith(inside)
    )
    return Structure(tuple(_kind(model, block, owners) for block in blocks), around, tuple(blocks))


def _kind(model: nn.Module, block: str, owners: dict[int, str]) -> Kind:
    lines = set()
    for name, module in model.get_submodule(block).named_modules():
        flags = sorted(
            f"{key}={_pattern(str(value))}"
            for key, value in vars(module).items()
            if isinstance(value, bool | str | None) and key != "training" and key[0] != "_"
        )
        own = {key: owners[id(p)] for key, p in module._parameters.items() if p is not None}
        foreign = sorted(key for key, owner in own.items() if not owner.startswith(f"{block}."))
        lines.add(f"{_pattern(name)}: {type(module).__name__} {flags} {sorted(own)} {foreign}")
    return frozenset(lines)


def _pattern(name: str) -> str:
    return re.sub(r"\d+", "*", name)


def tiny(
    config: PreTrainedConfig,
    spec_of: Callable[[PreTrainedConfig], ModelSpec],
    full: nn.Module,
    blocks: tuple[str, ...],
    size: CopySize,
) -> tuple[ModelSpec, tuple[str, ...]]:
    """Make a copy of `full` with some of its `blocks`, and list what the copy lacks.

    Copies are tried from the smallest that `size` allows, until one lacks nothing. Of those that
    run, the one that lacks least is returned. Raises the last attempt's error if none runs.
    """
    whole = structure_of(full, blocks)
    count = len(blocks)
    best: tuple[ModelSpec, tuple[str, ...]] | None = None
    failed: Exception = ValueError("no copy of it is small enough to try things on")
    for keep in _choices(whole.blocks, size.layers):
        built = False
        lacks: tuple[str, ...] = ()
        scales = [scale_of(config, size.split, head_sizes=shrink) for shrink in (True, False)]
        for scale in (*scales, None):
            try:
                spec = spec_of(tiny_config(config, scale, keep, count, size.sizes))
                if spec.parameters > LARGEST:
                    continue
                built = True
                lacks = tuple(whole.lacks(structure_of(spec.build(), spec.blocks)))
                if best is None or len(lacks) < len(best[1]):
                    _run(spec)
                    best = spec, lacks
            except Exception as error:  # whatever a family raises for sizes that do not suit it
                failed = error
                continue
            break
        # a copy that lacks nothing runs, or fails for a reason that more layers do not remove
        if built and not (best[1] if best else lacks):
            break
    if best is None:
        raise failed
    return best


def _run(spec: ModelSpec) -> None:
    ids = torch.arange(1, 25).reshape(2, 12)
    with torch.no_grad():
        model = on_host(spec).eval()
        output = model(input_ids=ids, **without_cache(model))[0]
    if not output.isfinite().all():
        raise ValueError("its output is not finite")


def _choices(kinds: Sequence[Kind], layers: int) -> Iterator[Sequence[int]]:
    """Yield the layers to keep, as indices of `kinds`; at least `layers` of them.

    First comes a small choice with all transitions, then ever longer prefixes of the model.
    """
    if not kinds:
        yield range(layers)
        return
    steps = set(pairwise(kinds))
    keep = list(range(len(kinds)))
    for index in reversed(range(len(kinds))):
        fewer = [kept for kept in keep if kept != index]
        if len(fewer) >= layers and set(pairwise(kinds[kept] for kept in fewer)) == steps:
            keep = fewer
    yield keep
    complete = (n for n in range(1, len(kinds) + 1) if set(pairwise(kinds[:n])) == steps)
    least = max(layers, next(complete))
    while least < len(kinds):
        yield range(least)
        least *= 2
    yield range(len(kinds))
