"""Prepared samples: tokens on disk, memory-mapped, and cut into samples.

A part of the data (training, or held out) is a folder with four files, written once by `write_part`:
`tokens.bin` int32 [tokens], `counted.bin` bool [tokens] (whether predicting the token counts in the loss),
`samples.npy` int64 [samples, 2] (first input token, last target token), `summary.json`.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple, Protocol, TypedDict

import numpy as np

IGNORED = -100
"""The target of a position that does not count in the loss."""

_CHUNK = 1 << 24


class Sample(TypedDict):
    """targets[t] is the token that follows input_ids[t], or IGNORED."""

    input_ids: np.ndarray
    """int32 [n]"""
    targets: np.ndarray
    """int64 [n]"""


class Source(Protocol):
    """Samples by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sample: ...


class Encoded(NamedTuple):
    """A document's tokens, end-of-text included; those from `counted_from` (>= 1) on are targets."""

    tokens: Sequence[int]
    counted_from: int


@dataclass(frozen=True)
class Summary:
    """What a prepared part holds."""

    documents: int
    """Documents with text in them."""
    truncated: int
    """Documents cut at the sequence length."""
    dropped: int
    """Documents of which no target was left (a prompt as long as the sequence)."""
    tokens: int
    targets: int
    """Tokens whose prediction counts in the loss, once each per epoch."""
    samples: int
    unigram_entropy: float
    """Of the targets, in nats: the loss of a model that knows token frequencies and nothing else."""
    largest_token_id: int
    fingerprint: str
    """SHA-256 of the samples; the same wherever the same data is prepared."""

    def describe(self) -> str:
        """One line for a person."""
        cut = f" ({self.truncated:,} truncated, {self.dropped:,} dropped)" if self.truncated or self.dropped else ""
        return (
            f"{self.documents:,} documents{cut}, {self.tokens:,} tokens, {self.samples:,} samples, "
            f"{self.targets:,} targets, unigram entropy {self.unigram_entropy:.2f} nats"
        )


class PreparedSource:
    """A part that `write_part` has written, as a `Source`."""

    def __init__(self, folder: Path) -> None:
        self.summary = Summary(**json.loads((folder / "summary.json").read_text(encoding="utf-8")))
        self._samples = np.load(folder / "samples.npy", mmap_mode="r")
        self._tokens = np.memmap(folder / "tokens.bin", np.int32, mode="r", shape=(self.summary.tokens,))
        self._counted = np.memmap(folder / "counted.bin", np.bool_, mode="r", shape=(self.summary.tokens,))

    def __len__(self) -> int:
        return self.summary.samples

    def __getitem__(self, index: int) -> Sample:
        first, last = self._samples[index]
        following = slice(first + 1, last + 1)
        targets = np.where(self._counted[following], self._tokens[following].astype(np.int64), IGNORED)
        return {"input_ids": np.array(self._tokens[first:last]), "targets": targets}


def write_part(folder: Path, documents: Iterable[Encoded], sequence_length: int, concatenate: bool) -> Summary:
    """Write a part from its documents; a part without samples is only a summary.

    concatenate: the documents' stream is cut every `sequence_length` tokens, each window predicting the token
    after it, so that every token is a target once, but for a document's first: nothing before it tells of it.
    An incomplete last window is dropped unless it is the only one. Otherwise one document is one sample of at
    most `sequence_length` inputs. A sample without a target is left out.
    """
    folder.mkdir(exist_ok=True)
    longest = None if concatenate else sequence_length + 1
    starts, count, truncated, dropped = array("q", [0]), 0, 0, 0
    with open(folder / "tokens.bin", "wb") as tokens, open(folder / "counted.bin", "wb") as counted:
        for document in documents:
            count += 1
            kept = np.asarray(document.tokens[:longest], np.int32)
            truncated += len(kept) < len(document.tokens)
            if document.counted_from >= len(kept) and not concatenate:
                dropped += 1
                continue
            tokens.write(kept.data)
            counted.write((np.arange(len(kept)) >= document.counted_from).data)
            starts.append(starts[-1] + len(kept))
    samples = _windows(folder, starts[-1], sequence_length) if concatenate else _spans(starts)
    np.save(folder / "samples.npy", samples)
    summary = _summarise(folder, samples, documents=count, truncated=truncated, dropped=dropped)
    (folder / "summary.json").write_text(json.dumps(asdict(summary)), encoding="utf-8")
    return summary


def _spans(starts: array[int]) -> np.ndarray:
    edges = np.frombuffer(starts, np.int64)
    return np.stack([edges[:-1], edges[1:] - 1], axis=1)


def _windows(folder: Path, tokens: int, length: int) -> np.ndarray:
    if tokens <= length:
        length = max(tokens - 1, 1)
    count = max((tokens - 1) // length, 0)
    for name, width in (("tokens.bin", 4), ("counted.bin", 1)):  # the incomplete window
        with open(folder / name, "r+b") as file:
            file.truncate((count * length + 1) * width if count else 0)
    first = np.arange(count, dtype=np.int64) * length
    used = np.fromfile(folder / "counted.bin", np.bool_)[1:].reshape(count, length).any(axis=1)
    return np.stack([first, first + length], axis=1)[used]


def _summarise(folder: Path, samples: np.ndarray, **counts: int) -> Summary:
    frequencies, tokens, largest = np.zeros(0, np.int64), 0, -1
    digest = hashlib.sha256(samples.tobytes())
    with open(folder / "tokens.bin", "rb") as token_file, open(folder / "counted.bin", "rb") as counted_file:
        while len(part := np.fromfile(token_file, np.int32, _CHUNK)):
            counted = np.fromfile(counted_file, np.bool_, _CHUNK)
            digest.update(part.data)
            digest.update(counted.data)
            tokens, largest = tokens + len(part), max(largest, int(part.max()))
            more = np.bincount(part[counted], minlength=len(frequencies))
            more[: len(frequencies)] += frequencies
            frequencies = more
    shares = frequencies[frequencies > 0] / max(frequencies.sum(), 1)
    return Summary(
        **counts,
        tokens=tokens,
        targets=int(frequencies.sum()),
        samples=len(samples),
        unigram_entropy=float(-(shares * np.log(shares)).sum()),
        largest_token_id=largest,
        fingerprint=digest.hexdigest(),
    )
