"""Machines that do not share the run's folder are found before anything is made."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.together import together
from trainer.distributed.ranks import ALONE
from trainer.errors import DiskError
from trainer.run.start import folder as run_folder
from trainer.run.start.folder import check_shared


def check(folders: list[Path]) -> list[DiskError | None]:
    return together(len(folders), lambda ranks: check_shared(folders[ranks.rank], ranks))


def test_a_folder_that_all_see_is_left_as_it_was(tmp_path):
    assert check([tmp_path] * 3) == [None] * 3
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("there", [True, False])
def test_who_sees_another_one_is_named_on_every_rank(tmp_path, monkeypatch, there):
    monkeypatch.setattr(run_folder, "PATIENCE_SECONDS", 0.2)
    monkeypatch.setattr(run_folder.socket, "gethostname", lambda: "node-a")
    first, other = tmp_path / "a" / "runs", tmp_path / "b" / "runs"
    first.mkdir(parents=True)
    if there:
        other.mkdir(parents=True)
    result = check([first, first, other])
    text = (
        f"{first}: what rank 0 on node-a writes there is not there for rank 2 on node-a "
        f"({other}); expected one folder"
    )
    assert all(error is not None and error.shared for error in result)
    assert str(result[0]).startswith(text)
    assert list(first.iterdir()) == []


def test_it_is_waited_for_where_it_comes_late(tmp_path, monkeypatch):
    """As over a network's file system."""
    looks = iter([[], FileNotFoundError(), None])
    listdir = run_folder.os.listdir

    def late(path: Path) -> list[str]:
        look = next(looks)
        if isinstance(look, Exception):
            raise look
        return listdir(path) if look is None else look

    monkeypatch.setattr(run_folder.os, "listdir", late)
    assert check([tmp_path]) == [None]  # alone, nothing is looked at
    (tmp_path / "x").touch()
    assert run_folder._sees(tmp_path / "x")
    check_shared(tmp_path / "nowhere", ALONE)
