"""Documents to samples: tokenised once, on one rank, into a folder of the cache."""

from __future__ import annotations

import hashlib
import json
import shutil
import socket
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import astuple, replace
from multiprocessing.sharedctypes import RawArray
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.config import DataSection
from trainer.config.sections.pair_losses import PairedDataSection
from trainer.data.cache import Check, cached_folder
from trainer.data.dataset import check_alike
from trainer.data.digest import digests, stamps
from trainer.data.mixture import Mixture, samples_an_epoch
from trainer.data.order import OF_SEED_0, SampleOrder
from trainer.data.progress import QUIET, Progress
from trainer.data.sealed import stamp
from trainer.data.sources.location import Location, locate
from trainer.data.sources.remote import listing_of
from trainer.data.stream import Stream, stream_files
from trainer.data.text import corpus
from trainer.data.text.chats.chat import Template
from trainer.data.text.cutting import PartWriter
from trainer.data.text.encode import Tokenised, Tokenising, chunks
from trainer.data.text.preferences import kinds_of_pairs
from trainer.data.text.prepared import Data, Share
from trainer.data.text.records import Document, RowsRead, read_documents
from trainer.data.text.token_files import Origin, PreparedSource, Summary, opened_part
from trainer.data.text.tokenizer import end_of_text, tokenizer_key
from trainer.data.workers import in_order
from trainer.distributed.ranks import Ranks
from trainer.errors import DataError, NoSamples, Problem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from trainer.config.sections.pair_losses import Ranked

_SILENT_SECONDS = 600.0
"""Seconds for which the preparation of a stream's file may show no progress, as in its end."""
_VERSION = 5
"""The version of prepared files, to be raised whenever the same input gives other files."""


def open_data(
    options: DataSection,
    tokenizer: PreTrainedTokenizerBase,
    cache_folder: Path,
    ranks: Ranks,
    order: SampleOrder = OF_SEED_0,
    progress: Progress = QUIET,
) -> Data:
    """Prepare the data on rank 0, or find it prepared, and open it on every rank. Collective.

    `order` decides which samples an epoch of a mixture takes from a source of which it takes a
    part.
    Raises the same DataError (the input) or DiskError (the cache) on every rank.
    """
    opening = _Opening(tokenizer, cache_folder, ranks, progress)
    files = ranks.await_first(lambda: stream_files(options)) if options.stream else {}
    evaluations: dict[str, PreparedSource] = {}
    if (paths := options.evaluation_path) is not None:
        options = options.model_copy(update={"evaluation_fraction": 0.0})
        named = paths if isinstance(paths, dict) else {"": paths}
        for name, path in named.items():
            plain = options.model_copy(update={"path": path, "fim": None})
            evaluations[name] = opening.open(plain)[0]
    if files:
        data = opening.stream(options, files, order.seed)
        return replace(data, evaluations=evaluations or data.evaluations)
    if not options.sources:
        train, evaluated = opening.open(options)
        held_out = {} if evaluated is None else {"": evaluated}
        share = Share("", train, len(train))
        fingerprint = train.summary.fingerprint
        return Data(train, evaluations or held_out, (share,), fingerprint, opening.check())
    sources: dict[str, PreparedSource] = {}
    held_out = {}
    for source in options.sources:
        label = source.label or str(source.path)
        own = source.model_dump(exclude={"label", "weight", "epochs"})
        sources[label], evaluated = opening.open(options.model_copy(update=own))
        held_out |= {} if evaluated is None else {label: evaluated}
    counts = samples_an_epoch(options.sources, [len(source) for source in sources.values()])
    each = zip(sources.items(), counts, strict=True)
    shares = tuple(Share(label, source, count) for (label, source), count in each)
    mixture = Mixture([share.source for share in shares], counts, order)
    parts = json.dumps([[share.source.summary.fingerprint, share.samples] for share in shares])
    fingerprint = hashlib.sha256(parts.encode()).hexdigest()
    return Data(mixture, evaluations or held_out, shares, fingerprint, opening.check())


