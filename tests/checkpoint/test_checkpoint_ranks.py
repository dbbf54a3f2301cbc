"""Checkpoints of two processes: files per owner, one error for all, and nobody left waiting."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from tests.support.checkpoint_pieces import (
    ALONE,
    DESCRIPTION,
    MODEL_FOLDER,
    STATE,
    files,
    live,
    records_of,
    same,
)
from tests.support.messages import shows
from tests.support.pool import Pools
from trainer.checkpoint import ModelForm, export, load, manifest, newest, save, verify
from trainer.checkpoint.file_records import Span
from trainer.checkpoint.safetensors_stream import SharedFile
from trainer.distributed.ranks import Ranks
from trainer.errors import MeshloomError
from trainer.run.start.folder import kept


def _save_and_load(folder: Path) -> tuple[bool, bool]:
    ranks = Ranks(torch.distributed.get_rank(), 2)
    state, back = live(ranks), live(ranks).blank()
    path = save(
        folder / "checkpoints", STATE, state.state_tensors(), DESCRIPTION, MODEL_FOLDER, ranks
    )
    export(folder / "final", state.state_tensors(), MODEL_FOLDER, ranks)
    return load(path, back.state_tensors(), ranks) == STATE, same(state, back)


def _fail(folder: Path, phase: str) -> str:
    """Save on two ranks, of which one meets an error in `phase`; returns what this rank raised."""
    ranks = Ranks(torch.distributed.get_rank(), 2)
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    rank, target, name = {
        "tensors of rank 1": (1, SharedFile, "write"),
        "end of rank 1": (1, SharedFile, "finish"),
        "manifest": (0, os, "fsync"),
        "rename": (0, os, "rename"),
    }[phase]
    if phase == "manifest":
        real, calls = os.fsync, iter(range(99))  # rank 0 flushes its parts of four files first
        broken = patch.object(
            os, "fsync", lambda handle: real(handle) if next(calls) < 4 else _raise(full)
        )
    else:
        broken = patch.object(target, name, lambda *_: _raise(full))
    state = live(ranks, seed=1)
    try:
        if ranks.rank == rank:
            with broken:
                save(folder, STATE, state.state_tensors(), DESCRIPTION, MODEL_FOLDER, ranks)
        else:
            save(folder, STATE, state.state_tensors(), DESCRIPTION, MODEL_FOLDER, ranks)
    except MeshloomError as error:
        ranks.barrier()
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def _raise(error: Exception) -> None:
    raise error


def _save_poisoned(folder: Path, value: float) -> tuple[int, str]:
    ranks = Ranks(torch.distributed.get_rank(), 2)
    state = live(ranks, seed=1)
    state.tensors["b.weight", "exp_avg"][0] = value  # rank 0's
    state.tensors["b.weight", "exp_avg_sq"][3] = value  # rank 1's
    try:
        save(folder, STATE, state.state_tensors(), DESCRIPTION, MODEL_FOLDER, ranks)
    except MeshloomError as error:
        ranks.barrier()
        return error.exit_code, str(error)
    return 0, ""


def test_two_ranks_write_their_own_files_and_one_process_reads_them(
    tmp_path: Path, pools: Pools
) -> None:
    assert pools[2].run(_save_and_load, timeout=120, folder=tmp_path) == [(True, True)] * 2
    path = tmp_path / "checkpoints/step-000100"
    assert files(path) == [
        "manifest-parts.jsonl",
        "manifest.json",
        "model/config.json",
        "model/model-00001-of-00002.safetensors",
        "model/model-00002-of-00002.safetensors",
        "model/model.safetensors.index.json",
        "optimizer/optimizer-00001-of-00002.safetensors",
        "optimizer/optimizer-00002-of-00002.safetensors",
        "optimizer/optimizer.safetensors.index.json",
        "trainer.json",
    ]
    assert verify(path) == verify(tmp_path / "final") == []
    back = live().blank()
    assert load(path, back.state_tensors(), ALONE) == STATE
    assert same(back, live())


def test_the_index_is_that_of_transformers(tmp_path: Path, pools: Pools) -> None:
    from transformers.utils.hub import get_checkpoint_shard_files

    pools[2].run(_save_and_load, timeout=120, folder=tmp_path)
    index = tmp_path / "final/model.safetensors.index.json"
    result, metadata = get_checkpoint_shard_files(tmp_path / "final", index)
    assert [Path(name).name for name in result] == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]
    assert sorted(metadata["all_checkpoint_keys"]) == [
        "a.weight",
        "b.weight",
        "c.buffer",
        "empty",
        "scale",
    ]
    assert metadata["total_size"] == 4 * (12 + 5 + 1) + 16


@pytest.mark.first("rename")
@pytest.mark.parametrize("phase", ["tensors of rank 1", "end of rank 1", "manifest", "rename"])
def test_an_error_of_one_rank_is_raised_on_both(tmp_path: Path, pools: Pools, phase: str) -> None:
    older = save(
        tmp_path,
        STATE.__class__(50, samples=50),
        live().state_tensors(),
        DESCRIPTION,
        MODEL_FOLDER,
        ALONE,
    )
    one, other = pools[2].run(_fail, timeout=120, folder=tmp_path, phase=phase)
    assert one == other
    shows(one, f"DiskError: {tmp_path / 'step-000100.partial'}", "space left")
    assert newest(tmp_path) == (older, [])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-000050"]


@pytest.mark.first("nan")
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_value_that_is_not_finite_is_never_published(
    tmp_path: Path, pools: Pools, value: float
) -> None:
    older = save(
        tmp_path,
        STATE.__class__(50, samples=50),
        live().state_tensors(),
        DESCRIPTION,
        MODEL_FOLDER,
        ALONE,
    )
    one, other = pools[2].run(_save_poisoned, timeout=120, folder=tmp_path, value=value)
    assert one == other
    assert one[0] == 76
    shows(one[1], "b.weight.exp_avg", "not finite", "lower learning rate")
    assert newest(tmp_path) == (older, [])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-000050"]


def _verify(folder: Path) -> tuple[list[tuple[str, int]], list[str]]:
    """The places of files that this rank hashed, and what was wrong."""
    ranks, hashed = Ranks(torch.distributed.get_rank(), 2), list[tuple[str, int]]()
    real = manifest.hash_part

    def hash_part(file: Path, place: Span, kind: str) -> str:
        hashed.append((file.name, place.start))
        return real(file, place, kind)

    with patch.object(manifest, "hash_part", hash_part):
        problems = [problem.actual for problem in verify(folder / "step-000100", ranks)]
    return hashed, problems


def _blind(folder: Path) -> str:
    """What is raised where rank 1 does not see the folder of rank 0."""
    ranks = Ranks(torch.distributed.get_rank(), 2)
    try:
        with patch.object(Path, "is_dir", lambda path: ranks.first):
            newest(folder, ranks)
    except MeshloomError as error:
        return str(error)
    return "nothing was raised"


def test_each_rank_verifies_a_share_and_all_know_the_result(tmp_path: Path, pools: Pools) -> None:
    pools[2].run(_save_and_load, timeout=120, folder=tmp_path)
    path = tmp_path / "checkpoints/step-000100"
    places = [
        (Path(name).name, place.start)
        for name, record in records_of(path).items()
        for place, _ in record.parts
    ]
    for name in (
        "optimizer/optimizer-00002-of-00002.safetensors",
        "model/model-00001-of-00002.safetensors",
    ):
        content = bytearray((path / name).read_bytes())
        content[-1] ^= 1
        (path / name).write_bytes(content)
    (one, actual), (other, same_seen) = pools[2].run(_verify, timeout=120, folder=path.parent)
    assert sorted(one + other) == sorted(places)
    assert {name for name, _ in one} & {name for name, _ in other}  # each has parts of a file
    assert actual == same_seen and [text[:8] for text in actual] == ["SHA-256 "] * 2


def _without_blake3(folders: list[Path]) -> str:
    """What is raised where rank 1, which lacks a checkpoint by BLAKE3, lacks its package too."""
    rank = torch.distributed.get_rank()
    ranks = kept(folders[rank], Ranks(rank, 2))
    try:
        with patch("trainer.storage.installed", lambda package: ranks.first or package != "blake3"):
            newest(folders[rank], ranks)
    except MeshloomError as error:
        return str(error)
    return "nothing was raised"


@pytest.mark.more
def test_a_machine_without_blake3_is_an_error_of_all(tmp_path: Path, pools: Pools) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    entries, form = live().state_tensors(), ModelForm(hash="blake3")
    path = save(folders[0], STATE, entries, DESCRIPTION, replace(MODEL_FOLDER, form=form), ALONE)
    for raised in pools[2].run(_without_blake3, timeout=60, folders=folders):
        assert "pip install 'meshloom[blake3]'" in raised
    assert path.is_dir()


@pytest.mark.more
def test_a_folder_that_not_all_ranks_see_is_no_damage(tmp_path: Path, pools: Pools) -> None:
    path = save(tmp_path, STATE, live().state_tensors(), DESCRIPTION, MODEL_FOLDER, ALONE)
    for raised in pools[2].run(_blind, timeout=120, folder=tmp_path):
        shows(raised, f"{path}", "rank 1", "Put trainer.run.folder")
    assert newest(tmp_path) == (path, [])
