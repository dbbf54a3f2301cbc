"""Rows of local files in several formats, or of the hub.

Local files are streamed by the standard library and pyarrow, not by `datasets`: nothing is copied
into a second cache, strings that look like dates stay strings, a bad row is named by its line.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from gzip import GzipFile
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from trainer.errors import DataError, Problem, refused
from trainer.storage import parse_json

if TYPE_CHECKING:
    from pyarrow import RecordBatch

OFTEN = 1024
"""The number of rows between reports of progress."""
Report = Callable[[float], None]
"""Called now and then with the share of a file, or of all files, that has been read."""


class Row(NamedTuple):
    place: str
    """The place of the row for the user: `file:line`, or the file and the number of the row."""
    columns: Mapping[str, object]
    error: DataError | None = None
    """The error of a row that can't be read, if the rows after it can be."""


class Format(NamedTuple):
    suffixes: tuple[str, ...]
    read: Callable[[Path, Sequence[str], Report], Iterator[Row]]
    """Yields the rows of a file with at least the wanted columns that it has."""


def _lines(file: Path, progress: Report) -> Iterator[tuple[int, str]]:
    """Yield the numbered lines of a file, maybe compressed. Raises DataError if not in UTF-8."""
    for number, line in _decoded(file, progress):
        if isinstance(line, DataError):
            raise line
        yield number, line


def _decoded(file: Path, progress: Report) -> Iterator[tuple[int, str | DataError]]:
    with open(file, "rb") as raw, _opened(file, raw) as stream:
        offset = 0
        size = max(os.fstat(raw.fileno()).st_size, 1)
        for number, line in enumerate(stream, 1):
            if number % OFTEN == 0:
                progress(raw.tell() / size)
            try:
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                actual = f"byte 0x{error.object[error.start]:02x}, which is not UTF-8"
                place = f"{file}: byte {offset + error.start}"
                hint = "Convert the file, e.g. with iconv"
                yield number, DataError(Problem(place, actual, "text in UTF-8", hint))
            offset += len(line)


def _opened(file: Path, raw: BinaryIO) -> BinaryIO | GzipFile:
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


def _object(place: str, value: object) -> Row:
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

    def batches() -> Iterator[object]:
        table = pq.ParquetFile(file)
        names = table.schema_arrow.names
        # without any wanted column, read one row with all: the error then names them
        wanted = [name for name in columns if name in names] or names
        for number, batch in enumerate(table.iter_batches(OFTEN, columns=wanted)):
            progress(number * OFTEN / table.metadata.num_rows)
            yield batch

    return _table(file, batches, "a parquet file")


def _arrow(file: Path, columns: Sequence[str], progress: Report) -> Iterator[Row]:
    import pyarrow as pa

    def batches() -> Iterator[object]:
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


def _table(
    file: Path, batches: Callable[[], Iterator[RecordBatch]], expected: str
) -> Iterator[Row]:
    import pyarrow as pa

    try:
        rows = (row for batch in batches() for row in batch.to_pylist())
        for number, row in enumerate(rows):
            yield Row(f"{file}: row {number}", row)
    except pa.ArrowException as error:
        actual = f"not {expected}: {short(str(error))}"
        raise DataError(Problem(str(file), actual, expected)) from error


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


def reader_of(name: str) -> Format:
    """Return a format, or the source of a plug-in: "parity:words" reads files in .words."""
    from trainer.plugins import NAMED

    if (source := NAMED["source"].get(name)) is None:
        return FORMATS[name]

    def read(file: Path, columns: Sequence[str], progress: Report) -> Iterator[Row]:
        with refused(str(file), f"rows, from the source {name}", named=True, raises=DataError):
            for number, row in enumerate(source(file), 1):
                yield _object(f"{file}: row {number}", row)

    return Format((f".{name.rpartition(':')[2]}",), read)


SUFFIXES = {suffix: name for name, format in FORMATS.items() for suffix in format.suffixes}


def suffix_of(name: str) -> str:
    """Return the ending of a file's name, without that of its compression."""
    return Path(name.lower().removesuffix(".gz").removesuffix(".zst")).suffix
