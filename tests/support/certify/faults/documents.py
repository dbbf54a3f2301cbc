"""Faults of layers with state under context parallelism, which compute whole documents."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import torch

from tests.support.certify.faults.planting import around


def with_borders(change: Callable[[set[int], int], set[int]]) -> Any:
    """`change(ends, border)` gives other ends of a row's documents; `border` is between ranks."""
    from trainer.distributed.context_ranks import ContextRanks

    def documents(real: Any, self: Any, lengths: Any) -> Any:
        changed = []
        for row in lengths:
            ends = change({int(end) for end in np.cumsum(row)}, sum(row) // 2)
            changed.append([int(n) for n in np.diff([0, *sorted(ends)])])
        return real(self, changed)

    return around(ContextRanks, "documents", documents)


def state_reset_at_a_ranks_border(engine: str) -> Any:
    """For a convolution: no halo."""
    return with_borders(lambda ends, border: ends | {border})


def border_ignored_on_the_second_rank(engine: str) -> Any:
    """A document that begins on the second rank continues the one before it."""
    return with_borders(lambda ends, border: {end for end in ends if end < border} | {max(ends)})


def gradient_of_the_state_not_sent_back(engine: str) -> Any:
    """What a rank computes of others' tokens has no gradient for them."""
    from trainer.distributed import documents

    def there(real: Any, self: Any, tokens: torch.Tensor) -> torch.Tensor:
        whole = real(self, tokens)
        own = self._documents
        first = sum(self._moves[2][: own.rank])
        of_others = np.ones(len(whole), dtype=bool)
        of_others[self._moves[3][first : first + self._moves[2][own.rank]]] = False
        others = torch.from_numpy(of_others).view(-1, *[1] * (whole.ndim - 1))
        return torch.where(others, whole.detach(), whole)

    return around(documents._Hand, "there", there)


def tokens_of_one_place_later(engine: str) -> Any:
    """What a rank receives is put a place too far."""
    from trainer.distributed import documents

    real = documents._Hand._moves.func

    def moves(self: Any) -> Any:
        order, sent, received, place = real(self)
        return order, sent, received, np.roll(place, 1)

    return mock.patch.object(documents._Hand, "_moves", property(moves))