class _Files:
    """The files of a stream, each of which is prepared when its samples are needed."""

    def __init__(self, options: DataSection, names: Sequence[str], opening: _Opening) -> None:
        self._options = options
        self._names = names
        self._opening = opening
        self._moved = RawArray("d", 1)
        """When the process that prepares the next file has last made progress."""

    def __len__(self) -> int:
        return len(self._names)

    def source(self, file: int) -> DataSection:
        held_out = self._options.evaluation_fraction if file == 0 else 0.0
        update = {"path": self._names[file], "evaluation_fraction": held_out}
        return self._options.model_copy(update=update)

    def prepared(self, file: int) -> Path | None:
        self._moves(0.0)
        try:
            return self._opening.prepared(self.source(file), Progress(moves=self._moves))
        except NoSamples:
            if self._options.corrupt == "skip":
                return None
            raise

    def _moves(self, seconds: float) -> None:
        self._moved[0] = time.monotonic() + seconds

    def opened(self, folder: Path) -> PreparedSource:
        return opened_part(folder / "train")

    def awaits(self, file: int, since: float) -> None:
        own = self._opening.progress
        own.note(f"note: the next samples are of {self._names[file]}; it is still being prepared")
        own.moves(max(self._moved[0], since) + _SILENT_SECONDS - time.monotonic())

    def skips(self, file: int) -> None:
        self._opening.progress.note(f"note: {self._names[file]} has no samples and is left out")


