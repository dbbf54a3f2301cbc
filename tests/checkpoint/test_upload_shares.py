"""Copies to which several ranks write: who copies what, and ranks that fail, hang or see nothing."""

from __future__ import annotations

import json
import re
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import fsspec
import pytest
import torch.distributed as dist
from fsspec.implementations.memory import MemoryFileSystem

from tests.support.checkpoint.sharing import LARGE, copied_by, quick, ranks_at, with_files
from tests.support.checkpoint.uploading import settled
from tests.support.commands import TRAIN, run, write_job
from tests.support.messages import shows
from tests.support.s3 import served
from trainer.checkpoint import faults, published, verify
from trainer.checkpoint.copies import bucket as bucket_module
from trainer.checkpoint.copies import marks, rank_share
from trainer.checkpoint.copies import shares as shares_module
from trainer.checkpoint.copies.bucket import Bucket
from trainer.checkpoint.copies.share_store import Arrival, ShareJob, ShareStore
from trainer.checkpoint.copies.shares import digest_of_manifest
from trainer.checkpoint.copies.upload import Upload

SIZES = [40_000 + 1000 * number for number in range(6)]


@pytest.fixture
def there(tmp_path: Path) -> str:
    """The address of a disk."""
    return f"file://{tmp_path}/bucket"


@pytest.fixture(autouse=True)
def empty_memory() -> Iterator[None]:
    yield
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


def folders_of(tmp_path: Path, count: int) -> list[Path]:
    """The run's folder of each rank, with one checkpoint, the same in all."""
    folders = [tmp_path / f"rank-{rank}" / "job" for rank in range(count)]
    with_files(folders[0], 10, SIZES)
    for folder in folders[1:]:
        shutil.copytree(folders[0], folder)
    return folders


def good(there: str) -> list[str]:
    folder = Path(there.removeprefix("file://"), "job")
    steps = [p for p in published(folder / "checkpoints") if (p / "manifest.json").exists()]
    assert [problem for step in steps for problem in verify(step)] == []
    return [step.name for step in steps]


def large(sizes: dict[str, int]) -> list[str]:
    return [name for name, size in sizes.items() if size >= LARGE]


def manifests(there: str) -> list[Path]:
    return list(Path(there.removeprefix("file://")).rglob("checkpoints/*/manifest.json"))


def test_the_large_files_go_by_all_ranks_and_the_small_ones_by_the_first(
    tmp_path: Path, there: str
) -> None:
    folders = folders_of(tmp_path, 3)
    moved: list[int] = []
    with ranks_at(there, folders) as (first, *_), copied_by(folders) as copied:
        first.finish(moved.append)
    assert [len(large(copied[rank])) for rank in range(3)] == [2, 2, 2], copied
    assert all(size >= LARGE for rank in (1, 2) for size in copied[rank].values())
    assert good(there) == ["step-000010"]
    assert sum(moved) > sum(SIZES)  # with what the other ranks moved


def test_the_final_model_goes_by_all_ranks_too(tmp_path: Path, there: str) -> None:
    folders = folders_of(tmp_path, 2)
    for folder in folders:
        (folder / "final").mkdir()
        for name in "abcd":
            (folder / "final" / name).write_bytes(name.encode() * 2 * LARGE)
    with ranks_at(there, folders) as (first, *_), copied_by(folders) as copied:
        first.finish()
    assert {len({*"abcd"} & copied[rank].keys()) for rank in range(2)} == {2}, copied
    final = Path(there.removeprefix("file://"), "job/final")
    assert {path.name: path.read_bytes()[:1] for path in final.iterdir()} == {
        name: name.encode() for name in "abcd"
    }


def test_a_rank_that_fails_is_named_and_what_arrived_is_not_copied_again(
    tmp_path: Path, there: str
) -> None:
    folders, notes, put = folders_of(tmp_path, 3), list[str](), Bucket.put

    def fail(own: Bucket, source: Path, path: str) -> None:
        if source.is_relative_to(folders[2]):
            raise ConnectionError("the cable is out")
        put(own, source, path)

    with ranks_at(there, folders) as (first, *_):
        with patch.object(Bucket, "put", fail), copied_by(folders) as copied:
            first.soon(notes.append)
            settled(first)
        assert len(notes) == 1 and manifests(there) == []
        shows(notes[0], "checkpoint tries", "rank 2", f"{there}/job", "the cable is out")
        arrived = {*copied[0], *copied[1]}
        with copied_by(folders) as again:
            first.soon(notes.append)
            settled(first)
        assert len(notes) == 1 and good(there) == ["step-000010"]
        assert 2 not in again  # it failed last
        more = set(large(again[0])) | set(large(again[1]))
        assert len(arrived & set(more)) == 0 and len(more) == 2, (arrived, again)


