"""Sequences at whose lengths code may branch: a step for each, after those of the tiny run.

A window as long as the sequence hides nothing; sequences that ranks share are padded to a length
that can be divided; an MLP computes tiles of tokens. Each such length is tried, with one token
less and one more. If documents are packed, long ones are tried, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from trainer.certify.tiny_run import LONGEST, Tiny
from trainer.models.tiny_config import windows_of
from trainer.parallel.parallel_mesh import division_of
from trainer.tasks.task import Sample

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

Edge = list[list[int]]
"""The lengths in tokens of the documents of each sequence of a micro-batch."""


class Document(NamedTuple):
    inputs: np.ndarray
    targets: np.ndarray
    """The token that follows each input; all count."""


def edges_of(small: Tiny, config: PreTrainedConfig, heads: int, long: int) -> list[Edge]:
    """List the lengths to try for the tiny copy's `config`; if packed, with one of `long` tokens.

    `heads` is the number of attention heads, by which context parallelism divides sequences.
    """
    windows = windows_of(config)
    lengths = {*windows, small.layout.recompute.tile}
    if small.layout.context > 1:
        lengths.add(division_of(small.layout, heads).filled(LONGEST // 2))
    widths = sorted({n + more for n in lengths if n > 1 for more in (-1, 0, 1)})
    edges: list[Edge] = [[[width], [max(1, width - 2)]] for width in widths]
    if small.packed:
        edges += [[[n - 1, n, n + 1], [n + 1, 1, n]] for n in sorted(windows) if n > 1]
        half = long // 2
        edges.append([[half, long - half - 3, 3], [3, LONGEST - 3]])
    return edges


def note_of(edges: list[Edge], packed: bool) -> list[str]:
    """Return a note on the lengths, if there are any."""
    widths = sorted({sum(row) for edge in edges for row in edge[:1]})
    if not widths:
        return []
    names = ", ".join(map(str, widths))
    return [
        f"{'packed sequences' if packed else 'sequences'} of {names} tokens, where code may branch"
    ]


def rows_at(edge: Edge, small: Tiny, vocabulary: int, place: tuple[int, int, int]) -> list[Sample]:
    """Draw the documents of each sequence of a micro-batch.

    `place` is the micro-batch's step, its data rank and its number in the step.
    """
    rng = np.random.default_rng([2, *place])
    rows = []
    for number in range(small.layout.micro_batch):
        drawn = [rng.integers(1, vocabulary, n + 1) for n in edge[number % len(edge)]]
        rows.append([Document(tokens[:-1], tokens[1:]) for tokens in drawn])
    return rows


def samples_at(
    edge: Edge, small: Tiny, vocabulary: int, place: tuple[int, int, int]
) -> list[Sample]:
    """Return the sequences of `rows_at` as samples, which a task collates."""
    samples = []
    for documents in rows_at(edge, small, vocabulary, place):
        inputs, targets = (np.concatenate(part) for part in zip(*documents, strict=True))
        sample: dict[str, Any] = {"input_ids": inputs, "targets": targets}
        if small.packed:
            sample["documents"] = [len(document.inputs) for document in documents]
        samples.append(sample)
    return samples