class _Opening:
    """Opens sources on each rank, and remembers their folders."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, cache: Path, ranks: Ranks, progress: Progress
    ) -> None:
        self._tokenizer = tokenizer
        self._cache = cache
        self._ranks = ranks
        self._progress = progress if ranks.first else Progress(moves=progress.moves)
        self.progress = progress
        """The progress of this rank itself; that above is silent on the others."""
        self._folders: list[Path] = []
        self._prepares = False
        """True if this rank has prepared a source, or compared it with what was written."""

    def open(self, options: DataSection) -> tuple[PreparedSource, PreparedSource | None]:
        """Return the training part of a source, and its held-out part if there is one. Collective.

        The samples are those of every rank; otherwise raises DataError.
        """
        folder = self._locate(options)
        self._folders.append(folder)
        train = opened_part(folder / "train")
        evaluation = folder / "evaluation"
        where = str(options.path or "the embedded corpus")
        check_alike(self._ranks, train.summary.fingerprint, where)
        return train, opened_part(evaluation) if evaluation.is_dir() else None

    def check(self) -> Check:
        return Check(self._folders, begins=self._prepares)

    def stream(self, options: DataSection, files: Mapping[str, int | None], seed: int) -> Data:
        """Open the stream of files, by their names with their bytes. Collective."""
        own = _Files(options, list(files), self)
        first, evaluated = self.open(own.source(0))
        train = Stream(own, seed, self._folders[::-1])
        known = [(Path(name).name, size) for name, size in files.items()]
        whole = json.dumps([known, first.summary.fingerprint])
        held_out = {"": evaluated} if evaluated else {}
        fingerprint = hashlib.sha256(whole.encode()).hexdigest()
        return Data(train, held_out, (Share("", first, len(first)),), fingerprint, self.check())

    def _locate(self, options: DataSection) -> Path:
        """Return this rank's folder of a source: rank 0's, or that of its machine. Collective."""

        def on_first() -> tuple[Path, tuple[int, int] | None]:
            folder = self._prepare(options)
            return folder, stamp(folder)

        folder, first_stamp = self._ranks.await_first(on_first)
        if not self._ranks.any(stamp(folder) != first_stamp):
            return folder
        hosts = self._ranks.gather(socket.gethostname())
        speaker = hosts.index(hosts[self._ranks.rank])  # one rank of each machine

        def on_each() -> Path | None:
            if stamp(folder) == first_stamp:
                return folder
            # a machine that does not share rank 0's cache prepares its own, with the same samples
            return self._prepare(options) if speaker == self._ranks.rank else None

        own = self._ranks.await_each(on_each)[speaker]
        assert own is not None
        return own

    def _prepare(self, options: DataSection) -> Path:
        self._prepares = True
        return self.prepared(options, self._progress)

    def prepared(self, options: DataSection, progress: Progress) -> Path:
        """Return the folder of a source, which this process prepares if it is missing."""
        return prepare(options, self._tokenizer, self._cache, progress)


def prepare(
    options: DataSection,
    tokenizer: PreTrainedTokenizerBase,
    cache_folder: Path,
    progress: Progress = QUIET,
) -> Path:
    """Return the folder of a prepared source, `train` and `evaluation`; it is written if missing.

    Deterministic; the folder appears whole or not at all, and a killed process's work starts
    over. Its name is a digest of the input: the files' content (of one at an address, what its file
    system knows of it), the tokenizer, the options. A data set of the hub is prepared once, even if
    it changes there later.
    """
    end_of_text(tokenizer)
    away = listing_of(str(options.path)) if "://" in str(options.path) else None
    location = locate(None if away else options.path, options.format)
    work = Tokenising.of(options, tokenizer)
    before = stamps(location.files)
    progress.begin(away.address if away else str(location))
    content = [options.format, away.copy] if away else _content(location, cache_folder, progress)
    key = json.dumps([_VERSION, tokenizer_key(tokenizer), content, *_settings(options, work)])
    name = "data-" + hashlib.sha256(key.encode()).hexdigest()[:32]

    def write(folder: Path) -> None:
        if away:
            [file] = away.write(folder / "away", progress)
            try:
                _write(folder, locate(file, options.format), options, work, progress)
            except DataError as error:  # of a copy that is removed
                own = [(one, one.place.replace(file, away.address)) for one in error.problems]
                raise type(error)(*(replace(one, place=place) for one, place in own)) from None
            return shutil.rmtree(folder / "away")
        _write(folder, location, options, work, progress)
        if stamps(location.files) != before:
            actual = "changed while it was read"
            raise DataError(Problem(str(location), actual, "files that do not change"))

    try:
        return cached_folder(cache_folder, name, write, progress)
    finally:
        progress.close()


def _content(location: Location, cache_folder: Path, progress: Progress) -> list[str]:
    """Return what the data is known by: the digests of its files, or its name."""
    if not location.files:
        return [location.hub or corpus.name()]

    def looked_at(done: int) -> None:
        progress.say(f"looked up {done:,} of {len(location.files):,} files in the cache")

    return [location.format, *digests(location.files, cache_folder, looked_at)]


def _settings(options: DataSection, work: Tokenising) -> list[list[object]]:
    """Return the options on which the samples depend; newer ones only where they are set."""
    shape = [*astuple(work.cut), options.evaluation_fraction, options.name, options.split]
    pair = options.prompt_column, options.completion_column
    columns = [options.text_column, *pair, options.chat_column]
    newer: list[object] = (["skip"] if work.skips else []) + (
        [options.max_rows] if options.max_rows else []
    )
    newer += [options.fim.model_dump()] if options.fim else []
    if options.arrangement == "pairs":
        newer += [options.chosen_column, options.rejected_column]
        newer += ["best"] if _ranked(options) == "best" else []
    return [shape, [options.records, columns, work.template.key, *newer]]


def _ranked(options: DataSection) -> Ranked:
    return options.ranked if isinstance(options, PairedDataSection) else "all"


def _write(
    folder: Path, location: Location, options: DataSection, work: Tokenising, progress: Progress
) -> None:
    rows_read = RowsRead()
    done = 0
    names = ("train", "evaluation") if work.fraction else ("train",)
    parts = [PartWriter(folder / name) for name in names]
    given = chunks(_documents(location, options, rows_read))
    results: Generator[Tokenised, None, None] = in_order(work, given, options.workers)
    with closing(results):
        for result in results:
            made = (result.train, result.held_out)[: len(parts)]
            for part, documents in zip(parts, made, strict=True):
                part.append(documents)
            if result.error is not None:
                raise result.error
            done += result.documents
            progress.at(rows_read.share, done, sum(part.tokens for part in parts))
    progress.say("arranging samples")
    summaries = [part.finish(work.cut, _origin(rows_read, work.template)) for part in parts]
    _check_samples(location, summaries[0])
    if work.fraction and not summaries[1].samples:
        shutil.rmtree(folder / "evaluation")


def _origin(rows_read: RowsRead, template: Template) -> Origin:
    if not rows_read.roles:
        return Origin(rows_read.describe(), empty=rows_read.empty)
    parts = {"assistant": "the answers", "last_assistant": "the last answer", "all": "all tokens"}
    kind = f"{rows_read.describe()}, by {template.origin}, loss on {parts[template.loss_on]}"
    return Origin(kind, True, rows_read.empty)


def _documents(location: Location, options: DataSection, rows_read: RowsRead) -> Iterator[Document]:
    """Yield the documents, and the errors of skipped ones. Raises DataError if all are empty."""
    rows = used = 0
    skipped: DataError | None = None
    pairs = options.arrangement == "pairs"
    kinds = kinds_of_pairs(options, _ranked(options)) if pairs else None
    for document in read_documents(location, options, rows_read, kinds):
        rows += 1
        if document is None:
            continue
        if isinstance(document, DataError):
            skipped = skipped or document
        else:
            used += 1
        yield document
    if not used and skipped is not None:  # no document is left
        raise NoSamples(*skipped.problems)
    if not used:
        actual = f"{rows} documents, all of them empty" if rows else "no documents"
        raise NoSamples(Problem(str(location), actual, "at least one with text in it"))


def _check_samples(location: Location, summary: Summary) -> None:
    if not summary.samples:
        actual = f"nothing to learn in {summary.describe_documents()}"
        hint = "Raise trainer.data.sequence_length, or add data"
        raise NoSamples(Problem(str(location), actual, "at least one sample", hint))
