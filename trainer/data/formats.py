"""Rows of local files in several formats, or of the hub.

Local files are streamed by the standard library and pyarrow, not by `datasets`: nothing is copied
into a second cache, strings that look like dates stay strings, a bad row is named by its line.
"""

from __future__ import annotations

import csv
import glob
import gzip
import io
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from trainer.errors import DataError, Problem, refused
from trainer.storage import parse_json, read_file

if TYPE_CHECKING:
    from trainer.config.sections.trainer import TrainerSection

_GLOB = frozenset("*?[")
_OFTEN = 1024
"""The number of rows between reports of progress."""
WANTED = "a file, a folder, a glob or a hub id"
"""The accepted values of `trainer.data.path`, as error messages list them."""

Report = Callable[[float], None]
"""Called now and then with the share of a file, or of all files, that has been read."""


class Row(NamedTuple):
    place: str
    """The place of the row for the user: `file:line`, or the file and the number of the row."""
    columns: Mapping[str, Any]
    error: DataError | None = None
    """The error of a row that can't be read, if the rows after it can be."""


class Format(NamedTuple):
    suffixes: tuple[str, ...]
    read: Callable[[Path, Sequence[str], Report], Iterator[Row]]
    """Yields the rows of a file with at least the wanted columns that it has."""


@dataclass(frozen=True)
class Location:
    """The place of the documents: files of one format, a hub id, or else the embedded corpus."""

    format: str = ""
    files: tuple[Path, ...] = ()
    hub: str = ""

    def __str__(self) -> str:
        if not self.files:
            return self.hub or "the embedded corpus"
        more = f" and {len(self.files) - 1} more files" if len(self.files) > 1 else ""
        return f"{self.files[0]}{more}"


def locate(path: str | Sequence[str] | None, format: str = "auto") -> Location:
    """Find what `trainer.data.path` names: a file, folder, glob, list of these, hub id, or None.

    Raises DataError if nothing matches, or if the files are of an unknown format or of several.
    """
    if path is None:
        return Location()
    names = [path] if isinstance(path, str) else list(path)
    if format == "hub" or (format == "auto" and len(names) == 1 and may_be_hub_id(names[0])):
        return Location(hub=names[0])
    files = tuple(dict.fromkeys(file for name in names for file in _matching(name, format)))
    if not files:
        raise DataError(Problem("trainer.data", "an empty list of paths", WANTED))
    formats = {file: format_of(file) if format == "auto" else format for file in files}
    if len(set(formats.values())) > 1:
        examples = {kind: file for file, kind in reversed(formats.items())}
        actual = " and ".join(f"{file} ({kind})" for kind, file in sorted(examples.items()))
        hint = "Name one with a glob such as *.jsonl"
        raise DataError(Problem(", ".join(names), actual, "files of one format", hint))
    return Location(formats[files[0]], files)


def check_paths(section: TrainerSection) -> None:
    """Raise DataError if text files that the config names are missing; needs no torch."""
    from trainer.config.own_keys import honoured  # `train --help` reads no config

    data = section.data
    reads_text = honoured("trainer.data.records", section.task)
    if not reads_text or (data.path is None and not data.sources):
        return
    held_out = data.evaluation_path
    paths = held_out.values() if isinstance(held_out, dict) else [held_out]
    for source in data.sources:
        locate(source.path, source.format or data.format)
    for path in (data.path, *paths):
        locate(path, data.format)


def rows_of(
    where: Location, options: Any, columns: Sequence[str], progress: Report = lambda _: None
) -> Iterator[Row]:
    """Yield the rows in order, with at least those of the wanted columns that they have.

    Raises DataError at the first row that can't be read.
    """
    if where.hub:
        yield from _hub(where.hub, options, columns, progress)
    sizes = [file.stat().st_size if file.exists() else 0 for file in where.files]
    whole, before = max(sum(sizes), 1), 0

    def share_of_all(share: float) -> None:
        progress((before + share * size) / whole)

    for file, size in zip(where.files, sizes, strict=True):
        try:
            yield from _reader(where.format).read(file, columns, share_of_all)
        except (OSError, EOFError) as error:
            actual = getattr(error, "strerror", None) or str(error)
            raise DataError(Problem(str(file), actual, "a file that can be read")) from error
        before += size


# Finding files


def may_be_hub_id(name: str) -> bool:
    """Return True if a name is that of no file here, and may be one on the Hub."""
    if name.startswith((".", "/", "~", os.sep)) or _GLOB & set(name) or name.count("/") > 1:
        return False
    return not Path(name).exists() and _suffix(name) not in _SUFFIXES


