"""Where documents come from: local files of a few formats, the hub, or the embedded corpus.

Local files are read as streams by the standard library and pyarrow, not through `datasets`: nothing is copied into
a second cache, strings that look like dates stay strings, and a bad row is named by file and line.
"""

from __future__ import annotations

import csv
import difflib
import glob
import gzip
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from trainer.config import DataSection
from trainer.data import corpus
from trainer.errors import DataError, Problem

_GLOB = frozenset("*?[")


class Row(NamedTuple):
    place: str
    """For a person: `file:line`, or the file and the number of the row."""
    columns: Mapping[str, Any]


class Document(NamedTuple):
    """A text to train on; of one with a prompt only `text` counts in the loss."""

    text: str
    prompt: str | None = None


class Format(NamedTuple):
    suffixes: tuple[str, ...]
    read: Callable[[Path, Sequence[str]], Iterator[Row]]
    """The rows of a file, with the wanted columns and perhaps others."""


@dataclass(frozen=True)
class Location:
    """Where the documents are: files of one format, a hub id, or, with neither, the embedded corpus."""

    format: str = ""
    files: tuple[Path, ...] = ()
    hub: str = ""

    def __str__(self) -> str:
        if self.hub or not self.files:
            return self.hub or "the embedded corpus"
        return str(self.files[0]) + (f" and {len(self.files) - 1} more files" if len(self.files) > 1 else "")

    def key(self) -> list[Any]:
        """Changes when the files do: their names, sizes and times of change."""
        if self.hub or not self.files:
            return [self.hub or corpus.name()]
        stats = [(file.resolve(), file.stat()) for file in self.files]
        return [self.format, *((str(path), stat.st_size, stat.st_mtime_ns) for path, stat in stats)]


def locate(path: str | Sequence[str] | None, format: str = "auto") -> Location:
    """Find what `trainer.data.path` means: a file, a folder, a glob, a list of these, a hub id, or None.

    Raises DataError if nothing matches, or if the files are of an unknown format or of several.
    """
    if path is None:
        return Location()
    names = [path] if isinstance(path, str) else list(path)
    if format == "hub" or (format == "auto" and len(names) == 1 and _may_be_hub_id(names[0])):
        return Location(hub=names[0])
    files = tuple(dict.fromkeys(file for name in names for file in _matching(name, format)))
    if not files:
        raise DataError(Problem("trainer.data", "an empty list of paths", "a file, a folder, a glob or a hub id"))
    formats = {file: _format_of(file) if format == "auto" else format for file in files}
    if len(set(formats.values())) > 1:
        examples = {kind: file for file, kind in reversed(formats.items())}
        seen = " and ".join(f"{file} ({kind})" for kind, file in sorted(examples.items()))
        raise DataError(Problem(", ".join(names), seen, "files of one format", "Name one with a glob such as *.jsonl"))
    return Location(formats[files[0]], files)


def read_documents(location: Location, options: DataSection) -> Iterator[Document | None]:
    """The documents in order; None stands for one with nothing in it to train on.

    Raises DataError at the first row that can't be read, that lacks a column, or whose column is not text.
    """
    if not location.hub and not location.files:
        yield from map(Document, corpus.documents())
        return
    prompted = options.prompt_column is not None
    text_column = options.completion_column if prompted else options.text_column
    columns = [column for column in (options.prompt_column, text_column) if column is not None]
    for row in _rows(location, options, columns):
        texts = [_text(row, column) for column in columns]
        empty = texts[-1] is None or not texts[-1].strip()
        yield None if empty else Document(texts[-1] or "", (texts[0] or "") if prompted else None)


def _rows(location: Location, options: DataSection, columns: Sequence[str]) -> Iterator[Row]:
    if location.hub:
        yield from _hub(location.hub, options, columns)
    for file in location.files:
        try:
            yield from FORMATS[location.format].read(file, columns)
        except (OSError, EOFError) as error:
            seen = getattr(error, "strerror", None) or str(error)
            raise DataError(Problem(str(file), seen, "a file that can be read")) from error


def _text(row: Row, column: str) -> str | None:
    if column not in row.columns:
        raise _missing(row.place, column, row.columns)
    value = row.columns[column]
    if value is None:
        return None
    if not isinstance(value, str):
        seen = f'column "{column}" holds {type(value).__name__} {_short(repr(value))}'
        raise DataError(Problem(row.place, seen, "text"))
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            seen = f'column "{column}" holds half of a surrogate pair at character {error.start}'
            raise DataError(Problem(row.place, seen, "valid Unicode")) from error
    return value


def _missing(place: str, column: str, columns: Iterable[str]) -> DataError:
    names = [str(name) for name in columns]
    close = difflib.get_close_matches(column, names, 1)
    mend = (f'Did you mean "{close[0]}"? ' if close else "") + (
        "Set trainer.data.text_column, or prompt_column and completion_column"
    )
    seen = f'no column "{column}"'
    return DataError(Problem(place, seen, "one of " + ", ".join(f'"{name}"' for name in names), mend))


# Finding files


def _may_be_hub_id(name: str) -> bool:
    looks_local = name.startswith((".", "/", "~", os.sep)) or bool(_GLOB & set(name)) or name.count("/") > 1
    return not looks_local and not Path(name).exists() and Path(_plain(name)).suffix not in _SUFFIXES


