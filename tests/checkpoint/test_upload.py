"""Runs that are copied to another place while they train, and resume where nothing of them is left."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any
from unittest.mock import patch

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from tests.support.checkpoint.uploading import begun_at, checkpoints, settled
from tests.support.checkpoint_pieces import ALONE
from tests.support.commands import run, write_job
from tests.support.messages import raises, shows, shows_each
from tests.support.run.resuming import begun
from tests.support.s3 import served
from trainer.checkpoint import faults, prune, verify
from trainer.checkpoint.copies import marks
from trainer.checkpoint.copies.marks import mark_at
from trainer.checkpoint.copies.restoration import restore
from trainer.checkpoint.copies.upload import Upload, check
from trainer.config import Config, load
from trainer.errors import ConfigError, DiskError
from trainer.run.start.choose import choose
from trainer.run.start.request import Request
from trainer.storage import to_json

ADDRESS = "memory://bucket/runs"


@pytest.fixture(autouse=True)
def empty_memory() -> Iterator[None]:
    yield
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return load(write_job(tmp_path, checkpoint={"upload": ADDRESS}))


def there(address: str = ADDRESS) -> list[str]:
    files, root = fsspec.core.url_to_fs(address)
    return sorted(name.removeprefix(root).lstrip("/") for name in files.find(root))


def content(folder: Path) -> dict[str, bytes]:
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def test_a_run_is_copied_and_comes_back(config: Config, tmp_path: Path) -> None:
    folder = begun(config, 10, 20)
    (folder / "metrics.jsonl").write_text('{"step": 21}\n')
    before = content(folder / "checkpoints/step-000020")
    assert Upload(ADDRESS, folder).finish() == f"{ADDRESS}/job"
    shutil.rmtree(folder)
    start = choose(config, Request(), ALONE)
    assert start.source == folder / "checkpoints/step-000020"
    assert content(start.source) == before and verify(start.source) == []
    shows(start.lines[0], "step-000020", "copied", f"{ADDRESS}")
    assert "21" in start.lines[1]  # which is repeated
    assert start.upload is not None


def test_a_run_that_is_here_is_not_copied_back(config: Config) -> None:
    folder = begun(config, 10)
    Upload(ADDRESS, folder).finish()
    checkpoints(folder, 20)
    start = choose(config, Request(), ALONE)
    assert start.source == folder / "checkpoints/step-000020" and start.lines == []


def test_another_training_begins_beside_the_one_that_was_copied(config: Config) -> None:
    folder = begun(config, 10, request={"trainer": {"steps": 9}})
    Upload(ADDRESS, folder).finish()
    shutil.rmtree(folder)
    start = choose(config, Request(), ALONE)
    assert start.folder.name == "job-2" and start.source is None


def test_the_last_run_of_a_name_comes_back(config: Config) -> None:
    for name, step in (("job", 30), ("job-2", 10)):
        folder = begun(config, step, name=name)
        Upload(ADDRESS, folder).finish()
        shutil.rmtree(folder)
    start = choose(config, Request(), ALONE)
    assert start.source is not None and start.source.parts[-3:] == (
        "job-2",
        "checkpoints",
        "step-000010",
    )


def test_a_fresh_run_takes_nothing(config: Config) -> None:
    folder = begun(config, 10)
    Upload(ADDRESS, folder).finish()
    shutil.rmtree(folder)
    assert choose(config, Request(fresh=True), ALONE).source is None


def test_the_manifest_is_the_last_file_and_is_removed_first(tmp_path: Path) -> None:
    folder, files = checkpoints(tmp_path / "job", 10), MemoryFileSystem
    calls: list[str] = []
    opened, rm = files.open, files.rm_file

    def noting(kind: str, plain: Any) -> Any:
        def noted(own: Any, path: str, *arguments: Any, **options: Any) -> Any:
            calls.append(f"{kind} {path}")
            return plain(own, path, *arguments, **options)

        return noted

    with (
        patch.object(files, "open", noting("open", opened)),
        patch.object(files, "rm_file", noting("rm", rm)),
    ):
        upload = Upload(ADDRESS, folder)
        upload.finish()
        copied = [call for call in calls if "step-" in call and call.startswith("open")]
        assert copied[-1].endswith("manifest.json") and len(copied) == 5, copied
        checkpoints(folder, 20)
        prune(folder / "checkpoints", keep_last=1)
        calls.clear()
        upload.finish()
    removed = [call for call in calls if "step-000010" in call]
    assert removed[0].startswith("rm ") and removed[0].endswith("step-000010/manifest.json")
    assert {name.split("/")[2] for name in there() if "step" in name} == {"step-000020"}


@contextmanager
def failing(at: int, phase: str = "bucket") -> Iterator[list[int]]:
    """Fail at the n-th operation at the address, and at all later ones; yield their number."""
    count = [0]

    def fail(moment: str) -> None:
        if moment == phase:
            count[0] += 1
            if count[0] >= at:
                raise ConnectionError("the network is gone")

    with patch.object(faults, "at", fail):
        yield count


def operations(work: Callable[[], object]) -> int:
    with failing(10**9) as count:
        work()
    return count[0]


@pytest.mark.more
def test_a_failure_at_any_operation_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    folder = begun_at(tmp_path, 10)
    upload = Upload(ADDRESS, folder)
    upload.finish()
    checkpoints(folder, 20)
    store = deepcopy(MemoryFileSystem.store)
    number = operations(upload.finish)
    assert number > 10
    for at in range(1, number + 1):
        MemoryFileSystem.store.clear()
        MemoryFileSystem.store.update(deepcopy(store))
        upload = Upload(ADDRESS, folder)
        with failing(at), pytest.raises(DiskError, match="network is gone"):
            upload.finish()
        shutil.move(folder, tmp_path / "gone")
        lines = restore(ADDRESS, folder)
        assert lines and verify(next((folder / "checkpoints").iterdir())) == [], at
        shutil.rmtree(folder)
        shutil.move(tmp_path / "gone", folder)
        upload.finish()  # what is missing is copied
        assert upload._missing() == []


@pytest.mark.parametrize("name", ["../../../outside", "/outside", "model/weights.pkl"])
def test_a_manifest_that_leads_elsewhere_is_refused(tmp_path: Path, name: str) -> None:
    folder = begun_at(tmp_path, 10)
    Upload(ADDRESS, folder).finish()
    shutil.rmtree(folder)
    files, at = MemoryFileSystem(), "/bucket/runs/job/checkpoints/step-000010/manifest.json"
    manifest = json.loads(files.cat_file(at))
    manifest["files"][name] = {"size": 1, "sha256": "0" * 64}
    files.pipe_file(at, to_json(manifest))
    before = content(tmp_path)
    with pytest.raises(DiskError, match="leaves the folder|pickle"):
        restore(ADDRESS, folder)
    assert [path for path in content(tmp_path).keys() - before.keys() if "job" not in path] == []
    assert not (folder / "checkpoints/step-000010").exists()


def test_a_copy_that_fails_is_said_and_tried_again(tmp_path: Path) -> None:
    folder, notes = begun_at(tmp_path, 10), list[str]()
    upload = Upload(ADDRESS, folder)
    with failing(1):
        upload.soon(notes.append)
        settled(upload)
    assert len(notes) == 1
    shows(notes[0], "checkpoint tries")
    assert f"{ADDRESS}/job" in notes[0] and "the network is gone" in notes[0]
    upload.soon(notes.append)
    settled(upload)
    assert len(notes) == 1 and "job/checkpoints/step-000010/manifest.json" in there()


# One writer of a copy


@pytest.fixture
def quick() -> Iterator[None]:
    """Signs of life every 0.02 s, and death after 1.5 s without one."""
    with patch.multiple(marks, SIGN_SECONDS=0.02, PATIENCE_SECONDS=1.5):
        yield


def claimed(folder: Path, token: str, follows: str | None = None) -> Upload:
    upload = Upload(ADDRESS, folder)
    upload.claim({"token": token, "follows": follows})
    return upload


def copied_bytes() -> dict[str, bytes]:
    names = [name for name in there() if not name.endswith("upload.json")]
    return {name: MemoryFileSystem().cat_file(f"/bucket/runs/{name}") for name in names}


def dies(upload: Upload) -> None:
    upload._ended.set()
    while (last := mark_at(upload._address)) and not time.sleep(0.3):  # a sign is on its way
        if mark_at(upload._address) == last:
            return


def test_a_second_machine_is_refused_while_the_first_lives(
    config: Config, tmp_path: Path, quick: None
) -> None:
    first = claimed(begun_at(tmp_path / "first", 10), "first")
    first.soon(print)
    settled(first)
    before = there()
    with raises(DiskError, "written by", "last seen") as caught:
        choose(config, Request(), ALONE)
    assert f"{ADDRESS}/job" in str(caught.value)
    shows(caught.value, "stop the other")
    assert there() == before and not (Path(config.trainer.run.folder) / "job").exists()
    first.finish()
    start = choose(config, Request(), ALONE)  # the first has ended
    shows(start.lines[0], "step-000010", "copied", f"{ADDRESS}")


def test_a_copy_whose_run_has_ended_is_followed_at_once(config: Config, tmp_path: Path) -> None:
    folder = begun_at(tmp_path / "first", 10)
    (folder / "environment.json").write_text(json.dumps({"request": config.raw}))
    upload = claimed(folder, "first")
    upload.finish()
    begun = time.monotonic()
    start = choose(config, Request(), ALONE)
    assert time.monotonic() - begun < 10
    shows_each(start.lines, ("step-000010", "copied", f"{ADDRESS}"))
    assert mark_at(f"{ADDRESS}/job")["ended"] is False  # the second one lives
    with pytest.raises(DiskError, match="of this folder alone"):
        upload.finish()
    assert start.upload is not None
    start.upload.finish()


def test_a_dead_machine_is_followed_and_told_if_it_was_not_dead(
    config: Config, tmp_path: Path, quick: None
) -> None:
    folder = begun_at(tmp_path / "first", 10)
    (folder / "environment.json").write_text(json.dumps({"request": config.raw}))
    first, notes = claimed(folder, "first"), list[str]()
    first._update(print)
    dies(first)
    start = choose(config, Request(), ALONE)
    assert start.source is not None and start.source.name == "step-000010"
    shows(start.lines[0], "taken over")
    checkpoints(start.folder, 30)
    assert start.upload is not None and start.upload.finish() == f"{ADDRESS}/job"
    before = copied_bytes()
    checkpoints(folder, 20)
    first.soon(notes.append)
    settled(first)
    assert len(notes) == 1
    shows(notes[0], "nothing is written")
    with raises(DiskError, "written by", "folder alone"):
        first.finish()
    assert copied_bytes() == before and "step-000020" not in str(there())
    with raises(DiskError, "moved away"):
        claimed(folder, "first")  # nor does it go on from its older checkpoint, later


def test_the_same_folder_goes_on_at_once(config: Config) -> None:
    folder = begun(config, 10)
    start = choose(config, Request(), ALONE)
    assert start.upload is not None
    dies(start.upload)
    (folder / ".lock").unlink()
    again = choose(config, Request(), ALONE)  # waits for nothing
    assert again.upload is not None and again.source == folder / "checkpoints/step-000010"
    again.upload.finish()


def test_of_two_processes_with_the_same_folder_the_first_stops(tmp_path: Path) -> None:
    """A run's folder that was copied by hand to another machine has the same mark."""
    folder = begun_at(tmp_path, 10)
    first = claimed(folder, "token")
    with patch("os.getpid", return_value=1):
        second = claimed(folder, "token")
    second.finish()
    with pytest.raises(DiskError, match="written by"):
        first.finish()


