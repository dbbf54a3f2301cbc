"""Are values the same if context ranks have parts of each sequence?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from trainer.distributed.context_ranks import ContextRanks, Division
from trainer.distributed.documents import Compute, Lengths, WholeDocuments
from trainer.models.spec import ModelSpec
from trainer.parallel.parallel_mesh import division_of
from trainer.probes.inputs import batches, packed_batch
from trainer.probes.probe import TOLERANCE, Differs, Finding, probe
from trainer.probes.question import Need, Probed, Question
from trainer.tasks.mixers import Mixers


@runtime_checkable
class HasMixers(Protocol):
    """A task that finds its model's layers with state (`trainer/tasks/mixers.py`)."""

    mixers: Callable[[], Mixers]


def _ask(about: Probed) -> Finding | None:
    """Compare a sequence in parts with a whole one, with the same attention.

    It runs in training, with one seed: dropout has to draw the same, too.
    """
    spec = about.trained
    if not spec.language.vocabulary:
        return Finding("it is no language model of transformers", "sequences to divide")
    if not about.is_language:
        head = (
            "its head is no language model's: nothing shows what it gives on a part of a sequence"
        )
        return Finding(f"{head}, so that it needs whole sequences", "a language model")
    if spec.language.own_loss:
        loss = "the router's loss (output_router_logits)"
        actual = f"{loss} is a product of means over whole sequences"
        return Finding(actual, "output_router_logits false")
    if about.layout.sequence_parallel and isinstance(about.task, HasMixers) and about.task.mixers():
        actual = "its layers with state need whole documents, not a tensor rank's part of them"
        return Finding(actual, "tensor_parallel.sequence_parallel false")
    in_groups = division_of(about.layout, spec.language.attention.heads).groups > 1

    def change(model: nn.Module, small: ModelSpec) -> _InParts:
        return _InParts(model, small, about.task, in_groups)

    def compare(plain: nn.Module, parts: _InParts, small: ModelSpec) -> Finding | None:
        task = about.task
        batch = packed_batch(small, task) if about.packed else next(batches(small, task))
        with torch.no_grad():
            return parts.difference(batch)

    finding = probe(spec, change, compare)
    if finding is not None and finding.raised:
        return Finding(f"a tiny copy of it fails in parts: {finding.actual}")
    return finding


class _InParts:
    """A tiny copy whose attention, and layers with state, are recorded over whole sequences, then
    given in parts.
    """

    def __init__(self, model: nn.Module, spec: ModelSpec, task: Any, in_groups: bool) -> None:
        self._ranks = _Recorded(spec.language.attention.heads, in_groups)
        self._task = copy(task)
        self._task.placed(self._ranks)
        self._model = self._task.prepare(model)

    def difference(self, batch: dict[str, torch.Tensor]) -> Finding | None:
        """Return what has no attention of transformers'. Raises Differs for another value."""
        whole = self._loss(batch)
        if not len(self._ranks):
            kind = self._model.config._attn_implementation
            return Finding(f"its attention ({kind}) is not transformers' SDPA")
        parts = self._loss(batch, 0) + self._loss(batch, 1)
        _compare(parts, whole, "it mixes tokens after attention")
        return None

    def _loss(self, batch: dict[str, torch.Tensor], rank: int | None = None) -> torch.Tensor:
        if rank is not None:
            self._ranks.take(rank)
        torch.default_generator.manual_seed(1)
        loss: torch.Tensor = self._task.loss_sum(self._model.train(), batch)
        return loss