def _matching(name: str, format: str) -> list[Path]:
    path = Path(name).expanduser()
    if path.is_file():
        return [path]
    if path.is_dir():
        inside = (file for file in sorted(path.rglob("*")) if file.is_file())
        shown = [file for file in inside if not any(p.startswith((".", "_")) for p in file.relative_to(path).parts)]
        # `format: text` takes every file of a folder, whatever its name
        found = shown if format == "text" else [file for file in shown if _fits(file, format)]
        expected = "a file ending in " + ", ".join(_SUFFIXES if format == "auto" else FORMATS[format].suffixes)
        seen = "a folder without data files"
    else:
        found = sorted(file for match in glob.glob(str(path), recursive=True) if (file := Path(match)).is_file())
        expected = "a file, a folder, a glob or a hub id"
        seen = "matches no file" if _GLOB & set(name) else "no such file or folder"
    if not found:
        raise DataError(Problem(name, seen, expected, "Mend the path in trainer.data"))
    return found


def _fits(file: Path, format: str) -> bool:
    suffix = Path(_plain(file.name)).suffix
    return suffix in (_SUFFIXES if format == "auto" else FORMATS[format].suffixes)


def _format_of(file: Path) -> str:
    suffix = Path(_plain(file.name)).suffix
    if suffix not in _SUFFIXES:
        mend = f"Set trainer.data.format to one of {', '.join(FORMATS)}"
        seen = f'a file ending in "{suffix}"' if suffix else "a file without an ending"
        raise DataError(Problem(str(file), seen, "one of " + ", ".join(_SUFFIXES), mend))
    return _SUFFIXES[suffix]


def _plain(name: str) -> str:
    return name.lower().removesuffix(".gz")


# Reading formats


def _lines(file: Path) -> Iterator[tuple[int, str]]:
    """Numbered lines with their ends, from a file that may be gzipped."""
    with gzip.open(file) if file.suffix == ".gz" else open(file, "rb") as stream:
        offset = 0
        for number, line in enumerate(stream, 1):
            try:
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                seen = f"byte 0x{error.object[error.start]:02x}, which is not UTF-8"
                place = f"{file}: byte {offset + error.start}"
                raise DataError(Problem(place, seen, "text in UTF-8", "Convert the file, e.g. with iconv")) from error
            offset += len(line)


def _jsonl(file: Path, columns: Sequence[str]) -> Iterator[Row]:
    lines = _lines(file)
    for number, line in lines:
        if number == 1 and line.lstrip().startswith("["):  # not lines but one array
            items = _json(file, line + "".join(rest for _, rest in lines), 1)
            yield from (_object(f"{file}: item {index}", item) for index, item in enumerate(items))
        elif line.strip():
            yield _object(f"{file}:{number}", _json(file, line, number))


def _json(file: Path, text: str, number: int) -> Any:
    try:
        return json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        lines = text.rstrip("\n").split("\n")
        at = min(getattr(error, "lineno", 1), len(lines)) - 1  # what ends too early fails on the line after its last
        line, seen = number + at, _short(lines[at])
        raise DataError(Problem(f"{file}:{line}", f"not JSON: {seen}", "one JSON object on each line")) from error


def _object(place: str, value: Any) -> Row:
    if not isinstance(value, dict):
        raise DataError(Problem(place, f"not a JSON object: {_short(json.dumps(value))}", "one with named columns"))
    return Row(place, value)


def _csv(file: Path, columns: Sequence[str]) -> Iterator[Row]:
    csv.field_size_limit(sys.maxsize)  # a document is often longer than the default of 128 KiB
    reader = csv.DictReader((line for _, line in _lines(file)), strict=True)
    try:
        for row in reader:
            place = f"{file}:{reader.line_num}"
            if None in row or None in row.values():
                names = reader.fieldnames or ()
                raise DataError(Problem(place, "a row with more or fewer fields", f"{len(names)}, as the header has"))
            yield Row(place, row)
    except csv.Error as error:
        raise DataError(
            Problem(f"{file}:{reader.reader.line_num}", f"not CSV: {error}", "comma-separated fields")
        ) from error


def _text_file(file: Path, columns: Sequence[str]) -> Iterator[Row]:
    yield Row(str(file), {"text": "".join(line for _, line in _lines(file))})


def _parquet(file: Path, columns: Sequence[str]) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.ParquetFile(file)
        names = table.schema_arrow.names
        wanted = [name for name in columns if name in names]
        if len(wanted) < len(columns):
            raise _missing(str(file), next(name for name in columns if name not in names), names)
        rows = (row for batch in table.iter_batches(1024, columns=wanted) for row in batch.to_pylist())
        for number, row in enumerate(rows):
            yield Row(f"{file}: row {number}", row)
    except pa.ArrowException as error:
        raise DataError(Problem(str(file), f"not parquet: {_short(str(error))}", "a parquet file")) from error


def _hub(name: str, options: DataSection, columns: Sequence[str]) -> Iterator[Row]:
    from datasets import load_dataset

    try:
        rows = load_dataset(name, options.name, split=options.split)
    except Exception as error:  # datasets and huggingface_hub raise a dozen kinds
        seen = f"no such file or folder, and the hub says: {_short(str(error) or type(error).__name__)}"
        mend = "Mend path, name or split in trainer.data"
        raise DataError(Problem(name, seen, "a file, a folder, a glob or a hub id", mend)) from error
    for column in columns:
        if column not in rows.column_names:
            raise _missing(name, column, rows.column_names)
    for number, row in enumerate(rows.select_columns(list(columns))):
        yield Row(f"{name}: row {number}", row)


def _short(text: str) -> str:
    return " ".join(text.split())[:60]


FORMATS = {
    "jsonl": Format((".jsonl", ".json"), _jsonl),
    "parquet": Format((".parquet",), _parquet),
    "csv": Format((".csv",), _csv),
    "text": Format((".txt",), _text_file),
}
_SUFFIXES = {suffix: name for name, format in FORMATS.items() for suffix in format.suffixes}
