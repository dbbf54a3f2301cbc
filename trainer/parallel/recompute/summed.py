"""Products that only go into a sum, as one over ranks: `selective` keeps the sum, and not the term.

A recomputed block gets an empty tensor in their place: the sum, which it is for, is the kept one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch

from trainer.parallel.recompute import tiles
from trainer.parallel.recompute.block_mode import BlockMode

if TYPE_CHECKING:
    from torch._ops import OpOverload

PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
COMPUTES: ContextVar[bool] = ContextVar("COMPUTES", default=False)
"""True while a term is computed."""


@contextmanager
def only_summed() -> Iterator[None]:
    """Compute a term in here that goes into a sum, which is kept, and nowhere else.

    The compiler sees by itself what nobody needs.
    """
    if torch.compiler.is_compiling():
        yield
        return
    token = COMPUTES.set(True)
    try:
        yield
    finally:
        COMPUTES.reset(token)


class TermsLeftOut(BlockMode):
    """Computes no such term again. Within a tile sums are not kept, and each is computed."""

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if func in PRODUCTS and COMPUTES.get() and not tiles.COMPUTES.get():
            rows, matrix = args[-2:]
            return rows.new_empty(len(rows), matrix.shape[1])
        return func(*args, **(kwargs or {}))
