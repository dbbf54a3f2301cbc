"""Prepared samples: tokens on disk, memory-mapped, and cut into samples.

A part of the data (training, or held out) is a folder with five files, written once, by a
`PartWriter`: `tokens.bin` int32 [tokens], `counted.bin` bool [tokens] (True if predicting the token
counts in the loss), `spans.npy` int64 [spans, 2] (first input token, last target token),
`samples.npy` int64 [samples + 1] (sample s is the spans from samples[s] to samples[s + 1], one
after the other), `summary.json`. A part of pairs, whose samples are two spans each, has a sixth:
`margins.bin` float64 [samples].
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple, NotRequired, Protocol, TypedDict, TypeVar

import numpy as np

from trainer.errors import DataError
from trainer.storage import Json
from trainer.tasks.task import IGNORED

SUMMARY = "summary.json"

MARGINS = "margins.bin"

S = TypeVar("S", bound=Mapping[str, object])

Arrangement = Literal["concatenate", "pad", "pack", "pairs"]


class Column(Protocol):
    """Values that were computed of each sample, by its number."""

    def __getitem__(self, index: int, /) -> object: ...


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


class EncodedPair(NamedTuple):
    """Two answers to one prompt, each with the prompt before it, of which no token is a target."""

    chosen: Encoded
    rejected: Encoded
    margin: float
    """How much better the chosen one is, as the data says; 0 if it does not."""


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

    def flat(self) -> Json:
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
        counts = self.counts
        origin = self.origin
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
        self._columns: dict[str, Column] = {}

    def add_column(self, name: str, column: Column) -> None:
        """Add what was computed of each sample to the samples from now on, under this name."""
        self._columns[name] = column

    def __len__(self) -> int:
        return self.summary.samples

    def __getitem__(self, index: int) -> Sample:
        begin, end = self._samples[index : index + 2]
        return self._with_columns(self._of_spans(begin, end), index)

    def _with_columns(self, sample: S, index: int) -> S:
        own: Any = {name: column[index] for name, column in self._columns.items()}
        return {**sample, **own}  # type: ignore[return-value]

    def _of_spans(self, begin: int, end: int) -> Sample:
        spans = [slice(first, last) for first, last in self._spans[begin:end].tolist()]
        following = [slice(span.start + 1, span.stop + 1) for span in spans]
        labels = [(self._counted[at], self._tokens[at].astype(np.int64)) for at in following]
        targets = [np.where(counted, tokens, IGNORED) for counted, tokens in labels]
        inputs = [self._tokens[span] for span in spans]
        sample: Sample = {"input_ids": np.concatenate(inputs), "targets": np.concatenate(targets)}
        if self.summary.fill is not None:
            sample["documents"] = np.array([len(part) for part in inputs])
        return sample


class PairSample(TypedDict):
    """A sample of two answers to one prompt."""

    chosen: Sample
    rejected: Sample
    margin: float
    reference: NotRequired[np.ndarray]
    """The reference's log-probabilities of both answers, in nats, float64 [2]."""


class PreparedPairs(PreparedSource):
    """A part of pairs, and what the reference says of each, once it is known."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.margins = np.fromfile(folder / MARGINS, np.float64)

    def refer_to(self, reference: np.ndarray) -> None:
        """Add a reference's log-probabilities to the samples from now on, float64 [samples, 2]."""
        self.add_column("reference", reference)

    def __getitem__(self, index: int) -> PairSample:  # type: ignore[override]
        begin = int(self._samples[index])
        sample: PairSample = {
            "chosen": self._of_spans(begin, begin + 1),
            "rejected": self._of_spans(begin + 1, begin + 2),
            "margin": float(self.margins[index]),
        }
        return self._with_columns(sample, index)


def opened_part(folder: Path) -> PreparedSource:
    """Open a part, of documents or of pairs."""
    return PreparedPairs(folder) if (folder / MARGINS).exists() else PreparedSource(folder)
