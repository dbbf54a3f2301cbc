"""The parts of the files that several ranks write: each rank lists its own, in a line of one file.

A checkpoint of Llama 405B by 1,024 ranks has 3.5 million parts. No rank collects them: the manifest
has a hash of each line, and whoever reads the checkpoint shares the lines as it shares the files.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer.checkpoint.file_records import (
    PARTS,
    FileRecord,
    Hashed,
    Records,
    is_whole,
    parts_from_json,
    parts_to_json,
    shown,
    span,
)
from trainer.checkpoint.safetensors_stream import put
from trainer.distributed.ranks import Ranks
from trainer.storage import disk_errors, parse_json

Parts = Mapping[str, Sequence[Hashed]]
"""Parts of files, by the files' paths below a folder."""


@dataclass(frozen=True)
class _Written:
    """The files that one rank wrote, as the other ranks learn of them."""

    sizes: list[int]
    """Bytes of each file."""
    whole: dict[str, Hashed]
    """The files that it wrote alone."""
    line: Hashed | None
    """The place and hash of its line; None if it has none."""


def record(
    folder: Path, sizes: Mapping[str, int], written: Parts, ranks: Ranks
) -> tuple[dict[str, FileRecord], dict[str, list[int]]]:
    """List the parts that ranks wrote of files; return their records, and the ranks of each part.

    `sizes`: bytes of each file; `written`: what this rank wrote of it. The results are those of
    nodes' first ranks, and empty elsewhere. Of a file whose parts are in `PARTS` no ranks are
    listed: they wrote its lines. Collective. Raises DiskError, and ValueError if a file is not
    whole.
    """
    whole = {name: parts[0] for name, parts in written.items() if is_whole(parts, sizes[name])}
    shared = {name: parts for name, parts in written.items() if parts and name not in whole}
    line = _write_line(folder, shared, ranks)
    own = [sum(place.size for place, _ in written.get(name, ())) for name in sizes]
    reports = ranks.to_node_firsts(_Written(own, whole, line))

    def join() -> tuple[dict[str, FileRecord], dict[str, list[int]]]:
        records: dict[str, FileRecord] = {}
        writers: dict[str, list[int]] = {}
        there = [sum(of_file) for of_file in zip(*(one.sizes for one in reports), strict=True)]
        for name, count in zip(sizes, there, strict=True) if reports else ():
            if count != sizes[name]:
                raise ValueError(f"{name}: the ranks wrote {count} bytes of {sizes[name]}")
            records[name] = FileRecord(count, ())
        for rank, one in enumerate(reports):
            for name, part in one.whole.items():
                records[name] = FileRecord(sizes[name], (part,))
                writers[name] = [rank]
        lines = [(one.line, rank) for rank, one in enumerate(reports) if one.line]
        if lines:
            end = lines[-1][0][0].end
            records[PARTS] = FileRecord(end, tuple(line for line, _ in lines))
            writers[PARTS] = [rank for _, rank in lines]
        return records, writers

    return ranks.on_own(join)


def _write_line(folder: Path, shared: Parts, ranks: Ranks) -> Hashed | None:
    """Write this rank's line of `PARTS`; return its place and hash, None if it has no parts."""
    content = b""
    if shared:
        parts = {name: parts_to_json(of) for name, of in shared.items()}
        content = json.dumps(parts, separators=(",", ":")).encode() + b"\n"
    start = sum(ranks.gather(len(content))[: ranks.rank])

    @disk_errors(folder / PARTS)
    def write() -> None:
        if content:
            file = os.open(folder / PARTS, os.O_WRONLY | os.O_CREAT, 0o666)
            try:
                put(file, memoryview(content), start)
                os.fsync(file)
            finally:
                os.close(file)

    ranks.on_own(write)
    place = span(start, start + len(content))
    return (place, hashlib.sha256(content).hexdigest()) if content else None


def read_line(folder: Path, line: Hashed, records: Records) -> Parts:
    """Return the parts in a line of `PARTS`, of files whose records have none.

    Raises OSError, and ValueError if the line is not as it was written.
    """
    place, wanted = line
    with (folder / PARTS).open("rb", buffering=0) as file:
        content = os.pread(file.fileno(), place.size, place.start)
    if (digest := hashlib.sha256(content).hexdigest()) != wanted:
        which = f"bytes {place.start} to {place.end}"
        raise ValueError(f"damaged ({which}: {shown(digest)}, not {shown(wanted)})")
    parsed = parse_json(content)
    if not isinstance(parsed, dict):
        raise ValueError("damaged (no parts of files)")
    listed = {}
    for name, parts in parsed.items():
        if name not in records or records[name].parts:
            raise ValueError(f"parts of another file: {name!r:.200}")
        try:
            listed[name] = parts_from_json(parts, records[name].size)
        except (TypeError, ValueError) as error:
            raise ValueError(f"damaged (of {name!r:.200}: {error})") from error
    return listed


def with_parts(
    folder: Path, records: Records, writers: Mapping[str, Sequence[int]]
) -> tuple[dict[str, FileRecord], dict[str, list[int]]]:
    """Return all records but that of `PARTS`, with the parts that it lists, and the parts' ranks.

    `writers`: the ranks of the lines and of other files. Raises as `read_line` does.
    """
    listed: dict[str, list[tuple[Hashed, int]]] = {}
    for line, rank in zip(records[PARTS].parts, writers[PARTS], strict=True):
        for name, parts in read_line(folder, line, records).items():
            listed.setdefault(name, []).extend((part, rank) for part in parts)
    full: dict[str, FileRecord] = {}
    ranks_of: dict[str, list[int]] = {}
    for name, one in records.items():
        if one.parts and name != PARTS:
            full[name] = one
            ranks_of[name] = list(writers[name])
        elif name != PARTS:
            by_place = sorted(listed.get(name, ()))
            if (there := sum(place.size for (place, _), _ in by_place)) != one.size:
                raise ValueError(f"{name}: parts of {there} bytes of {one.size}")
            full[name] = FileRecord(one.size, tuple(part for part, _ in by_place))
            ranks_of[name] = [rank for _, rank in by_place]
    return full, ranks_of
