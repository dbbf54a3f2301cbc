"""Initial values of large tensors: each block of rows is drawn from a seed of its own.

A process then draws the blocks that hold its rows, and not those of all other ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trainer.distributed.seeding import derive, seeded_init

if TYPE_CHECKING:
    from torch._ops import OpOverload

LARGE = 1 << 24
"""The least number of values of a tensor that is drawn in blocks."""
BLOCK = 1 << 20
"""The values of a block, in whole rows."""
DRAWS = ("normal_", "uniform_")
ROW_BY_ROW = (*DRAWS, "add_", "clamp_", "div_", "erfinv_", "fill_", "mul_", "sub_", "zero_")
"""Operators in place whose result in a row follows from that row alone."""

Operator = Callable[[torch.Tensor, range], object]
"""An operator in place, on some rows of a tensor."""


@contextmanager
def initialising(seed: int, name: str, wanted: Mapping[torch.Tensor, range]) -> Iterator[None]:
    """Seed the initial values of module `name`, alike in all layouts, for a while.

    `wanted`: the module's own tensors on the CPU, with the rows of each that this process keeps.
    Other rows of a large one may be left as they are.
    """
    large = {t: rows for t, rows in wanted.items() if t.numel() >= LARGE}
    draws = _BlockDraws(partial(derive, "init", seed, name), large) if large else nullcontext()
    with seeded_init(seed, name), draws:
        yield


@dataclass
class _Filled:
    """The rows of a tensor that are made, and what has made them."""

    tensor: torch.Tensor
    made: range
    done: list[Operator] = field(default_factory=list)

    def is_whole(self, tensor: torch.Tensor) -> bool:
        return (tensor.shape, tensor.stride()) == (self.tensor.shape, self.tensor.stride())

    def run(self, operator: Operator) -> None:
        self.done.append(operator)
        operator(self.tensor, self.made)

    def complete(self) -> None:
        """Make the other rows, too."""
        for rows in (range(self.made.start), range(self.made.stop, len(self.tensor))):
            for operator in self.done if rows else ():
                operator(self.tensor, rows)
        self.made = range(len(self.tensor))


class _BlockDraws(TorchDispatchMode):
    """Draws these tensors in blocks; whatever reads one of them finds all of it."""

    def __init__(self, seed: Callable[..., int], wanted: Mapping[torch.Tensor, range]) -> None:
        super().__init__()
        self._seed = seed
        self._drawn = 0
        self._made = dict[int, _Filled]()
        for tensor, rows in wanted.items():
            each = _rows_of_a_block(tensor)
            stop = min(-(-rows.stop // each) * each, len(tensor))
            made = range(rows.start // each * each, stop) if rows else range(0)
            self._made[_memory(tensor)] = _Filled(tensor.detach(), made)

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        known = [self._made[at] for t in given if (at := _memory(t)) in self._made]
        if not known:
            return func(*args, **(kwargs or {}))
        target = args[0]
        name = func._opname
        options = kwargs or {}
        alone = len([t for t in given if t.ndim]) == 1 and options.get("generator") is None
        if name in ROW_BY_ROW and alone and known[0].is_whole(target):
            seed = partial(self._seed, self._drawn) if name in DRAWS else None
            self._drawn += name in DRAWS
            known[0].run(partial(_run, partial(func, **options), args[1:], seed))
            return target
        if not func.is_view:
            for rows in known:
                rows.complete()
        return func(*args, **options)


def _run(
    function: Callable[..., object],
    arguments: tuple[object, ...],
    seed: Callable[[int], int] | None,
    tensor: torch.Tensor,
    rows: range,
) -> None:
    if seed is None:
        function(tensor[rows.start : rows.stop], *arguments)
        return
    each = _rows_of_a_block(tensor)
    for start in range(rows.start, max(rows.stop, rows.start + 1), each):
        generator = torch.Generator().manual_seed(seed(start // each))
        block = tensor[start : min(start + each, rows.stop)]
        function(block, *arguments, generator=generator)


def _rows_of_a_block(tensor: torch.Tensor) -> int:
    return max(1, BLOCK // max(1, tensor[0].numel()))


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
