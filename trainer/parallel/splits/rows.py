"""The requirements of context parallelism on a model: the same values in parts of rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from typing import Any

import torch

from trainer.distributed.context_ranks import ContextRanks, Division
from trainer.errors import ConfigError, Problem, named_line
from trainer.layout import Layout
from trainer.models.spec import ModelSpec
from trainer.parallel.parallel_mesh import division_of
from trainer.trial.isolation import packed_batch
from trainer.trial.setup import TOLERANCE, batches, own_randomness, tiny


def check(spec: ModelSpec, task: Any, layout: Layout, packed: bool) -> None:
    """Raise ConfigError for a model that can't be trained exactly on parts of its sequences."""
    place = f"sequence_parallel_size: {spec.name}"
    hint = "Remove it, or set it to 1: each rank then has whole sequences."
    problems = [Problem(place, actual, expected, hint) for actual, expected in _problems(spec)]
    in_groups = division_of(layout, spec.language.heads).groups > 1
    if not problems and (actual := _difference(spec, task, packed, in_groups)):
        problems = [Problem(place, actual, "tokens that meet in attention alone", hint)]
    if problems:
        raise ConfigError(*problems)


def _problems(spec: ModelSpec) -> Iterator[tuple[str, str]]:
    if spec.tiny.input is not None or not spec.language.vocabulary:
        yield "it is no language model of transformers", "sequences to divide"
        return
    if spec.language.own_loss:
        actual = (
            "the router's loss (output_router_logits) is a product of means over whole sequences"
        )
        yield actual, "output_router_logits false"


class _Differs(Exception):
    """A difference, in words."""


class _Recorded(ContextRanks):
    """Attends over whole rows at first, and keeps it; then gives each of two ranks its part.

    `heads`: those of the model that is tried; an odd number makes two groups of the two ranks.
    `in_groups`: sections of a row are tried by themselves, too, as groups of the run's ranks need.
    """

    def __init__(self, heads: int, in_groups: bool) -> None:
        super().__init__(Division(2, 1 if heads % 2 == 0 else 2), None, None)
        self._divides, self._in_groups = True, in_groups
        self._calls: list[tuple[torch.Tensor, ...]] = []
        self._ranks: Sequence[int] = (0, 1)
        self._next = 0

    @property
    def sections(self) -> list[tuple[int, int]]:
        half = self.row // 2
        return [(0, half), (half, self.row)] if self._in_groups else []

    def take(self, rank: int) -> None:
        """Begin the forward pass of one of two ranks."""
        self._ranks, self._next = (rank,), 0

    def part(self, whole: torch.Tensor, dim: int = 1, fill: float = 0) -> torch.Tensor:
        parts = [self.division.part(whole, n, dim, fill) for n in self._ranks]
        return self.division.in_order(torch.cat(parts, dim), dim) if len(parts) > 1 else parts[0]

    def attended(
        self, compute: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, Any]:
        heads = query, key, value
        if len(self._ranks) > 1:
            if dropout := compute.keywords.get("dropout"):
                raise _Differs(f"its attention has dropout of {dropout:g}, drawn for all heads")
            output, weights = compute(*heads)
            few = max(1, key.shape[1] // 2)  # with the query heads that see them
            counts = few * query.shape[1] // key.shape[1], few, few
            first = compute(*(part[:, :n] for part, n in zip(heads, counts, strict=True)))[0]
            _compare(first, output[:, :, : first.shape[2]], "a head depends on other heads")
            for begin, end in self.sections:
                own = query[:, :, begin:end], *(part[:, :, :end] for part in heads[1:])
                attention = compute(*own, section=(begin, end))[0]
                _compare(attention, output[:, begin:end], "a token sees later ones")
            self._calls.append((*heads, output))
            return output, weights
        if self._next == len(self._calls):
            raise _Differs("a part of a row attends more often than a whole one")
        *whole, output = self._calls[self._next]
        for ours, theirs in zip(heads, whole, strict=True):
            _compare(ours, self.part(theirs, 2), "it mixes tokens outside attention")
        self._next += 1
        return self.part(output), None

    def joined(self, part: torch.Tensor) -> torch.Tensor:
        if len(self._ranks) > 1:
            self._whole = part
        return self._whole

    def __len__(self) -> int:
        return len(self._calls)


def _difference(spec: ModelSpec, task: Any, packed: bool, in_groups: bool) -> str:
    """Say what a tiny copy computes otherwise on parts of rows, with the same attention.

    It runs in training, with one seed: dropout has to draw the same, too.
    """
    small, _ = tiny(spec)
    ranks = _Recorded(small.language.heads, in_groups)
    own = copy(task)
    own.placed(ranks)
    batch = packed_batch(small, task) if packed else next(batches(small, task))

    def loss(rank: int | None = None) -> torch.Tensor:
        if rank is not None:
            ranks.take(rank)
        torch.default_generator.manual_seed(1)
        total: torch.Tensor = own.loss_sum(model.train(), batch)
        return total

    with own_randomness(), torch.no_grad():
        try:
            model = own.prepare(tiny(spec)[1])
            whole = loss()
            if not len(ranks):
                kind = model.config._attn_implementation
                return f"its attention ({kind}) is not transformers' SDPA"
            _compare(loss(0) + loss(1), whole, "it mixes tokens after attention")
        except _Differs as difference:
            return str(difference)
        except Exception as error:  # whatever a model's own code raises
            return f"a tiny copy of it fails in parts: {named_line(error)}"
    return ""


def _compare(ours: torch.Tensor, whole: torch.Tensor, difference: str) -> None:
    alike = ours.shape == whole.shape
    error = float((ours - whole).abs().max() / whole.abs().max()) if alike else 1
    if not error <= TOLERANCE:  # nor NaN
        raise _Differs(f"{difference}: a part of a row differs by {error:.1e}")
