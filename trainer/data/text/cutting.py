"""Documents to samples: how they are cut, and written as a part of the data."""

from __future__ import annotations

import hashlib
import os
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trainer.data.text.packing import pack
from trainer.data.text.token_files import (
    MARGINS,
    Arrangement,
    Counts,
    Encoded,
    EncodedPair,
    Origin,
    Summary,
)
from trainer.errors import DataError, Problem

_CHUNK = 1 << 22
"""The number of tokens read at once."""


@dataclass(frozen=True)
class Cut:
    """The settings by which documents become samples."""

    sequence_length: int
    arrangement: Arrangement
    isolate: bool = False
    too_long: str = "truncate"

    @property
    def longest(self) -> int | None:
        """The most inputs that are kept of a document; None: all."""
        return None if self.arrangement == "concatenate" else self.sequence_length

    @property
    def isolated(self) -> bool:
        return self.arrangement == "pack" or (self.arrangement == "concatenate" and self.isolate)


class CutDocuments:
    """Some documents of a part, as arrays: cheap to send between processes."""

    def __init__(self) -> None:
        self.counts = Counts()
        self.tokens = bytearray()
        self.counted = bytearray()
        self.lengths = array("q")
        self.margins = array("d")
        """The margins of pairs, one for each two documents."""

    def add(self, document: Encoded, cut: Cut) -> None:
        """Add a document. Raises DataError if it is too long and that is an error."""
        self._add([document], cut)

    def add_pair(self, pair: EncodedPair, cut: Cut) -> None:
        """Add both answers, cut at the same token, or neither. Raises DataError as `add` does."""
        if self._add([pair.chosen, pair.rejected], cut):
            self.margins.append(pair.margin)

    def _add(self, documents: Sequence[Encoded], cut: Cut) -> bool:
        """Add the documents of a sample; return False if they are left out."""
        longest = cut.longest
        first = documents[0]
        self.counts.documents += 1
        for document in documents:
            self.counts.note(document.unrendered)
        if longest is not None and any(len(one.tokens) > longest + 1 for one in documents):
            if cut.too_long == "error":
                raise _too_long(max(documents, key=lambda one: len(one.tokens)), longest)
            if cut.too_long == "drop":
                self.counts.too_long += 1
                return False
            self.counts.truncated += 1
        kept = slice(None if longest is None else longest + 1)
        masks = [np.array(document.counted[kept], np.bool_) for document in documents]
        for targets in masks:
            targets[:1] = False
        if longest is not None and not all(targets.any() for targets in masks):
            self.counts.dropped += 1
            self.counts.first_dropped = self.counts.first_dropped or first.place
            return False
        for document, targets in zip(documents, masks, strict=True):
            self.tokens += np.asarray(document.tokens[kept], np.int32).tobytes()
            self.counted += targets.tobytes()
            self.lengths.append(len(targets))
        return True


