"""Documents to samples: tokenised once, on one rank, into a folder of the cache."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from trainer.config import DataSection
from trainer.data.cache import cached_folder
from trainer.data.formats import Document, Location, locate, read_documents
from trainer.data.source import Encoded, PreparedSource, Summary, write_part
from trainer.data.tokenizer import end_of_text, tokenizer_key
from trainer.errors import DataError, Problem
from trainer.ranks import Ranks

_VERSION = 1
"""Of the prepared files; to be raised whenever what is written for the same input changes."""
_BATCH = 256  # documents tokenised at once: enough to keep all cores of a fast tokenizer busy


@dataclass(frozen=True)
class Data:
    """What a run trains on and is evaluated on."""

    train: PreparedSource
    evaluation: PreparedSource | None
    """Held out: shares no document with `train`. None if nothing was asked for, or there is but one document."""
    summary: Summary
    """Of `train`."""
    fingerprint: str
    """Of the training samples: the same wherever, and under whatever file name, the same data was prepared."""

    @property
    def largest_token_id(self) -> int:
        """Over both parts, to be compared with the model's embedding."""
        parts = [self.train, self.evaluation] if self.evaluation else [self.train]
        return max(part.summary.largest_token_id for part in parts)


def open_data(options: DataSection, tokenizer: Any, cache_folder: Path, ranks: Ranks) -> Data:
    """Prepare the data on rank 0, or find it prepared, and open it on every rank. Collective.

    Raises the same DataError (the input) or DiskError (the cache) on every rank.
    """
    folder = ranks.on_first(lambda: prepare(options, tokenizer, cache_folder))
    # a machine that does not share rank 0's cache prepares its own, with the same samples
    own = ranks.on_each(lambda: folder if folder.is_dir() else prepare(options, tokenizer, cache_folder))
    data = _open(own[ranks.rank])
    fingerprints = ranks.gather(data.fingerprint)
    if others := [str(rank) for rank, fingerprint in enumerate(fingerprints) if fingerprint != fingerprints[0]]:
        seen = f"other samples on rank {', '.join(others)} than on rank 0"
        expected = "the same files, and the same versions of Python and the tokenizer, on every machine"
        raise DataError(Problem(str(locate(options.path, options.format)), seen, expected))
    return data


def prepare(options: DataSection, tokenizer: Any, cache_folder: Path) -> Path:
    """The folder of the prepared data: `train`, and `evaluation` where there is any; written if it is not there.

    Deterministic, and the folder appears whole or not at all. The name tells the input: paths, sizes and times of
    the files, the tokenizer, the options. A data set of the hub is prepared once, and not again when it changes there.
    """
    end_of_text(tokenizer)
    train = locate(options.path, options.format)
    evaluation = None if options.evaluation_path is None else locate(options.evaluation_path, options.format)
    shape = [options.sequence_length, options.documents, options.evaluation_fraction, options.name, options.split]
    columns = [options.text_column, options.prompt_column, options.completion_column]
    places = [train.key(), evaluation.key() if evaluation else None]
    key = json.dumps([_VERSION, tokenizer_key(tokenizer), places, shape, columns])
    name = "data-" + hashlib.sha256(key.encode()).hexdigest()[:32]
    return cached_folder(cache_folder, name, lambda folder: _write(folder, train, evaluation, options, tokenizer))


def held_out(index: int, fraction: float) -> bool:
    """Whether document `index` is held out: evenly spaced, `fraction` of all, the second document always.

    So one is held out of as few as two, and which ones depends on no seed.
    """
    return math.floor((index - 1) * fraction) > math.floor((index - 2) * fraction)


def _open(folder: Path) -> Data:
    train = PreparedSource(folder / "train")
    evaluation = PreparedSource(folder / "evaluation") if (folder / "evaluation").is_dir() else None
    return Data(train, evaluation, train.summary, train.summary.fingerprint)


def _write(folder: Path, train: Location, evaluation: Location | None, options: DataSection, tokenizer: Any) -> None:
    fraction = 0.0 if evaluation else options.evaluation_fraction

    def write(part: str, location: Location, held: bool) -> Summary:
        documents = _documents(location, options)
        chosen = (document for index, document in enumerate(documents) if held_out(index, fraction) == held)
        encoded = encode(chosen, tokenizer)
        return write_part(folder / part, encoded, options.sequence_length, options.documents == "concatenate")

    _check_samples(train, write("train", train, False))
    if evaluation:
        _check_samples(evaluation, write("evaluation", evaluation, False))
    elif fraction and not write("evaluation", train, True).samples:
        for file in (folder / "evaluation").iterdir():
            file.unlink()
        (folder / "evaluation").rmdir()


def _documents(location: Location, options: DataSection) -> Iterator[Document]:
    """The documents with something to train on. Raises DataError if there are none."""
    rows = used = 0
    for document in read_documents(location, options):
        rows += 1
        if document is not None:
            used += 1
            yield document
    if not used:
        seen = f"{rows} documents, all of them empty" if rows else "no documents"
        raise DataError(Problem(str(location), seen, "at least one with text in it"))


def _check_samples(location: Location, summary: Summary) -> None:
    if not summary.samples:
        seen = f"{summary.documents} documents without a token to learn ({summary.dropped} have a prompt too long)"
        mend = "Raise trainer.data.sequence_length, or add data"
        raise DataError(Problem(str(location), seen, "at least one sample", mend))


def encode(documents: Iterator[Document], tokenizer: Any) -> Iterator[Encoded]:
    """Tokens of each document: what the tokenizer begins texts with, prompt, text, end-of-text.

    Targets are the text and its end. Prompt and text are tokenised apart, as they are when the model is used.
    """
    start, end = _beginning(tokenizer), [end_of_text(tokenizer)]
    while batch := list(islice(documents, _BATCH)):
        texts = _tokens(tokenizer, [document.text for document in batch])
        prompts = _tokens(tokenizer, [document.prompt or "" for document in batch])
        for prompt, text in zip(prompts, texts, strict=True):
            before = [*start, *prompt]
            yield Encoded([*before, *text, *end], max(1, len(before)))


def _tokens(tokenizer: Any, texts: list[str]) -> Sequence[list[int]]:
    options = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}
    return tokenizer(texts, **options)["input_ids"]  # type: ignore[no-any-return]


def _beginning(tokenizer: Any) -> list[int]:
    """[bos] if the tokenizer itself begins a text so, and it is not the token that ends one; else []."""
    bos = tokenizer.bos_token_id
    begins = bos is not None and bos != tokenizer.eos_token_id and tokenizer("")["input_ids"][:1] == [bos]
    return [bos] if begins else []
