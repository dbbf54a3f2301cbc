"""Documents as wholes: each is computed by one rank, even if several ranks have its tokens.

Ranks that share sequences (context parallelism) send the tokens of each document to the rank that
computes it, and get what it computed for their own tokens. Gradients go the same way back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from trainer.distributed.exchange import Exchange

Lengths = Sequence[Sequence[int]]
"""The lengths of the documents of each row of a micro-batch; they fill the row."""
Places = NDArray[np.int64]


class DocumentPlace(NamedTuple):
    """The place of a document: its row, its first token in it, its number of tokens."""

    row: int
    begin: int
    length: int


Compute = Callable[[Sequence[DocumentPlace], Sequence[torch.Tensor]], object]
"""Computes documents of one length, from tensors [documents, length, ...] with their tokens.

Returns tensors of the same kind, in lists, tuples or dicts.
"""


@dataclass(frozen=True)
class WholeDocuments:
    """The documents of a micro-batch, for one rank of those that share its rows."""

    lengths: Lengths
    places: Sequence[Places]
    """The places in a row of the tokens that each rank has, in its order."""
    rank: int = 0
    exchange: Exchange | None = None
    """None: this rank has whole rows."""
    alone: Callable[[], AbstractContextManager[object]] = nullcontext
    """Wraps what this rank computes of whole documents."""
    _hands: dict[int, _Hand] = field(default_factory=dict)

    @classmethod
    def whole(cls, lengths: Lengths) -> WholeDocuments:
        """Return those of rows that no other rank shares."""
        return cls(lengths, [np.arange(sum(lengths[0]))])

    @property
    def row(self) -> int:
        """The length of a row in tokens."""
        return sum(map(len, self.places))

    @property
    def part(self) -> int:
        """The number of a row's tokens that this rank has."""
        return len(self.places[self.rank])

    @property
    def are_rows(self) -> bool:
        """True if each row is one document, which no other rank shares."""
        return self.exchange is None and all(len(own) == 1 for own in self.lengths)

    def computed(self, compute: Compute, parts: Sequence[torch.Tensor], number: int = 0) -> object:
        """Return what is computed for each of this rank's tokens, from whole documents. Collective.

        `parts`: [rows or 1, tokens of this rank, ...]. `number`: that of the layer, by which long
        documents take turns among the ranks. What is no tensor is returned as it is.
        """
        ranks = len(self.places)
        hand = self._hands.setdefault(number % ranks, _Hand(self, number % ranks))
        rows = len(self.lengths)
        tokens = [hand.there(part.expand(rows, *part.shape[1:]).flatten(0, 1)) for part in parts]
        results: list[object] = []
        begin = 0
        with self.alone():
            for group in hand.groups:
                shape = len(group), group[0].length
                own = [part.narrow(0, begin, shape[0] * shape[1]) for part in tokens]
                results.append(compute(group, [part.unflatten(0, shape) for part in own]))
                begin += shape[0] * shape[1]
            if all(group[0].length == 1 for group in hand.groups):
                # so that what state passes through has a gradient, of zeros, on this rank, too
                pairs = [torch.stack([part[0, 0], part[0, -1]]).detach() for part in parts]
                nothing = [part[:0] for part in tokens]
                own = [torch.cat(both)[None] for both in zip(pairs, nothing, strict=True)]
                results.append(compute([DocumentPlace(0, 0, 2)], own))
        columns = zip(*map(tree_leaves, results), strict=True)
        outputs = [self._returned(hand, column, begin) for column in columns]
        return tree_unflatten(outputs, tree_flatten(results[0])[1])

    def _returned(self, hand: _Hand, column: Sequence[Any], tokens: int) -> object:
        """Return an output for this rank's tokens, of those of the documents that it computed."""
        if not torch.is_tensor(column[0]):
            return column[0]
        whole = torch.cat([output.flatten(0, 1) for output in column])
        return hand.back(whole[:tokens]).unflatten(0, (len(self.lengths), self.part))

    def dealt(self, turn: int) -> list[list[DocumentPlace]]:
        """Return the documents that each rank computes, longest first.

        None has much more than its share of tokens if documents are shorter. A document that fits
        is where most of its tokens are; a longer one goes to the rank with the fewest so far, of
        equal ones to that whose `turn` it is.
        """
        ranks = range(len(self.places))
        holders = np.empty(self.row, dtype=np.int64)
        for rank, own in enumerate(self.places):
            holders[own] = rank
        documents = []
        for row, lengths in enumerate(self.lengths):
            begins = np.cumsum([0, *lengths])[:-1]
            pairs = zip(begins, lengths, strict=True)
            documents += [DocumentPlace(row, int(begin), length) for begin, length in pairs]
        share = -(-self.row * len(self.lengths) // len(ranks))
        loads = [0] * len(ranks)
        hands: list[list[DocumentPlace]] = [[] for _ in ranks]
        for document in sorted(documents, key=lambda one: -one.length):
            _, begin, length = document
            here = np.bincount(holders[begin : begin + length], minlength=len(ranks))
            if fits := [rank for rank in ranks if loads[rank] + length <= share]:
                rank = max(fits, key=lambda rank: (here[rank], -loads[rank]))
            else:
                rank = min(ranks, key=lambda rank: (loads[rank], (rank - turn) % len(ranks)))
            loads[rank] += length
            hands[rank].append(document)
        return hands


class _Hand:
    """The documents that this rank computes, and the moves of tokens to their ranks and back."""

    def __init__(self, documents: WholeDocuments, turn: int) -> None:
        self._documents = documents
        self._turn = turn
        self._on: dict[torch.device, tuple[torch.Tensor, ...]] = {}

    @cached_property
    def _dealt(self) -> list[list[DocumentPlace]]:
        return self._documents.dealt(self._turn)

    @cached_property
    def groups(self) -> list[list[DocumentPlace]]:
        """This rank's documents in groups of one length, which are computed at once."""
        own = self._dealt[self._documents.rank]
        return [list(group) for _, group in groupby(own, key=lambda document: document.length)]

    @cached_property
    def _moves(self) -> tuple[Places, list[int], list[int], Places]:
        """The order in which this rank's tokens are sent, how many to each rank and from each, and
        the place of each received token among those of this rank's documents.
        """
        documents = self._documents
        ranks = len(documents.places)
        computes = np.empty((len(documents.lengths), documents.row), dtype=np.int64)
        place = np.empty_like(computes)
        for rank, own in enumerate(self._dealt):
            first = 0
            for row, begin, length in own:
                computes[row, begin : begin + length] = rank
                place[row, begin : begin + length] = np.arange(first, first + length)
                first += length
        to = computes[:, documents.places[documents.rank]].ravel()
        received = [
            place[:, tokens][computes[:, tokens] == documents.rank] for tokens in documents.places
        ]
        sent = np.bincount(to, minlength=ranks)
        counts = [len(tokens) for tokens in received]
        return np.argsort(to, kind="stable"), [*map(int, sent)], counts, np.concatenate(received)

    def _indices(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        """Return both orders of `_moves` on a device, each with its inverse."""
        if device not in self._on:
            order, _, _, place = self._moves
            both = order, np.argsort(order), place, np.argsort(place)
            self._on[device] = tuple(torch.from_numpy(index).to(device) for index in both)
        return self._on[device]

    def there(self, tokens: torch.Tensor) -> torch.Tensor:
        """Send this rank's tokens [tokens, ...]; return those of its documents, in their order."""
        order, _, _, documents = self._indices(tokens.device)
        _, sent, received, _ = self._moves
        return self._moved(tokens.index_select(0, order), sent, received).index_select(0, documents)

    def back(self, tokens: torch.Tensor) -> torch.Tensor:
        """Undo `there`."""
        _, own, place, _ = self._indices(tokens.device)
        _, sent, received, _ = self._moves
        return self._moved(tokens.index_select(0, place), received, sent).index_select(0, own)

    def _moved(self, tokens: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        exchange = self._documents.exchange
        return exchange.move(tokens, sent, received) if exchange else tokens
