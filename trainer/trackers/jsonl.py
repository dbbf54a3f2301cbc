"""Progress in files of lines, such as `metrics.jsonl`."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from trainer.storage import disk_errors, opened_at_once, tail
from trainer.trackers.tracker import Logged, fields


class JsonLines:
    """A file with one JSON object per line, flushed at once; it is appended to.

    JSON has no NaN: such a number is null, and its text is in the line's `non_finite`.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            _cut_torn_line(path)
            self._file = open(path, "a", encoding="utf-8", opener=opened_at_once)

    def write(self, fields: Mapping[str, object]) -> None:
        floats = {key: value for key, value in fields.items() if isinstance(value, float)}
        odd = {key: str(value) for key, value in floats.items() if not math.isfinite(value)}
        line = {key: None if key in odd else value for key, value in fields.items()}
        with disk_errors(self._path):
            self._file.write(json.dumps(line | ({"non_finite": odd} if odd else {})) + "\n")
            self._file.flush()

    def record(self, item: Logged, /) -> None:
        self.write(fields(item))

    epoch = record
    evaluation = record

    def close(self) -> None:
        with suppress(OSError):  # a line that the disk refused was reported when it was written
            self._file.close()


def _cut_torn_line(path: Path) -> None:
    """Remove the incomplete last line that a killed run left."""
    while path.is_file() and (end := tail(path)) and not end.endswith(b"\n"):
        os.truncate(path, path.stat().st_size - len(end) + end.rfind(b"\n") + 1)
