"""Documents to samples: tokenised once, on one rank, into a folder of the cache."""

from __future__ import annotations

import hashlib
import json
import shutil
import socket
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from trainer.config import DataSection
from trainer.data.cache import Check, cached_folder
from trainer.data.digest import digests, stamps
from trainer.data.formats import Location, locate
from trainer.data.mixture import Mixture, by_epochs, by_weights
from trainer.data.progress import QUIET, Progress
from trainer.data.sealed import stamp
from trainer.data.source import Source
from trainer.data.text import corpus
from trainer.data.text.chat import Template
from trainer.data.text.encode import Tokenised, Tokenising, chunks
from trainer.data.text.records import Document, Found, read_documents
from trainer.data.text.token_files import Cut, Origin, PartWriter, PreparedSource, Summary
from trainer.data.text.tokenizer import end_of_text, tokenizer_key
from trainer.data.workers import in_order
from trainer.distributed.ranks import Ranks
from trainer.errors import DataError, Problem

_VERSION = 4
"""The version of prepared files, to be raised whenever the same input gives other files."""


class Share(NamedTuple):
    """A source, and the number of its samples in an epoch."""

    label: str
    source: PreparedSource
    samples: int

    def describe(self, whole: int) -> str:
        often = (
            f"{self.samples / whole:.1%} of it, each {self.samples / len(self.source):.2f} times"
        )
        return (
            f"{self.label}: {self.samples:,} samples an epoch ({often}), from "
            f"{self.source.summary.describe()}"
        )

    def description(self) -> dict[str, Any]:
        """Return the numbers of the samples, which a checkpoint keeps."""
        left_out = {"kind", "first_dropped", "empty", "corrupt", "first_corrupt"}
        newer = {"chats", "too_long", "fill"}  # earlier checkpoints lack them
        return {
            name: value
            for name, value in self.source.summary.flat().items()
            if name not in left_out and (value or name not in newer)
        }


@dataclass(frozen=True)
class Data:
    """The data that a run trains on and is evaluated on."""

    train: Source
    evaluations: Mapping[str, PreparedSource]
    """Held-out data by name, which shares no document with `train`. Empty if none was requested or
    there is one document."""
    shares: tuple[Share, ...]
    """The parts of `train`; a single one is all of it."""
    fingerprint: str
    """A digest of the training samples: the same wherever, and from whatever file name, the same
    data was prepared.
    """
    check: Check
    """The comparison of what this process has opened with what was written."""

    @property
    def summary(self) -> Summary:
        """The summary of the only source."""
        [share] = self.shares
        return share.source.summary

    @property
    def has_chats(self) -> bool:
        return any(share.source.summary.origin.chats for share in self.shares)

    def describe(self) -> str:
        """Describe the data for the user, on one line."""
        if len(self.shares) == 1:
            return self.summary.describe()
        have = sum(len(share.source) for share in self.shares)
        return (
            f"{len(self.shares)} sources, {len(self.train):,} samples an epoch, from {have:,} "
            "that they have"
        )

    def lines(self) -> list[str]:
        """Describe each source of a mixture, a line each; empty for a single source."""
        return (
            [share.describe(len(self.train)) for share in self.shares]
            if len(self.shares) > 1
            else []
        )

    def description(self) -> dict[str, Any]:
        """Return what a checkpoint says about the data besides the fingerprint."""
        if len(self.shares) == 1:
            return self.shares[0].description()
        return {
            share.label: {**share.description(), "samples_an_epoch": share.samples}
            for share in self.shares
        }

    @property
    def largest_token_id(self) -> int:
        """The largest token id in any part, to be compared with the model's embedding."""
        parts = [*(share.source for share in self.shares), *self.evaluations.values()]
        return max(part.summary.largest_token_id for part in parts)