@pytest.mark.parametrize("request_", [Request(), Request(fresh=True)])
def test_another_run_of_the_name_is_not_overwritten(
    config: Config, tmp_path: Path, request_: Request
) -> None:
    claimed(begun_at(tmp_path / "first", 10), "first").finish()
    before = there()
    if not request_.fresh:
        begun(config, 5)
    with pytest.raises(DiskError, match="Set another trainer.run.name"):
        choose(config, request_, ALONE)
    assert there() == before


def test_a_copy_that_is_taken_over_meanwhile_gets_no_manifest(tmp_path: Path) -> None:
    folder, files = begun_at(tmp_path, 10), MemoryFileSystem()
    upload = claimed(folder, "first")

    def taking(moment: str) -> None:
        if moment == "block":
            files.pipe_file("/bucket/runs/job/upload.json", b'{"token": "second"}')

    with patch.object(faults, "at", taking), pytest.raises(DiskError, match="written by"):
        upload.finish()
    assert not [name for name in there() if name.endswith("manifest.json")]


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("nowhere://bucket/runs", "Protocol not known: nowhere"),
        ("gs://bucket/runs", "Please install gcsfs"),
        ("file:///proc/none", "No such file"),
    ],
)
def test_an_address_that_cannot_be_written_is_refused_at_the_start(
    config: Config, address: str, words: str
) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        check(address)
    assert "s3://bucket/runs" in str(caught.value)
    section = {**config.raw["trainer"], "checkpoint": {"upload": address}}
    with pytest.raises(ConfigError):
        choose(load({**config.raw, "trainer": section}), Request(), ALONE)
    assert not (Path(config.trainer.run.folder) / "job").exists()


