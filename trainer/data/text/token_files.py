"""Prepared samples: tokens on disk, memory-mapped, and cut into samples.

A part of the data (training, or held out) is a folder with five files, written once, by a
`PartWriter`: `tokens.bin` int32 [tokens], `counted.bin` bool [tokens] (True if predicting the token
counts in the loss), `spans.npy` int64 [spans, 2] (first input token, last target token),
`samples.npy` int64 [samples + 1] (sample s is the spans from samples[s] to samples[s + 1], one
after the other), `summary.json`.
"""

from __future__ import annotations

import hashlib
import json
import os
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple, NotRequired, TypedDict

import numpy as np

from trainer.data.text.packing import pack
from trainer.errors import DataError, Problem
from trainer.tasks.task import IGNORED

_CHUNK = 1 << 22
"""The number of tokens read at once."""
SUMMARY = "summary.json"

Arrangement = Literal["concatenate", "pad", "pack"]


class Sample(TypedDict):
    """A sample; targets[t] is the token that follows input_ids[t], or IGNORED."""

    input_ids: np.ndarray
    """The input tokens, int32 [n]."""
    targets: np.ndarray
    """The targets, int64 [n]."""
    documents: NotRequired[np.ndarray]
    """The lengths of documents that must not attend to one another, int64 [documents]."""


class Encoded(NamedTuple):
    """A document's tokens, with end-of-text, and a mask of the targets, without the first token."""

    tokens: Sequence[int] | np.ndarray
    counted: Sequence[bool] | np.ndarray
    """The mask, of the same length."""
    place: str = ""
    """The row that it is from, for the user."""
    unrendered: Mapping[str, int] = {}
    """The numbers of a chat's messages by the key that its template does not render."""

    @classmethod
    def from_token(cls, tokens: Sequence[int] | np.ndarray, first: int, place: str = "") -> Encoded:
        """Encode a document of which all tokens from the `first` (>= 1) on are targets."""
        return cls(tokens, np.arange(len(tokens)) >= first, place)


class Origin(NamedTuple):
    """The kind of documents that a part was made of."""

    kind: str = "text"
    """The kind in words, for the user."""
    chats: bool = False
    empty: int = 0
    """The number of rows with nothing in them, which are not documents."""


@dataclass
class Counts:
    """The numbers of documents that were kept, changed or left out."""

    documents: int = 0
    """The number of documents with text in them."""
    truncated: int = 0
    """The number of documents cut at the sequence length."""
    too_long: int = 0
    """The number of documents left out for their length."""
    dropped: int = 0
    """The number of documents without a target after cutting (a prompt as long as the sequence)."""
    first_dropped: str = ""
    """The row of the first document that was dropped."""
    corrupt: int = 0
    """The number of rows that were skipped."""
    first_corrupt: str = ""
    """The error of the first row that was skipped."""
    unrendered: dict[str, int] = field(default_factory=dict)
    """The numbers of chats' messages by the key that the template does not render."""

    def note(self, unrendered: Mapping[str, int]) -> None:
        for key, count in unrendered.items():
            self.unrendered[key] = self.unrendered.get(key, 0) + count

    def skip(self, error: DataError) -> None:
        problem = error.problems[0]
        self.corrupt += 1
        self.first_corrupt = self.first_corrupt or f"{problem.place}: {problem.actual}"

    def add(self, other: Counts) -> None:
        self.documents += other.documents
        self.truncated += other.truncated
        self.too_long += other.too_long
        self.dropped += other.dropped
        self.corrupt += other.corrupt
        self.note(other.unrendered)
        self.first_dropped = self.first_dropped or other.first_dropped
        self.first_corrupt = self.first_corrupt or other.first_corrupt


@dataclass(frozen=True)
class Summary:
    """The content of a prepared part, in numbers."""

    counts: Counts
    origin: Origin
    tokens: int
    targets: int
    """The number of label tokens, whose prediction counts in the loss, each once per epoch."""
    samples: int
    unigram_entropy: float
    """The targets' entropy in nats: the loss of a model that knows token frequencies alone."""
    largest_token_id: int
    fingerprint: str
    """SHA-256 of the samples; the same wherever the same data is prepared."""
    fill: float | None
    """The filled share of samples of documents that are kept apart; None for others."""

    @classmethod
    def read(cls, folder: Path) -> Summary:
        known = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))
        counts = Counts(**{field.name: known.pop(field.name) for field in fields(Counts)})
        origin = Origin(**{name: known.pop(name) for name in Origin._fields})
        return cls(counts, origin, **known)

    def write(self, folder: Path) -> None:
        (folder / SUMMARY).write_text(json.dumps(self.flat()), encoding="utf-8")

    def flat(self) -> dict[str, Any]:
        """Return all numbers by name."""
        known = vars(self).copy()
        return {**asdict(known.pop("counts")), **known.pop("origin")._asdict(), **known}

    def describe(self) -> str:
        """Describe the part for the user, on one line."""
        full = "" if self.fill is None else f" of documents kept apart, {self.fill:.1%} full"
        return (
            f"{self.describe_documents()}, {self.tokens:,} tokens, {self.samples:,} samples{full}, "
            f"{self.targets:,} targets, unigram entropy {self.unigram_entropy:.2f} nats"
        )

    def describe_documents(self) -> str:
        """Describe the documents: kind, number, and how many were changed or left out."""
        counts, origin = self.counts, self.origin
        where = f", the first {counts.first_dropped}" if counts.first_dropped else ""
        changes = {
            "empty rows left out": origin.empty,
            "truncated": counts.truncated,
            "too long and left out": counts.too_long,
            f"without a target and dropped{where}": counts.dropped,
            f"corrupt and skipped, the first {counts.first_corrupt}": counts.corrupt,
        }
        changed = ", ".join(f"{count:,} {change}" for change, count in changes.items() if count)
        kind = "" if origin.kind == "text" else f"{origin.kind}: "
        return f"{kind}{counts.documents:,} documents" + (f" ({changed})" if changed else "")


