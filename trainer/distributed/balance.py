"""Work of given sizes, shared out among ranks."""

from __future__ import annotations

from collections.abc import Sequence


def least_loaded(sizes: Sequence[int], candidates: Sequence[Sequence[int]]) -> list[int]:
    """Choose for each size, in order, the candidate with the smallest total so far."""
    loads: dict[int, int] = {}
    chosen = []
    for size, ranks in zip(sizes, candidates, strict=True):
        rank = min(ranks, key=lambda rank: loads.get(rank, 0))
        loads[rank] = loads.get(rank, 0) + size
        chosen.append(rank)
    return chosen