def open_data(
    options: DataSection,
    tokenizer: Any,
    cache_folder: Path,
    ranks: Ranks,
    seed: int = 0,
    progress: Progress = QUIET,
) -> Data:
    """Prepare the data on rank 0, or find it prepared, and open it on every rank. Collective.

    `seed` decides which samples an epoch of a mixture takes from a source of which it takes a part.
    Raises the same DataError (the input) or DiskError (the cache) on every rank.
    """

    looked_at: list[Path] = []
    folders: list[Path] = []

    def prepared(part: DataSection) -> Path:
        looked_at.append(prepare(part, tokenizer, cache_folder, progress if ranks.first else QUIET))
        return looked_at[-1]

    def opened(part: DataSection) -> tuple[PreparedSource, PreparedSource | None]:
        folders.append(_located(part, prepared, ranks))
        evaluation = folders[-1] / "evaluation"
        held_out = PreparedSource(evaluation) if evaluation.is_dir() else None
        return PreparedSource(folders[-1] / "train"), held_out

    evaluations: dict[str, PreparedSource] = {}
    if (paths := options.evaluation_path) is not None:
        options = options.model_copy(update={"evaluation_fraction": 0.0})
        named = paths if isinstance(paths, dict) else {"": paths}
        evaluations = {
            name: opened(options.model_copy(update={"path": path}))[0]
            for name, path in named.items()
        }
    if not options.sources:
        train, own = opened(options)
        found = {"": own} if own is not None else {}
        return Data(
            train,
            evaluations or found,
            (Share("", train, len(train)),),
            train.summary.fingerprint,
            Check(folders, bool(looked_at)),
        )
    labels = [source.label or str(source.path) for source in options.sources]
    settings = [
        source.model_dump(exclude={"label", "weight", "epochs"}) for source in options.sources
    ]
    parts = [opened(options.model_copy(update=own)) for own in settings]
    sizes = [len(train) for train, _ in parts]
    weights = [source.weight for source in options.sources if source.weight is not None]
    counts = (
        by_weights(sizes, weights)
        if weights
        else by_epochs(sizes, [s.epochs or 1 for s in options.sources])
    )
    shares = tuple(
        Share(label, part[0], count)
        for label, part, count in zip(labels, parts, counts, strict=True)
    )
    found = {label: own for label, (_, own) in zip(labels, parts, strict=True) if own is not None}
    digest = hashlib.sha256(
        json.dumps([[s.source.summary.fingerprint, s.samples] for s in shares]).encode()
    )
    mixture = Mixture([share.source for share in shares], counts, seed)
    return Data(
        mixture, evaluations or found, shares, digest.hexdigest(), Check(folders, bool(looked_at))
    )


def _located(options: DataSection, prepared: Callable[[DataSection], Path], ranks: Ranks) -> Path:
    """Return this rank's folder of a source; its samples are those of every rank. Collective."""

    def stamped() -> tuple[Path, tuple[int, int] | None]:
        folder = prepared(options)
        return folder, stamp(folder)

    folder, looked_at_by_first = ranks.await_first(stamped)
    hosts = ranks.gather(socket.gethostname())
    speaks = hosts.index(hosts[ranks.rank])  # one rank of each machine

    def found() -> Path | None:
        if stamp(folder) == looked_at_by_first:
            return folder
        # a machine that does not share rank 0's cache prepares its own, with the same samples
        return prepared(options) if speaks == ranks.rank else None

    own = ranks.await_each(found)[speaks]
    assert own is not None
    fingerprints = ranks.gather(PreparedSource(own / "train").summary.fingerprint)
    if others := [
        str(rank) for rank, fingerprint in enumerate(fingerprints) if fingerprint != fingerprints[0]
    ]:
        seen = f"other samples on rank {', '.join(others)} than on rank 0"
        expected = (
            "the same files, and the same versions of Python and the tokenizer, on every machine"
        )
        raise DataError(Problem(str(locate(options.path, options.format)), seen, expected))
    return own