def test_a_rank_that_never_answers_is_given_up_and_named(tmp_path: Path, there: str) -> None:
    folders, notes = folders_of(tmp_path, 2), list[str]()
    with ranks_at(there, folders) as (first, _):
        shares = first._shares
        assert shares is not None
        shares._store.come(Arrival(2, "elsewhere"))  # and does nothing more
        with patch.multiple(bucket_module, SILENT_SECONDS=0.5, SLOW_NETWORK=1e9):
            first.soon(notes.append)
            settled(first)
        assert len(notes) == 1 and manifests(there) == []
        shows(notes[0], "no answer", "rank 2", f"{there}/job")
        assert "rank 1" not in notes[0]
        first.soon(notes.append)
        settled(first)
    assert len(notes) == 1 and good(there) == ["step-000010"]


def test_a_rank_that_never_comes_is_waited_for_once(tmp_path: Path, there: str) -> None:
    """Its machine does not reach the address, or is slow."""
    folders = folders_of(tmp_path, 2)
    begun = time.monotonic()
    with (
        patch.object(shares_module, "COME_SECONDS", 2.0),
        ranks_at(there, folders, missing=1) as (first, _),
        copied_by(folders) as copied,
    ):
        first.finish()
    assert time.monotonic() - begun > 2.0
    assert [len(large(copied[rank])) for rank in range(2)] == [3, 3]
    assert good(there) == ["step-000010"]


def test_the_first_waits_for_ranks_that_come_later(tmp_path: Path, there: str) -> None:
    """A run that is started again copies at once what an earlier process has not copied."""
    folders = folders_of(tmp_path, 2)
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    first, other = (Upload(there, folder) for folder in folders)
    first.claim({"token": "own"})
    with quick(), copied_by(folders) as copied:
        first.share(0, 2, store)
        first.soon(print)
        time.sleep(0.3)
        assert copied == {}
        other.share(1, 2, store)
        settled(first)
        first.stop_sharing()
        other.stop_sharing()
    first.close()
    assert [len(large(copied[rank])) for rank in range(2)] == [3, 3]


@pytest.mark.parametrize("lack", ["folder", "size", "manifest", "file"])
def test_what_another_rank_does_not_see_is_copied_by_the_first(
    tmp_path: Path, there: str, lack: str
) -> None:
    folders = folders_of(tmp_path, 2)
    path = folders[1] / "checkpoints/step-000010"
    files = sorted((path / "model").glob("*.data"))
    if lack == "folder":
        shutil.rmtree(folders[1])
    elif lack == "manifest":
        (path / "manifest.json").write_text("{}")
    for file in files:
        if lack == "file":
            file.unlink()
        elif lack == "size":
            file.write_bytes(file.read_bytes()[:-1])
    with ranks_at(there, folders) as (first, *_), copied_by(folders) as copied:
        first.finish()
    assert 1 not in copied and len(large(copied[0])) == len(SIZES)
    assert good(there) == ["step-000010"]


def test_a_checkpoint_that_another_node_removes_meanwhile_is_copied_by_the_first(
    tmp_path: Path, there: str
) -> None:
    """Each node removes the checkpoints of its own folder; the first's stays until it is whole."""
    folders, put, notes = folders_of(tmp_path, 2), Bucket.put, list[str]()
    one_at_a_time = threading.Lock()

    def removing(own: Bucket, source: Path, path: str) -> None:
        with one_at_a_time:
            if source.is_relative_to(folders[1]) and source.exists():
                shutil.rmtree(folders[1] / "checkpoints")
                with_files(folders[0], 20, [8])
                first.prune(1, False)
        put(own, source, path)

    with ranks_at(there, folders) as (first, *_), patch.object(Bucket, "put", removing):
        first.soon(notes.append)
        settled(first)
    assert not [note for note in notes if "not copied" in note]
    assert "step-000010" in good(there)


def test_a_place_that_is_not_the_first_ranks_gets_nothing(tmp_path: Path, there: str) -> None:
    """As a path that is a disk of each node."""
    folders, notes = folders_of(tmp_path, 2), list[str]()
    plain = rank_share.mark_of
    with (
        patch.object(rank_share, "mark_of", lambda bucket: {**plain(bucket), "token": "another"}),
        ranks_at(there, folders) as (first, *_),
        copied_by(folders) as copied,
    ):
        first.soon(notes.append)
        settled(first)
    assert 1 not in copied and good(there) == ["step-000010"]
    assert len(notes) == 1
    shows(notes[0], "another place", "rank 1", f"{there}/job", "upload.json")


