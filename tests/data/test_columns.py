"""Columns that a run computes of its samples: written whole, sealed, compared when read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.support.messages import shows
from trainer.data import columns
from trainer.errors import DataError

KNOWN = {"weights": "a" * 64, "precision": "float32"}


def test_parts_of_a_column_are_appended_and_read(tmp_path: Path) -> None:
    place = tmp_path / "column"
    first = np.arange(6, dtype=np.int32).reshape(3, 2)
    parts = [("ids", first), ("starts", np.zeros(0)), ("ids", first + 6)]
    columns.write(place, KNOWN, parts)
    read = columns.read(place, KNOWN, "a column", "Make it.")
    assert read["ids"].tolist() == np.arange(12).reshape(6, 2).tolist()
    assert read["ids"].dtype == np.int32
    assert read["starts"].shape == (0,)
    assert [path.name for path in tmp_path.iterdir()] == ["column"]


def test_a_column_of_something_else_is_refused(tmp_path: Path) -> None:
    place = tmp_path / "column"
    columns.write(place, KNOWN, [("ids", np.zeros(3))])
    with pytest.raises(DataError) as error:
        columns.read(place, KNOWN | {"precision": "bfloat16"}, "a column", "Make it.")
    shows(error.value.render(), "precision", "float32", "bfloat16")
    with pytest.raises(DataError) as error:
        columns.read(place, KNOWN | {"weights": "b" * 64}, "a column", "Make it.")
    shows(error.value.render(), "weights")
    content = bytearray((place / "0.npy").read_bytes())
    content[-1] ^= 1
    (place / "0.npy").write_bytes(content)
    with pytest.raises(DataError) as error:
        columns.read(place, KNOWN, "a column", "Make it.")
    shows(error.value.render(), "bytes")


def test_a_column_that_is_not_finished_does_not_appear(tmp_path: Path) -> None:
    def parts():
        yield "ids", np.zeros(3)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        columns.write(tmp_path / "column", KNOWN, parts())
    assert not (tmp_path / "column").exists()
    columns.write(tmp_path / "column", KNOWN, [("ids", np.ones(2))])
    assert columns.read(tmp_path / "column", KNOWN, "", "")["ids"].tolist() == [1, 1]
