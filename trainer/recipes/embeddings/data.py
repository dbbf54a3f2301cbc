"""Texts to samples: tokenised once, into a folder of the cache, which is read by memory maps.

A part (training, or held out) has `tokens.bin` int32 [tokens]; `edges.npy` int64 [texts + 1], where
each text begins; `texts.npy` int64 [samples, columns], a digest of each text without its prompt.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np

from trainer.config.sections.embeddings import EmbeddingsSection
from trainer.config.sections.model_and_data import DataSection
from trainer.data.cache import Check, cached_folder
from trainer.data.dataset import check_alike
from trainer.data.digest import digests, stamps
from trainer.data.order import held_out
from trainer.data.progress import Progress
from trainer.data.sources.formats import Row
from trainer.data.sources.location import Location, locate, rows_of
from trainer.data.text.tokenizer import tokenizer_key
from trainer.distributed.ranks import Ranks
from trainer.errors import DataError, NoSamples, Problem, refused
from trainer.recipes.embeddings.columns import Columns, check_columns
from trainer.storage import Json, parse_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_VERSION = 1
"""The version of prepared files, to be raised whenever the same input gives other files."""
_CHUNK = 512
"""The number of rows that are tokenised at once."""
SUMMARY = "summary.json"


class TextSample(TypedDict):
    """An anchor, its positive, and its negatives."""

    tokens: list[np.ndarray]
    """The tokens of each, int32 [its length]."""
    texts: np.ndarray
    """A digest of each text, int64 [columns]: equal texts have equal ones."""
    real: bool
    """False for a stand-in, which counts for nothing."""


@dataclass(frozen=True)
class TextSummary:
    """The content of a prepared part, in numbers."""

    samples: int
    columns: int
    tokens: int
    truncated: int
    """The number of texts cut at the sequence length."""
    largest_token_id: int
    fingerprint: str

    def describe(self) -> str:
        negatives = self.columns - 2
        kind = f"triplets with {negatives} negatives" if negatives > 1 else "triplets"
        cut = f", {self.truncated:,} texts truncated" if self.truncated else ""
        kind = kind if negatives else "pairs"
        return f"{self.samples:,} {kind}, {self.tokens:,} tokens{cut}"


class Texts:
    """A part that was written by `prepare`, as a `Source`."""

    def __init__(self, folder: Path) -> None:
        self.summary = TextSummary(**parse_json((folder / SUMMARY).read_text(encoding="utf-8")))
        self._tokens = np.memmap(folder / "tokens.bin", np.int32, mode="r")
        self._edges = np.load(folder / "edges.npy", mmap_mode="r")
        self._texts = np.load(folder / "texts.npy", mmap_mode="r")

    def __len__(self) -> int:
        return self.summary.samples

    def __getitem__(self, index: int) -> TextSample:
        first = index * self.summary.columns
        edges = self._edges[first : first + self.summary.columns + 1]
        spans = zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)
        tokens = [self._tokens[begin:end] for begin, end in spans]
        return {"tokens": tokens, "texts": np.array(self._texts[index]), "real": True}


@dataclass(frozen=True)
class TextData:
    """The data that a run trains on and is evaluated on."""

    train: Texts
    evaluations: Mapping[str, Texts]
    check: Check

    @property
    def fingerprint(self) -> str:
        return self.train.summary.fingerprint

    def describe(self) -> str:
        held_out = "".join(f", {len(part):,} held out" for part in self.evaluations.values())
        return self.train.summary.describe() + held_out

    def description(self) -> Json:
        return vars(self.train.summary).copy()

    @property
    def largest_token_id(self) -> int:
        parts = (self.train, *self.evaluations.values())
        return max(part.summary.largest_token_id for part in parts)


@dataclass(frozen=True)
class TextTokens:
    """How a row's texts become tokens, as by `SentenceTransformer.encode` with its prompts."""

    tokenizer: PreTrainedTokenizerBase
    length: int
    """The most tokens of a text, with its prompt and its special tokens."""
    query: str = ""
    document: str = ""

    def tokens(self, rows: Sequence[Sequence[str]]) -> tuple[list[list[int]], int]:
        """Return the tokens of each text of some rows, and how many texts were cut."""
        texts = [
            (self.document if column else self.query) + text
            for row in rows
            for column, text in enumerate(row)
        ]
        expected = "a tokenizer that takes every text"
        with refused("tokenizer", expected, named=True, raises=DataError):
            whole: Any = self.tokenizer(texts, return_attention_mask=False, verbose=False)
            cut: Any = self.tokenizer(
                texts, return_attention_mask=False, truncation=True, max_length=self.length
            )
        lengths = zip(whole["input_ids"], cut["input_ids"], strict=True)
        return cut["input_ids"], sum(len(one) > len(other) for one, other in lengths)

    def prompt_length(self, prompt: str) -> int:
        """Count the tokens of a prompt, without a special token behind it."""
        if not prompt:
            return 0
        tokens: Any = self.tokenizer(prompt)["input_ids"]
        return len(tokens) - (tokens[-1] in self.tokenizer.all_special_ids)

    @property
    def key(self) -> list[object]:
        prompts = [self.query, self.document]
        return [tokenizer_key(self.tokenizer), self.length, *prompts]