def _matching(name: str, format: str) -> list[Path]:
    path = Path(name).expanduser()
    if path.is_file():
        return [path]
    if "://" in name:  # before it is copied: of a folder one file alone, for its format
        from trainer.data.remote import listing_of

        there = listing_of(name)
        files = list(map(Path, there.files))
        known = [file for file in files if _suffix(file.name) in _SUFFIXES]
        return (known or files)[:1] if there.folder else files
    if path.is_dir() and (saved := _saved_by_datasets(path)):
        return saved
    if path.is_dir():
        suffixes = tuple(_SUFFIXES) if format == "auto" else _reader(format).suffixes
        shown = [file for file in sorted(path.rglob("*")) if file.is_file() and _shown(file, path)]
        # `format: text` takes every file of a folder, whatever its name
        matching = [file for file in shown if format == "text" or _suffix(file.name) in suffixes]
        actual, expected = "a folder without data files", "a file ending in " + ", ".join(suffixes)
    else:
        matches = map(Path, glob.glob(str(path), recursive=True))
        matching = sorted(file for file in matches if file.is_file())
        actual = "matches no file" if _GLOB & set(name) else "no such file or folder"
        expected = WANTED
    if not matching:
        raise DataError(Problem(name, actual, expected, "Correct the path in trainer.data"))
    return matching


def _shown(file: Path, folder: Path) -> bool:
    return not any(part.startswith((".", "_")) for part in file.relative_to(folder).parts)


def _saved_by_datasets(folder: Path) -> list[Path]:
    """List the files of a folder that `Dataset.save_to_disk` wrote; empty for any other folder."""
    parts = folder / "dataset_dict.json"
    if parts.is_file() and (splits := _listed(parts, lambda content: content["splits"])):
        actual = f"a folder of the parts {', '.join(splits)}"
        hint = f"Name one of them, such as {folder / splits[0]}"
        raise DataError(Problem(str(folder), actual, "one part", hint))
    state = folder / "state.json"
    if not state.is_file() or not any(folder.glob("*.arrow")):
        return []
    names = _listed(state, lambda content: [part["filename"] for part in content["_data_files"]])
    return [folder / name for name in names]


def _listed(path: Path, names_in: Callable[[Any], Any]) -> list[str]:
    """Read the names that a JSON file of `datasets` lists. Raises DataError if it is damaged."""
    expected = "what Dataset.save_to_disk writes"
    hint = "Save the data set again, or name its files in trainer.data.path"
    kinds = (OSError, ValueError, LookupError, TypeError)
    with refused(str(path), expected, *kinds, named=True, hint=hint, raises=DataError):
        names = list(names_in(parse_json(read_file(path))))
        if odd := [name for name in names if not isinstance(name, str) or Path(name).name != name]:
            raise ValueError(f"{odd[0]!r} in place of a name in this folder")
    return names


def format_of(file: Path) -> str:
    suffix = _suffix(file.name)
    if suffix not in _SUFFIXES:
        hint = f"Set trainer.data.format to one of {', '.join(FORMATS)}"
        actual = f'a file ending in "{suffix}"' if suffix else "a file without an ending"
        raise DataError(Problem(str(file), actual, "one of " + ", ".join(_SUFFIXES), hint))
    return _SUFFIXES[suffix]


def _suffix(name: str) -> str:
    """Return the ending of a file's name, without that of its compression."""
    return Path(name.lower().removesuffix(".gz").removesuffix(".zst")).suffix


# Reading formats


def _lines(file: Path, progress: Report) -> Iterator[tuple[int, str]]:
    """Yield the numbered lines of a file, maybe compressed. Raises DataError if not in UTF-8."""
    for number, line in _decoded(file, progress):
        if isinstance(line, DataError):
            raise line
        yield number, line


def _decoded(file: Path, progress: Report) -> Iterator[tuple[int, str | DataError]]:
    with open(file, "rb") as raw, _opened(file, raw) as stream:
        offset, size = 0, max(os.fstat(raw.fileno()).st_size, 1)
        for number, line in enumerate(stream, 1):
            if number % _OFTEN == 0:
                progress(raw.tell() / size)
            try:
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                actual = f"byte 0x{error.object[error.start]:02x}, which is not UTF-8"
                place = f"{file}: byte {offset + error.start}"
                hint = "Convert the file, e.g. with iconv"
                yield number, DataError(Problem(place, actual, "text in UTF-8", hint))
            offset += len(line)


def _opened(file: Path, raw: BinaryIO) -> Any:
    """Open a stream of the decompressed bytes."""
    if file.suffix.lower() == ".gz":
        return gzip.open(raw)
    if file.suffix.lower() == ".zst":
        import pyarrow as pa

        return io.BufferedReader(pa.input_stream(raw, compression="zstd"))
    return raw


def _jsonl(file: Path, columns: Sequence[str], progress: Report) -> Iterator[Row]:
    for number, line in _decoded(file, progress):
        if isinstance(line, DataError):
            yield Row(f"{file}:{number}", {}, line)
        elif number == 1 and line.lstrip().startswith("["):  # one array instead of lines
            items = _json(file, "".join(line for _, line in _lines(file, progress)), 1)
            yield from (_object(f"{file}: item {index}", item) for index, item in enumerate(items))
            return
        elif line.strip():
            try:
                yield _object(f"{file}:{number}", _json(file, line, number))
            except DataError as error:
                yield Row(f"{file}:{number}", {}, error)