def test_other_ranks_stop_when_another_machine_takes_over(tmp_path: Path, there: str) -> None:
    folders, notes = folders_of(tmp_path, 2), list[str]()
    blocks = threading.Event()

    def slow(moment: str) -> None:
        if moment == "block":
            blocks.set()
            time.sleep(0.05)

    with (
        patch.multiple(marks, SIGN_SECONDS=0.02),
        ranks_at(there, folders) as (first, *_),
        patch.object(bucket_module, "BLOCK", 64),
        patch.object(faults, "at", slow),
        copied_by(folders) as copied,
    ):
        first.soon(notes.append)
        blocks.wait()
        mark = Path(there.removeprefix("file://"), "job", "upload.json")
        deadline = time.monotonic() + 20
        while not notes and time.monotonic() < deadline:  # a sign of the first may overwrite it
            mark.with_name("second").write_bytes(b'{"token": "second"}')
            mark.with_name("second").replace(mark)
            time.sleep(0.02)
        settled(first)
        while any(thread.name == "share at work" for thread in threading.enumerate()):
            time.sleep(0.01)
    assert len(notes) == 1 and manifests(there) == [] and copied == {}
    shows(notes[0], "nothing is written")


def test_a_rank_stops_if_the_first_gives_no_sign_of_life(tmp_path: Path, there: str) -> None:
    """As if its process were suspended, while another machine takes over."""
    folders = folders_of(tmp_path, 1)
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    Bucket(f"{there}/job").write("upload.json", b'{"token": "own"}')

    def slow(moment: str) -> None:
        if moment == "block":
            time.sleep(0.05)

    name = "model/part-00.data"
    other = Upload(there, folders[0])
    with (
        quick(),
        patch.object(rank_share, "FIRST_SECONDS", 0.3),
        patch.object(bucket_module, "BLOCK", 64),
        patch.object(faults, "at", slow),
    ):
        first = ShareStore(store, 0)
        first.open("own")
        other.share(1, 2, store)
        while not first.arrivals():
            time.sleep(0.01)
        digest = digest_of_manifest(folders[0] / "checkpoints/step-000010")
        job = ShareJob(1, "checkpoints/step-000010", digest, {1: {name: SIZES[0]}})
        first.offer(job)
        while not (reports := first.reports(job)):
            time.sleep(0.01)
        other.stop_sharing()
    assert reports[0].done == [] and "rank 0" in str(reports[0].problem)


def threads() -> list[str]:
    return [one.name for one in threading.enumerate() if one.name in ("share", "upload")]


def test_threads_end_with_the_run(tmp_path: Path, there: str) -> None:
    with ranks_at(there, folders_of(tmp_path, 3)):
        assert threads() == ["share", "share"]
    assert threads() == []


NOTING = """
import os, runpy, sys
from trainer.checkpoint.copies import share_store, shares
from trainer.checkpoint.copies.bucket import Bucket
shares.SMALL = 0
share_store.POLL_SECONDS = share_store.TICK_SECONDS = 0.05
put = Bucket.put
def noted(own, source, path):
    put(own, source, path)
    with open(os.environ["NOTES"], "a") as file:
        file.write(os.environ["RANK"] + " " + source.name + chr(10))
Bucket.put = noted
sys.argv[0] = {train!r}
runpy.run_path({train!r}, run_name="__main__")
"""


@pytest.mark.more
def test_two_processes_copy_a_run_and_one_restores_it(tmp_path: Path) -> None:
    """A bucket of S3."""
    program = tmp_path / "noting.py"
    program.write_text(NOTING.format(train=TRAIN))
    notes = tmp_path / "notes"
    with served() as s3:
        own = {"every": 1, "upload": "s3://bucket/runs"}
        path = write_job(tmp_path, steps=3, checkpoint=own)
        two = ["torchrun", "--standalone", "--nproc-per-node", "2", str(program)]
        first = run(*two, "--config", path, NOTES=str(notes), **s3)
        assert first.code == 0 and "copied: s3://bucket/runs/job" in first.output, first.output
        by = dict(re.findall(r"(\d) (model\S+)", notes.read_text()))
        assert by.keys() == {"0", "1"}, notes.read_text()
        shutil.rmtree(tmp_path / "runs")
        again = run(*two, "--config", path, "trainer.steps=4", NOTES=str(notes), **s3)
        assert again.code == 0, again.output
        shows(again.output, "step-000003", "copied", "s3://bucket/runs")
        files = fsspec.filesystem("s3", skip_instance_cache=True)
        manifest = json.loads(
            files.cat_file("bucket/runs/job/checkpoints/step-000003/manifest.json")
        )
        for name, record in manifest["files"].items():
            at = f"bucket/runs/job/checkpoints/step-000003/{name}"
            assert files.info(at)["size"] == record["size"]
