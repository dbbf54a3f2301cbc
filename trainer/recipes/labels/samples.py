"""Labelled texts as samples: tokenised once, on one rank, into a folder of the cache."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from trainer.data.cache import Check, cached_folder
from trainer.data.dataset import Subset, check_alike
from trainer.data.digest import digests
from trainer.data.mixture import Source
from trainer.data.order import split
from trainer.data.progress import Progress
from trainer.data.sources.location import Location, locate
from trainer.distributed.ranks import Ranks
from trainer.errors import NoSamples, Problem
from trainer.recipes.labels.encoded import Encoder
from trainer.recipes.labels.kinds import Labelled, Name
from trainer.recipes.labels.numbered import Numbering
from trainer.recipes.labels.rows import Label, read_rows
from trainer.storage import Json
from trainer.supervise.process import cache_folder

if TYPE_CHECKING:
    from trainer.config.sections.labels import LabelsSection
    from trainer.config.sections.model_and_data import DataSection

_VERSION = 2
"""The version of prepared files, to be raised whenever the same input gives other files."""
_ROWS = 512
"""The rows that are tokenised at a time."""


class LabelledSource:
    """The samples of a prepared folder, memory-mapped."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.summary: Json = json.loads((folder / "summary.json").read_text())
        self._tokens = np.load(folder / "tokens.npy", mmap_mode="r")
        self._edges = np.load(folder / "edges.npy", mmap_mode="r")
        self._labels = np.load(folder / "labels.npy", mmap_mode="r")
        types = folder / "types.npy"
        self._types = np.load(types, mmap_mode="r") if types.exists() else None

    @property
    def kind(self) -> Name:
        return self.summary["kind"]  # type: ignore[no-any-return]

    def __len__(self) -> int:
        return int(self.summary["samples"])

    def __getitem__(self, index: int) -> Labelled:
        if self.kind == "reward":
            better, worse = (self._row(2 * index + side) for side in range(2))
            margin = float(self._labels[index])
            return {"chosen": better[0], "rejected": worse[0], "margin": margin}
        ids, span = self._row(index)
        sample: dict[str, np.ndarray] = {"input_ids": ids}
        sample["labels"] = self._labels[span] if self.kind == "tokens" else self._labels[index]
        if self._types is not None:
            sample["token_type_ids"] = self._types[span]
        return sample

    def _row(self, number: int) -> tuple[np.ndarray, slice]:
        span = slice(int(self._edges[number]), int(self._edges[number + 1]))
        return self._tokens[span], span


class Known(NamedTuple):
    """The kind of labels and their names, as known before they are read."""

    kind: Name
    names: Sequence[str] = ()
    """The classes of the config, or of a base that is a classifier already."""


@dataclass(frozen=True)
class LabelData:
    """The labelled samples that a run trains on and is evaluated on."""

    train: Source
    evaluations: Mapping[str, Source]
    source: LabelledSource
    """All samples of `trainer.data.path`, of which some may be held out."""
    largest_token_id: int
    check: Check

    @property
    def kind(self) -> Name:
        return self.source.kind

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.source.summary["names"])

    @property
    def count(self) -> int:
        """The number of classes, or of numbers in a label."""
        return int(self.source.summary["count"])

    @property
    def centre(self) -> list[float]:
        """The mean of labels that are numbers."""
        return list(self.source.summary["centre"])

    @property
    def fingerprint(self) -> str:
        return str(self.source.summary["fingerprint"])

    def describe(self) -> str:
        summary = self.source.summary
        held_out = sum(map(len, self.evaluations.values()))
        lines = {
            "single": f"{self.count} classes",
            "multi": f"any of {self.count} classes",
            "tokens": f"{self.count} classes of tokens",
            "regression": f"{self.count} numbers" if self.count > 1 else "a number",
            "reward": "pairs of answers",
        }
        text = f"{len(self.train):,} samples, {held_out:,} held out, {lines[self.kind]}"
        for name, verb in (("dropped", "left out"), ("truncated", "cut")):
            if count := summary[name]:
                text += f", {count:,} {verb} that are too long"
        return text

    def description(self) -> Json:
        known = ("kind", "samples", "names", "count", "dropped", "truncated")
        return {name: self.source.summary[name] for name in known} | {
            "fingerprint": self.fingerprint
        }

    @cached_property
    def longest(self) -> int:
        return int(self.source.summary["longest"])


def open_samples(
    data: DataSection,
    labels: LabelsSection,
    encoder: Encoder,
    known: Known,
    ranks: Ranks,
    progress: Progress,
) -> LabelData:
    """Prepare the data on rank 0, or find it prepared, and open it on every rank. Collective.

    Raises DataError.
    """
    cache = cache_folder()
    folders: list[Path] = []

    def opened(part: DataSection, like: LabelledSource | None) -> LabelledSource:
        work = _Preparing(part, labels, encoder, known, like)
        folder = ranks.await_first(lambda: work.prepared(cache, progress))
        source = ranks.on_own(lambda: LabelledSource(folder))
        check_alike(ranks, source.summary["fingerprint"], str(part.path))
        folders.append(folder)
        return source

    whole = opened(data, None)
    train: Source = whole
    evaluations: dict[str, Source] = {}
    if (paths := data.evaluation_path) is not None:
        named = paths if isinstance(paths, dict) else {"": paths}
        for name, path in named.items():
            evaluations[name] = opened(data.model_copy(update={"path": path}), whole)
    elif data.evaluation_fraction and len(whole) > 1:
        own, held_out = split(len(whole), data.evaluation_fraction)
        train = Subset(whole, own)
        evaluations = {"": Subset(whole, held_out)} if len(held_out) else {}
    largest = max(int(LabelledSource(folder).summary["largest"]) for folder in folders)
    check = Check(folders, begins=ranks.first)
    return LabelData(train, evaluations, whole, largest, check)