class PreparedSource:
    """A part that a `PartWriter` has finished, as a `Source`."""

    def __init__(self, folder: Path) -> None:
        self.summary = Summary.read(folder)
        shape = (self.summary.tokens,)
        self._spans = np.load(folder / "spans.npy", mmap_mode="r")
        self._samples = np.load(folder / "samples.npy", mmap_mode="r")
        self._tokens = np.memmap(folder / "tokens.bin", np.int32, mode="r", shape=shape)
        self._counted = np.memmap(folder / "counted.bin", np.bool_, mode="r", shape=shape)

    def __len__(self) -> int:
        return self.summary.samples

    def __getitem__(self, index: int) -> Sample:
        begin, end = self._samples[index : index + 2]
        spans = [slice(first, last) for first, last in self._spans[begin:end].tolist()]
        following = [slice(span.start + 1, span.stop + 1) for span in spans]
        labels = [(self._counted[at], self._tokens[at].astype(np.int64)) for at in following]
        targets = [np.where(counted, tokens, IGNORED) for counted, tokens in labels]
        inputs = [self._tokens[span] for span in spans]
        sample: Sample = {"input_ids": np.concatenate(inputs), "targets": np.concatenate(targets)}
        if self.summary.fill is not None:
            sample["documents"] = np.array([len(part) for part in inputs])
        return sample


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
        self.tokens, self.counted, self.lengths = bytearray(), bytearray(), array("q")

    def add(self, document: Encoded, cut: Cut) -> None:
        """Add a document. Raises DataError if it is too long and that is an error."""
        longest = cut.longest
        self.counts.documents += 1
        self.counts.note(document.unrendered)
        if longest is not None and len(document.tokens) > longest + 1:
            if cut.too_long == "error":
                raise _too_long(document, longest)
            if cut.too_long == "drop":
                self.counts.too_long += 1
                return
            self.counts.truncated += 1
        kept = slice(None if longest is None else longest + 1)
        targets = np.array(document.counted[kept], np.bool_)
        targets[:1] = False
        if longest is not None and not targets.any():
            self.counts.dropped += 1
            self.counts.first_dropped = self.counts.first_dropped or document.place
            return
        self.tokens += np.asarray(document.tokens[kept], np.int32).tobytes()
        self.counted += targets.tobytes()
        self.lengths.append(len(targets))


class PartWriter:
    """A part that grows by some documents at a time."""

    FILES = {"tokens.bin": 4, "counted.bin": 1, "lengths.bin": 8}
    """The bytes of an entry in each file; the lengths are those of documents."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self.folder, self.counts, self.tokens = folder, Counts(), 0
        self._files = [open(folder / name, "wb") for name in self.FILES]

    def append(self, some: CutDocuments) -> None:
        parts: list[Any] = [some.tokens, some.counted, some.lengths]
        for file, part in zip(self._files, parts, strict=True):
            file.write(part)
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
        frequencies, largest = np.zeros(0, np.int64), -1
        count = len(samples) - 1
        digest = hashlib.sha256(np.ascontiguousarray(spans).data)
        if cut.isolated:  # else a sample is a span
            digest.update(np.ascontiguousarray(samples).data)
        for part, counted in self._read(tokens):
            digest.update(part.data)
            digest.update(counted.data)
            largest = max(largest, int(part.max()))
            more = np.bincount(part[counted], minlength=len(frequencies))
            more[: len(frequencies)] += frequencies
            frequencies = more
        shares = frequencies[frequencies > 0] / max(int(frequencies.sum()), 1)
        filled, room = int((spans[:, 1] - spans[:, 0]).sum()), count * cut.sequence_length
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
    dropped unless it is the only one. With `isolate`, documents of a window do not see one another.
    pad: a sample is one document of at most `sequence_length` inputs; one that is `too_long` is cut
    ("truncate"), left out ("drop") or a DataError ("error"). pack: a sample is several such
    documents, by best fit, which do not see one another.
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
    used, step = np.zeros(count, np.bool_), max(1, _CHUNK // length)
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
    spans, window = spans[used[window]], window[used[window]]
    samples = np.append(np.flatnonzero(np.diff(window, prepend=-1)), len(spans))
    return spans, samples, count * length + 1 if count else 0