def _json(file: Path, text: str, number: int) -> Any:
    try:
        return parse_json(text)
    except ValueError as error:
        lines = text.rstrip("\n").split("\n")
        # an early end is reported on the line after the last
        at = min(getattr(error, "lineno", 1), len(lines)) - 1
        why = "not JSON" if isinstance(error, json.JSONDecodeError) else str(error)
        actual = f"{why}: {short(lines[at])}"
        place = f"{file}:{number + at}"
        raise DataError(Problem(place, actual, "one JSON object on each line")) from error


def _object(place: str, value: Any) -> Row:
    if not isinstance(value, dict):
        actual = f"not a JSON object: {short(json.dumps(value))}"
        return Row(place, {}, DataError(Problem(place, actual, "one with named columns")))
    return Row(place, value)


def _csv(file: Path, columns: Sequence[str], progress: Report) -> Iterator[Row]:
    csv.field_size_limit(sys.maxsize)  # documents are often longer than the default of 128 KiB
    reader = csv.DictReader((line for _, line in _lines(file, progress)), strict=True)
    try:
        for row in reader:
            place = f"{file}:{reader.line_num}"
            if None in row or None in row.values():
                expected = f"{len(reader.fieldnames or ())}, as the header has"
                problem = Problem(place, "a row with more or fewer fields", expected)
                yield Row(place, {}, DataError(problem))
            else:
                yield Row(place, row)
    except csv.Error as error:
        place = f"{file}:{reader.reader.line_num}"
        raise DataError(Problem(place, f"not CSV: {error}", "comma-separated fields")) from error


def _text_file(file: Path, columns: Sequence[str], progress: Report) -> Iterator[Row]:
    yield Row(str(file), {"text": "".join(line for _, line in _lines(file, progress))})


def _parquet(file: Path, columns: Sequence[str], progress: Report) -> Iterator[Row]:
    import pyarrow.parquet as pq

    def batches() -> Iterator[Any]:
        table = pq.ParquetFile(file)
        names = table.schema_arrow.names
        # without any wanted column, read one row with all: the error then names them
        wanted = [name for name in columns if name in names] or names
        for number, batch in enumerate(table.iter_batches(_OFTEN, columns=wanted)):
            progress(number * _OFTEN / table.metadata.num_rows)
            yield batch

    return _table(file, batches, "a parquet file")


def _arrow(file: Path, columns: Sequence[str], progress: Report) -> Iterator[Row]:
    import pyarrow as pa

    def batches() -> Iterator[Any]:
        mapped = pa.memory_map(str(file))
        if mapped.read(6) == b"ARROW1":
            whole = pa.ipc.open_file(mapped)
            for index in range(whole.num_record_batches):
                progress(index / whole.num_record_batches)
                yield whole.get_batch(index)
            return
        mapped.seek(0)
        for batch in pa.ipc.open_stream(mapped):
            progress(mapped.tell() / mapped.size())
            yield batch

    return _table(file, batches, "an Arrow file")


def _table(file: Path, batches: Callable[[], Iterator[Any]], expected: str) -> Iterator[Row]:
    import pyarrow as pa

    try:
        rows = (row for batch in batches() for row in batch.to_pylist())
        for number, row in enumerate(rows):
            yield Row(f"{file}: row {number}", row)
    except pa.ArrowException as error:
        actual = f"not {expected}: {short(str(error))}"
        raise DataError(Problem(str(file), actual, expected)) from error


def _hub(name: str, options: Any, columns: Sequence[str], progress: Report) -> Iterator[Row]:
    from datasets import load_dataset

    try:
        rows = load_dataset(name, options.name, split=options.split)
    except Exception as error:  # datasets and huggingface_hub raise a dozen kinds
        answer = short(str(error) or type(error).__name__)
        actual = f"no such file or folder, and the hub says: {answer}"
        hint = "Correct path, name or split in trainer.data"
        raise DataError(Problem(name, actual, WANTED, hint)) from error
    wanted = [column for column in columns if column in rows.column_names] or rows.column_names
    for number, row in enumerate(rows.select_columns(wanted)):
        if number % _OFTEN == 0:
            progress(number / len(rows))
        yield Row(f"{name}: row {number}", row)


def short(text: str) -> str:
    """Return the beginning of a text, on one line."""
    return " ".join(text.split())[:60]


FORMATS = {
    "jsonl": Format((".jsonl", ".json"), _jsonl),
    "parquet": Format((".parquet",), _parquet),
    "arrow": Format((".arrow",), _arrow),
    "csv": Format((".csv",), _csv),
    "text": Format((".txt",), _text_file),
}


def _reader(name: str) -> Format:
    """Return a format, or the source of a plug-in: "parity:words" reads files in .words."""
    from trainer.plugins import NAMED

    if (source := NAMED["source"].get(name)) is None:
        return FORMATS[name]

    def read(file: Path, columns: Sequence[str], progress: Report) -> Iterator[Row]:
        with refused(str(file), f"rows, from the source {name}", named=True, raises=DataError):
            for number, row in enumerate(source(file), 1):
                yield _object(f"{file}: row {number}", row)

    return Format((f".{name.rpartition(':')[2]}",), read)


_SUFFIXES = {suffix: name for name, format in FORMATS.items() for suffix in format.suffixes}