def prepare(
    options: DataSection, tokenizer: Any, cache_folder: Path, progress: Progress = QUIET
) -> Path:
    """Return the folder of a prepared source: `train`, and `evaluation` if any is held out; written
    if missing.

    Deterministic; the folder appears whole or not at all, and a killed process's work is begun
    anew. Its name is a digest of the input: the files' content, the tokenizer, the options. A data
    set of the hub is prepared once, even if it changes there later.
    """
    end_of_text(tokenizer)
    location = locate(options.path, options.format)
    cut = Cut(options.sequence_length, options.documents, options.isolate, options.too_long)
    shape = [*astuple(cut), options.evaluation_fraction, options.name, options.split]
    columns = [
        options.text_column,
        options.prompt_column,
        options.completion_column,
        options.chat_column,
    ]
    template = Template.of(tokenizer, options.chat_template, options.loss_on)
    skips = options.corrupt == "skip"
    read = [
        options.records,
        columns,
        template.key,
        *(["skip"] if skips else []),
        *filter(None, [options.max_rows]),
    ]
    before = stamps(location.files)
    progress.begin(str(location))
    looked = partial(_looked_at, progress, len(location.files))
    content = [location.hub or corpus.name()]
    if location.files:
        content = [location.format, *digests(location.files, cache_folder, looked)]
    key = json.dumps([_VERSION, tokenizer_key(tokenizer), content, shape, read])
    name = "data-" + hashlib.sha256(key.encode()).hexdigest()[:32]

    def write(folder: Path) -> None:
        work = Tokenising(template, cut, options.evaluation_fraction, skips)
        _write(folder, location, options, work, progress)
        if stamps(location.files) != before:
            raise DataError(
                Problem(str(location), "changed while it was read", "files that stay as they are")
            )

    try:
        return cached_folder(cache_folder, name, write, progress)
    finally:
        progress.close()


def _looked_at(progress: Progress, files: int, done: int) -> None:
    progress.say(f"looked at {done:,} of {files:,} files, whether they are known")


def _write(
    folder: Path, location: Location, options: DataSection, work: Tokenising, progress: Progress
) -> None:
    found, done = Found(), 0
    parts = [
        PartWriter(folder / name)
        for name in (("train", "evaluation") if work.fraction else ("train",))
    ]
    given = chunks(_documents(location, options, found))
    results: Generator[Tokenised, None, None] = in_order(work, given, options.workers)
    with closing(results):
        for result in results:
            for part, documents in zip(parts, (result.train, result.held), strict=False):
                part.append(documents)
            if result.error is not None:
                raise result.error
            done += result.documents
            progress.at(found.share, done, sum(part.tokens for part in parts))
    progress.say("arranging samples")
    summaries = [part.finish(work.cut, _origin(found, work.template)) for part in parts]
    _check_samples(location, summaries[0])
    if work.fraction and not summaries[1].samples:
        shutil.rmtree(folder / "evaluation")


def _origin(found: Found, template: Template) -> Origin:
    chats = bool(found.roles)
    if not chats:
        return Origin(found.describe(), empty=found.empty)
    learned = {"assistant": "the answers", "last_assistant": "the last answer"}.get(
        template.loss_on, "all tokens"
    )
    return Origin(f"{found.describe()}, by {template.origin}, loss on {learned}", True, found.empty)


def _documents(location: Location, options: DataSection, found: Found) -> Iterator[Document]:
    """Yield the documents that are not empty, and errors of skipped ones. Raises DataError if there
    are none.
    """
    rows = used = 0
    skipped: DataError | None = None
    for document in read_documents(location, options, found):
        rows += 1
        if isinstance(document, DataError):
            skipped = skipped or document
        elif document is not None:
            used += 1
        if document is not None:
            yield document
    if not used and skipped is not None:  # no document is left
        raise skipped
    if not used:
        seen = f"{rows} documents, all of them empty" if rows else "no documents"
        raise DataError(Problem(str(location), seen, "at least one with text in it"))


def _check_samples(location: Location, summary: Summary) -> None:
    if not summary.samples:
        seen = f"nothing to learn in {summary.describe_documents()}"
        mend = "Raise trainer.data.sequence_length, or add data"
        raise DataError(Problem(str(location), seen, "at least one sample", mend))