@pytest.fixture
def s3() -> Iterator[dict[str, str]]:
    with served() as environment:
        yield environment


@pytest.mark.more
def test_a_run_whose_machine_is_lost_goes_on_bit_for_bit(
    tmp_path: Path, s3: dict[str, str]
) -> None:
    """Two ranks, and a bucket of S3."""
    whole, lost, address = tmp_path / "whole", tmp_path / "lost", "s3://bucket/runs"
    for folder in (whole, lost):
        folder.mkdir()
    two: list[str | Path] = ["torchrun", "--standalone", "--nproc-per-node", "2", "launch/train.py"]
    plain = run(*two, "--config", write_job(whole, steps=4, checkpoint={"every": 2}))
    assert plain.code == 0, plain.output
    path = write_job(lost, steps=4, checkpoint={"every": 2, "upload": address})
    first = run(*two, "--config", path, **s3)
    assert first.code == 0 and f"copied: {address}/job" in first.output, first.output
    files = fsspec.filesystem("s3", skip_instance_cache=True)
    for name, value in content(lost / "runs/job/final").items():
        assert files.cat_file(f"bucket/runs/job/final/{name}") == value
    # the machine was lost while step 4 was saved
    shutil.rmtree(lost / "runs")
    files.rm_file("bucket/runs/job/checkpoints/step-000004/manifest.json")
    second = run(*two, "--config", path, **s3)
    shows(second.output, "step-000002", "copied", f"{address}")
    shows(second.output, "step 2, 16 samples", "seen")
    files.invalidate_cache()
    assert files.exists("bucket/runs/job/checkpoints/step-000004/manifest.json")
    assert content(lost / "runs/job/final") == content(whole / "runs/job/final")