@dataclass(frozen=True)
class _Preparing:
    """The preparation of one source."""

    data: DataSection
    labels: LabelsSection
    encoder: Encoder
    known: Known
    like: LabelledSource | None
    """The training samples, for those that are held out."""

    def prepared(self, cache: Path, progress: Progress) -> Path:
        where = locate(self.data.path, self.data.format)
        progress.begin(str(where))
        content = [where.format, *digests(where.files, cache)] if where.files else [where.hub]
        alike = [self.like.summary[name] for name in ("names", "count")] if self.like else []
        rows = [self.data.text_column, self.data.max_rows, self.data.split, self.data.name]
        columns = [self.data.prompt_column, self.data.chosen_column, self.data.rejected_column]
        rows += [self.data.records, *columns]
        key = [_VERSION, content, rows, self.labels.model_dump(), list(self.known), alike]
        text = json.dumps([*key, self.encoder.key])
        name = "labels-" + hashlib.sha256(text.encode()).hexdigest()[:32]
        try:
            return cached_folder(cache, name, lambda folder: self._write(folder, where), progress)
        finally:
            progress.close()

    def _write(self, folder: Path, where: Location) -> None:
        kind = self.known.kind
        tokens = array("i")
        types = array("B")
        edges = array("q", [0])
        labels: list[tuple[str, Label]] = []
        places: list[list[int]] = []
        lost = {"dropped": 0, "truncated": 0}
        rows = read_rows(where, self.data, self.labels, kind)
        while chunk := list(islice(rows, _ROWS)):
            for text, encoded in zip(chunk, self.encoder.encode(kind, chunk), strict=True):
                if encoded is None:
                    lost["dropped"] += 1
                    continue
                lost["truncated"] += encoded.truncated
                for ids in encoded.rows:
                    tokens.extend(ids)
                    edges.append(len(tokens))
                types.extend(encoded.types)
                labels.append((text.place, text.label))
                places.append(encoded.words)
        if not labels:
            left = f", {lost['dropped']} too long" if lost["dropped"] else ""
            raise NoSamples(Problem(str(where), f"no samples{left}", "at least one"))
        numbering = self._numbering(labels)
        stored = self._stored(numbering, labels, places)
        arrays: dict[str, np.ndarray] = {
            "tokens": np.frombuffer(tokens, np.int32),
            "edges": np.frombuffer(edges, np.int64),
            "labels": stored,
        }
        if types:
            arrays["types"] = np.frombuffer(types, np.uint8)
        _save(folder, numbering, arrays, len(labels), lost)

    def _numbering(self, labels: list[tuple[str, Label]]) -> Numbering:
        kind = self.known.kind
        if self.like is not None:
            return Numbering(kind, self.like.summary["names"], int(self.like.summary["count"]))
        numbering = Numbering(kind, self.known.names)
        numbering.learn(labels)
        return numbering

    def _stored(
        self, numbering: Numbering, labels: list[tuple[str, Label]], places: list[list[int]]
    ) -> np.ndarray:
        """Return the labels of samples; of tokens one for each token."""
        if numbering.kind != "tokens":
            values = [numbering.number(*label) for label in labels]
            dtype = np.int64 if numbering.kind == "single" else np.float32
            return np.array(values, dtype)
        flat = array("i")
        for label, words in zip(labels, places, strict=True):
            numbers = [*numbering.number(*label), -100]  # the last: no word
            flat.extend(numbers[word] for word in words)
        return np.frombuffer(flat, np.int32)


def _save(
    folder: Path,
    numbering: Numbering,
    arrays: Mapping[str, np.ndarray],
    samples: int,
    lost: Mapping[str, int],
) -> None:
    digest = hashlib.sha256(json.dumps([numbering.kind, numbering.names]).encode())
    for name, values in arrays.items():
        np.save(folder / f"{name}.npy", values)
        digest.update(np.ascontiguousarray(values).data)
    kind = numbering.kind
    mean = arrays["labels"].mean(0, dtype=np.float64) if kind == "regression" else np.zeros(0)
    summary = {
        "kind": kind,
        "names": list(numbering.names),
        "count": numbering.count,
        "samples": samples,
        "largest": int(arrays["tokens"].max()),
        "longest": int(np.diff(arrays["edges"]).max()),
        "centre": mean.tolist(),
        "fingerprint": digest.hexdigest(),
        **lost,
    }
    (folder / "summary.json").write_text(json.dumps(summary))