class PartWriter:
    """A part that grows by some documents at a time."""

    FILES = {"tokens.bin": 4, "counted.bin": 1, "lengths.bin": 8}
    """The bytes of an entry in each file; the lengths are those of documents."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self.counts = Counts()
        self.tokens = 0
        self._margins = array("d")
        self._files = [open(folder / name, "wb") for name in self.FILES]

    def append(self, some: CutDocuments) -> None:
        parts: list[Any] = [some.tokens, some.counted, some.lengths]
        for file, part in zip(self._files, parts, strict=True):
            file.write(part)
        self._margins.extend(some.margins)
        self.counts.add(some.counts)
        self.tokens += len(some.counted)

    def close(self) -> None:
        for file in self._files:
            file.close()

    def finish(self, cut: Cut, origin: Origin) -> Summary:
        """Cut the part into samples."""
        self.close()
        lengths = np.fromfile(self.folder / "lengths.bin", np.int64)
        edges = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, out=lengths)])
        tokens = self.tokens
        if cut.arrangement == "concatenate":
            spans, samples, tokens = _windows(self.folder, edges, cut.sequence_length, cut.isolate)
        elif cut.arrangement == "pairs":
            spans, samples = _documents(edges, None)
            samples = samples[::2]
            (self.folder / MARGINS).write_bytes(self._margins.tobytes())
        else:
            capacity = cut.sequence_length if cut.arrangement == "pack" else None
            spans, samples = _documents(edges, capacity)
        np.save(self.folder / "spans.npy", spans)
        np.save(self.folder / "samples.npy", samples)
        summary = self._summary(cut, origin, tokens, spans, samples)
        for name in ("tokens.bin", "counted.bin"):  # drops the incomplete window
            os.truncate(self.folder / name, tokens * self.FILES[name])
        (self.folder / "lengths.bin").unlink()
        summary.write(self.folder)
        return summary

    def _summary(
        self, cut: Cut, origin: Origin, tokens: int, spans: np.ndarray, samples: np.ndarray
    ) -> Summary:
        frequencies = np.zeros(0, np.int64)
        largest = -1
        count = len(samples) - 1
        digest = hashlib.sha256(np.ascontiguousarray(spans).data)
        if cut.isolated:  # else a sample is a span, or two
            digest.update(np.ascontiguousarray(samples).data)
        if any(self._margins):
            digest.update(self._margins.tobytes())
        for part, counted in self._read(tokens):
            digest.update(part.data)
            digest.update(counted.data)
            largest = max(largest, int(part.max()))
            more = np.bincount(part[counted], minlength=len(frequencies))
            more[: len(frequencies)] += frequencies
            frequencies = more
        shares = frequencies[frequencies > 0] / max(int(frequencies.sum()), 1)
        filled = int((spans[:, 1] - spans[:, 0]).sum())
        room = count * cut.sequence_length
        return Summary(
            self.counts,
            origin,
            tokens=tokens,
            targets=int(frequencies.sum()),
            samples=count,
            unigram_entropy=float(-(shares * np.log(shares)).sum()),
            largest_token_id=largest,
            fingerprint=digest.hexdigest(),
            fill=filled / room if cut.isolated and count else None,
        )

    def _read(self, count: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield the first `count` tokens and their mask, a part at a time."""
        with (
            open(self.folder / "tokens.bin", "rb") as tokens,
            open(self.folder / "counted.bin", "rb") as counted,
        ):
            for at in range(0, count, _CHUNK):
                some = min(_CHUNK, count - at)
                yield np.fromfile(tokens, np.int32, some), np.fromfile(counted, np.bool_, some)


def write_part(folder: Path, documents: Iterable[Encoded], cut: Cut) -> Summary:
    """Write a part from its documents; a part without samples is only a summary.

    A sample without a target is left out. concatenate: the stream of documents is cut every
    `sequence_length` tokens, and each window predicts the token after it, so that every token is a
    target once, except a document's first, which nothing predicts. An incomplete last window is
    dropped unless it is the only one. With `isolate`, documents of a window are kept apart.
    pad: a sample is one document of at most `sequence_length` inputs; one that is `too_long` is cut
    ("truncate"), left out ("drop") or a DataError ("error"). pack: a sample is several such
    documents, by best fit, which do not attend to one another.
    """
    writer = PartWriter(folder)
    for document in documents:
        some = CutDocuments()
        some.add(document, cut)
        writer.append(some)
    return writer.finish(cut, Origin())


def _too_long(document: Encoded, longest: int) -> DataError:
    actual = f"{len(document.tokens) - 1:,} tokens"
    expected = f"at most {longest:,} (trainer.data.sequence_length)"
    hint = 'Raise it, or set trainer.data.too_long to "truncate" or "drop"'
    return DataError(Problem(document.place or "a document", actual, expected, hint))


def _documents(edges: np.ndarray, capacity: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Return spans and samples of documents with these edges: one each, or packed to a capacity."""
    spans = np.stack([edges[:-1], edges[1:] - 1], axis=1)
    if capacity is None:
        return spans, np.arange(len(spans) + 1)
    order, samples = pack(spans[:, 1] - spans[:, 0], capacity)
    return spans[order], samples


def _windows(
    folder: Path, edges: np.ndarray, length: int, isolate: bool
) -> tuple[np.ndarray, np.ndarray, int]:
    """Cut the stream into windows; return spans, samples, and the number of tokens in them."""
    tokens = int(edges[-1])
    if tokens <= length:
        length = max(tokens - 1, 1)
    count = max((tokens - 1) // length, 0)
    used = np.zeros(count, np.bool_)
    step = max(1, _CHUNK // length)
    with open(folder / "counted.bin", "rb") as file:
        file.seek(1)
        for at in range(0, count, step):
            some = min(step, count - at)
            counted = np.fromfile(file, np.bool_, some * length).reshape(some, length)
            used[at : at + some] = counted.any(axis=1)
    cuts = np.arange(count + 1, dtype=np.int64) * length
    if isolate:
        cuts = np.union1d(cuts, edges[edges < cuts[-1]])
    spans = np.stack([cuts[:-1], cuts[1:]], axis=1)
    window = spans[:, 0] // length
    spans = spans[used[window]]
    window = window[used[window]]
    samples = np.append(np.flatnonzero(np.diff(window, prepend=-1)), len(spans))
    return spans, samples, count * length + 1 if count else 0