def open_texts(
    data: DataSection,
    options: EmbeddingsSection,
    work: TextTokens,
    cache: Path,
    ranks: Ranks,
    progress: Progress,
) -> TextData:
    """Prepare the data on the first rank, or find it prepared, and open it. Collective.

    Raises the same DataError or DiskError on every rank.
    """
    folders: list[Path] = []

    def opened(path: object, fraction: float) -> Path:
        given = data.model_copy(update={"path": path})
        quiet = progress if ranks.first else Progress(moves=progress.moves)

        def prepared() -> Path:
            return prepare(given, options, work, fraction, cache, quiet)

        ranks.await_first(prepared)
        # a machine that does not share the cache prepares its own
        folder = ranks.await_each(prepared)[ranks.rank]
        folders.append(folder)
        check_alike(ranks, Texts(folder / "train").summary.fingerprint, str(path))
        return folder

    check_columns(options)
    named = data.evaluation_path
    whole = opened(data.path, 0.0 if named is not None else data.evaluation_fraction)
    evaluations = {}
    if (whole / "evaluation").is_dir():
        evaluations[""] = Texts(whole / "evaluation")
    others = named if isinstance(named, dict) else {"": named}
    for name, path in others.items() if named else ():
        evaluations[name] = Texts(opened(path, 0.0) / "train")
    return TextData(Texts(whole / "train"), evaluations, Check(folders, begins=ranks.first))


def prepare(
    data: DataSection,
    options: EmbeddingsSection,
    work: TextTokens,
    fraction: float,
    cache: Path,
    progress: Progress,
) -> Path:
    """Return the folder of prepared texts, `train` and `evaluation`; it is written if missing."""
    location = locate(data.path, data.format)
    before = stamps(location.files)
    content = [location.hub] if location.hub else digests(location.files, cache, lambda done: None)
    rows = [data.name, data.split, data.max_rows, options.columns, options.negatives]
    key = json.dumps([_VERSION, location.format, content, rows, work.key, fraction])

    def write(folder: Path) -> None:
        _write(folder, _rows(location, data, options), work, fraction, progress)
        if stamps(location.files) != before:
            actual = "changed while it was read"
            raise DataError(Problem(str(location), actual, "files that do not change"))

    progress.begin(str(location))
    try:
        name = "texts-" + hashlib.sha256(key.encode()).hexdigest()[:32]
        return cached_folder(cache, name, write, progress)
    finally:
        progress.close()


def _rows(location: Location, data: DataSection, options: EmbeddingsSection) -> Iterator[list[str]]:
    """Yield the texts of each row. Raises DataError for rows with unequal numbers of them."""
    columns: Columns | None = None
    first: tuple[Row, int] | None = None
    wanted = options.columns or ["anchor", "positive"]
    for row in islice(
        rows_of(location, data, () if not options.columns else wanted), data.max_rows
    ):
        columns = columns or Columns.of(row, options)
        texts = columns.texts(row, options.negatives)
        first = first or (row, len(texts))
        if len(texts) != first[1]:
            actual = f"{len(texts) - 2} negatives, where {first[0].place} has {first[1] - 2}"
            hint = "Set trainer.embeddings.negatives to the fewest that a row has"
            raise DataError(Problem(row.place, actual, "as many in each row", hint))
        yield texts
    if first is None:
        raise NoSamples(Problem(str(location), "no rows", "at least one pair"))


class _Part:
    """A part that grows by some rows at a time."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder = folder
        self._file = open(folder / "tokens.bin", "wb")
        self._digest = hashlib.sha256()
        self._lengths = list[int]()
        self._texts = list[list[int]]()
        self._truncated = 0
        self._largest = -1

    def add(self, rows: Sequence[Sequence[str]], work: TextTokens) -> None:
        tokens, truncated = work.tokens(rows)
        for text in tokens:
            encoded = np.asarray(text, np.int32)
            if not len(encoded):
                raise DataError(Problem("tokenizer", "a text without tokens", "at least one"))
            self._file.write(encoded.tobytes())
            self._digest.update(encoded.tobytes())
            self._lengths.append(len(encoded))
            self._largest = max(self._largest, int(encoded.max()))
        self._texts += [[_digest_of(text) for text in row] for row in rows]
        self._truncated += truncated

    def finish(self) -> TextSummary:
        self._file.close()
        edges = np.cumsum([0, *self._lengths], dtype=np.int64)
        texts = np.array(self._texts, np.int64).reshape(len(self._texts), -1)
        np.save(self._folder / "edges.npy", edges)
        np.save(self._folder / "texts.npy", texts)
        self._digest.update(edges.tobytes())
        self._digest.update(texts.tobytes())
        shape = len(texts), texts.shape[1], int(edges[-1])
        fingerprint = self._digest.hexdigest()
        summary = TextSummary(*shape, self._truncated, self._largest, fingerprint)
        (self._folder / SUMMARY).write_text(json.dumps(vars(summary)), encoding="utf-8")
        return summary


def _write(
    folder: Path,
    rows: Iterator[list[str]],
    work: TextTokens,
    fraction: float,
    progress: Progress,
) -> None:
    train = _Part(folder / "train")
    evaluation = _Part(folder / "evaluation")
    done = kept = 0
    while some := list(islice(rows, _CHUNK)):
        numbered = [(held_out(done + at, fraction), row) for at, row in enumerate(some)]
        for part, wanted in ((train, False), (evaluation, True)):
            if own := [row for kept_back, row in numbered if kept_back == wanted]:
                part.add(own, work)
                kept += len(own) if wanted else 0
        done += len(some)
        progress.at(None, done, 0)
    train.finish()
    summary = evaluation.finish() if kept else None
    if summary is None:
        for path in (folder / "evaluation").iterdir():
            path.unlink()
        (folder / "evaluation").rmdir()


def _digest_of(text: str) -> int:
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
