"""Exchanges of several tensors at a time, against one for each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

LENGTH = 6
HEADS = {
    "as many": ((8, 4), (8, 4), (8, 4)),
    "grouped queries": ((8, 4), (4, 4), (4, 4)),
    "wide keys": ((8, 6), (4, 6), (4, 2)),
}
"""Heads and their width: of queries, keys and values."""


def exchanged(heads: Sequence[tuple[int, int]], frozen: int | None, batch: int) -> Any:
    """Return outputs and gradients, and messages, both ways. Runs on each rank of a pool."""
    import torch.distributed as dist

    from trainer.distributed.exchange import Exchange
    from trainer.tools.planner.fakes.messages import Messages

    ranks = Exchange(dist.group.WORLD)  # type: ignore[arg-type]

    def one_by_one(parts: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        return [ranks.swap(part, 1, 2) for part in parts]

    def together(parts: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        return ranks.swap_all(parts, 1, 2)

    def passes(swaps: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]) -> Any:
        torch.manual_seed(dist.get_rank())
        parts = [torch.randn(batch, LENGTH, *of).transpose(1, 2) for of in heads]
        for place, part in enumerate(parts):
            part.requires_grad_(place != frozen)
        with Messages(dist.get_rank()) as messages:
            outputs = swaps(parts)
            messages.begin("backward")
            sum((output * torch.randn(output.shape)).sum() for output in outputs).backward()
        values = [*outputs, *(part.grad for part in parts)]
        sent = [(it.name, it.phase, it.size) for it in messages.found]
        return [None if value is None else value.detach() for value in values], sent

    return passes(one_by_one), passes(together)


@pytest.mark.parametrize("frozen", [None, 1], ids=["all trained", "keys frozen"])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_one_exchange_of_several_is_one_of_each(pools, ranks, heads, frozen):
    for batch in 1, 2:
        results = pools[ranks].run(exchanged, heads=HEADS[heads], frozen=frozen, batch=batch)
        for (each, singles), (values, sent) in results:
            for single, value in zip(each, values, strict=True):
                assert (single is None) == (value is None)
                assert single is None or torch.equal(single, value)
            assert [name for name, *_ in sent] == ["all-to-all"] * 2
            for phase in "", "backward":
                expected = sum(size for _, at, size in singles if at == phase)
                assert sum(size for _, at, size in sent if at == phase) == expected


def of_two_dtypes() -> list[torch.dtype]:
    """Return the dtypes of what was exchanged. Runs on each rank of a pool."""
    import torch.distributed as dist

    from trainer.distributed.exchange import Exchange

    ranks = Exchange(dist.group.WORLD)  # type: ignore[arg-type]
    parts = [torch.ones(1, 2, 2, dtype=dtype) for dtype in (torch.bfloat16, torch.float32)]
    return [part.dtype for part in ranks.swap_all(parts, 1, 2)]


def test_no_dtype_is_made_another(pools):
    for dtypes in pools[2].run(of_two_dtypes):
        assert dtypes == [torch.bfloat16, torch.float32]