class _Recorded(ContextRanks):
    """Computes over whole rows at first, and keeps it; then gives each of two ranks its part.

    `heads`: those of the model that is tried; an odd number makes two groups of the two ranks.
    `in_groups`: sections of a row are tried by themselves, too, as groups of the run's ranks need.
    """

    def __init__(self, heads: int, in_groups: bool) -> None:
        super().__init__(Division(2, 1 if heads % 2 == 0 else 2), None, None)
        self._divides = True
        self._in_groups = in_groups
        self._calls: list[tuple[Any, ...]] = []
        """For each attention and layer with state what it got, and last what it gave."""
        self._ranks: Sequence[int] = (0, 1)
        self._next = 0

    @property
    def sections(self) -> list[tuple[int, int]]:
        half = self.row // 2
        return [(0, half), (half, self.row)] if self._in_groups else []

    def take(self, rank: int) -> None:
        """Begin the forward pass of one of two ranks."""
        self._ranks = (rank,)
        self._next = 0

    def part(self, whole: torch.Tensor, dim: int = 1, fill: float = 0) -> torch.Tensor:
        parts = [self.division.part(whole, n, dim, fill) for n in self._ranks]
        return self.division.in_order(torch.cat(parts, dim), dim) if len(parts) > 1 else parts[0]

    def attended(
        self,
        compute: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> tuple[torch.Tensor, object]:
        heads = query, key, value
        if len(self._ranks) > 1:
            if dropout := compute.keywords.get("dropout"):
                raise Differs(f"its attention has dropout of {dropout:g}, drawn for all heads")
            output, weights = compute(*heads)
            few = max(1, key.shape[1] // 2)  # with the query heads that see them
            counts = few * query.shape[1] // key.shape[1], few, few
            more = {}
            if (sinks := compute.keywords.get("s_aux")) is not None:
                more["s_aux"] = sinks[: counts[0]]
            own = (part[:, :n] for part, n in zip(heads, counts, strict=True))
            first = compute(*own, **more)[0]
            _compare(first, output[:, :, : first.shape[2]], "a head depends on other heads")
            for begin, end in self.sections:
                section = query[:, :, begin:end], *(part[:, :, :end] for part in heads[1:])
                attention = compute(*section, section=(begin, end))[0]
                _compare(attention, output[:, begin:end], "a token sees later ones")
            self._calls.append((*heads, output))
            return output, weights
        return self.part(self._recorded(heads, 2)), None

    def documents(self, lengths: Lengths) -> WholeDocuments:
        if len(self._ranks) > 1:
            return _OfWholeRows(lengths, [np.arange(self.row)], alone=self.alone, ranks=self)
        return _OfParts(lengths, self.division.places(self.row), self._ranks[0], ranks=self)

    def keep(self, parts: Sequence[torch.Tensor], output: object) -> None:
        """Keep what a layer with state got and gave."""
        self._calls.append((*parts, output))

    def replayed(self, parts: Sequence[torch.Tensor]) -> object:
        """Return for this rank's tokens what a layer with state gave for whole rows."""
        return tree_map_only(torch.Tensor, self.part, self._recorded(parts, 1))

    def _recorded(self, given: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
        """Return what was given for whole rows, of which this rank has a part along `dim`."""
        if self._next == len(self._calls):
            raise Differs("a part of a sequence attends more often than a whole one")
        *whole, output = self._calls[self._next]
        for ours, theirs in zip(given, whole, strict=True):
            _compare(ours, self.part(theirs, dim), "it mixes tokens outside attention")
        self._next += 1
        return output

    def joined(self, part: torch.Tensor) -> torch.Tensor:
        if len(self._ranks) > 1:
            self._whole = part
        return self._whole

    def __len__(self) -> int:
        return len(self._calls)


@dataclass(frozen=True, kw_only=True)
class _OfWholeRows(WholeDocuments):
    """Whole documents, computed by one rank and kept."""

    ranks: _Recorded
    are_rows = False

    def computed(self, compute: Compute, parts: Sequence[torch.Tensor], number: int = 0) -> object:
        before = torch.default_generator.get_state()
        output = super().computed(compute, parts, number)
        if not torch.equal(before, torch.default_generator.get_state()):
            raise Differs("a layer with state draws random numbers (dropout), for whole documents")
        self.ranks.keep(parts, output)
        return output


@dataclass(frozen=True, kw_only=True)
class _OfParts(WholeDocuments):
    """Parts of documents, which were computed as wholes before."""

    ranks: _Recorded
    are_rows = False

    def computed(self, compute: Compute, parts: Sequence[torch.Tensor], number: int = 0) -> object:
        return self.ranks.replayed(parts)


def _compare(ours: torch.Tensor, whole: torch.Tensor, difference: str) -> None:
    alike = ours.shape == whole.shape
    error = float((ours - whole).abs().max() / whole.abs().max()) if alike else 1
    if not error <= TOLERANCE:  # nor NaN
        raise Differs(f"{difference}: a part of a sequence differs by {error:.1e}")


QUESTION = Question(
    name="whether its sequences can be divided",
    key="sequence_parallel_size",
    expected="tokens that meet in attention, or in layers with state, alone",
    hint="Remove it, or set it to 1: each rank then has whole sequences.",
    need=Need(
        "`sequence_parallel_size`",
        lambda about: about.layout.context > 1,
        lambda about: about.under(shard=2, context=2),
    ),
    ask=_ask,
    holds="Parts of a sequence, with the attention over the whole one, add up to its loss",
    otherwise=(
        "unsupported: tokens that meet outside attention and the layers with state that are found, "
        "random numbers drawn in such a layer, a router's loss"
    ),
    cost="0.1 s",
)
