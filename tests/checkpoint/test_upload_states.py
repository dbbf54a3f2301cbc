"""The states of a copy elsewhere (`upload.py`) and of a restore (`restoration.py`): killed at every
edge, slow, silent, damaged.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from unittest.mock import patch

import pytest

from tests.support.checkpoint.uploading import begun_at, checkpoints, settled
from tests.support.checkpoint_pieces import ALONE
from tests.support.commands import TRAIN, run, write_job
from tests.support.messages import raises
from tests.support.run.resuming import begun, finish
from trainer.checkpoint import faults, published, verify
from trainer.checkpoint.copies import bucket as bucket_module
from trainer.checkpoint.copies import upload as upload_module
from trainer.checkpoint.copies.bucket import Bucket
from trainer.checkpoint.copies.marks import marked_at
from trainer.checkpoint.copies.restoration import restore
from trainer.checkpoint.copies.upload import Upload, check
from trainer.config import Config, load
from trainer.errors import ConfigError, DiskError
from trainer.run.start.choose import choose
from trainer.run.start.request import Request
from trainer.supervise import locks
from trainer.supervise.locks import release


@pytest.fixture
def there(tmp_path: Path) -> str:
    """The address of a disk."""
    return f"file://{tmp_path}/bucket"


@pytest.fixture
def config(tmp_path: Path, there: str) -> Config:
    return load(write_job(tmp_path, checkpoint={"upload": there}))


def whole(there: str, name: str = "job") -> list[str]:
    return marked_at(Bucket(f"{there}/{name}"))


def good(there: str, name: str = "job") -> list[str]:
    """The checkpoints at the copy that have a manifest, each of which is as it was saved."""
    result = whole(there, name)
    for step in result:
        path = Path(there.removeprefix("file://"), name, "checkpoints", step)
        assert verify(path) == [], path
    return result


def killed_at(number: int, work: Callable[[], object], *phases: str) -> bool:
    """Do something in a process that is killed at the n-th of its moments; False if it ends."""
    if (child := os.fork()) == 0:
        count = [0]

        def kill(phase: str) -> None:
            if phase in (phases or ("bucket", "block", "restored")):
                count[0] += 1
                if count[0] == number:
                    os.kill(os.getpid(), signal.SIGKILL)

        code = 1
        with suppress(BaseException), patch.object(faults, "at", kill):
            work()
            code = 0
        os._exit(code)
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


def moments(work: Callable[[], object]) -> Iterator[int]:
    """Kill a process at each of its moments in turn; yield the number of each."""
    number = 1
    while killed_at(number, work):
        yield number
        number += 1
    assert number > 5


# local -> copying -> whole -> pruned


@pytest.mark.more
def test_a_copy_that_is_killed_at_any_moment_is_made_up(tmp_path: Path, there: str) -> None:
    folder = begun_at(tmp_path, 10)
    (folder / "final").mkdir()
    (folder / "final/config.json").write_text("{}")
    own = {"token": "own"}

    def copied() -> None:
        upload = Upload(there, folder)
        upload.claim(own)
        upload.finish()

    copied()
    shutil.rmtree(folder / "checkpoints")
    checkpoints(folder, 20)
    (folder / "final/config.json").write_text('{"later": 1}')
    begins, at = tmp_path / "begins", Path(there.removeprefix("file://"))
    shutil.copytree(at, begins)
    actual = set()
    for _ in moments(copied):
        actual.add(tuple(good(there)))
        upload = Upload(there, folder)
        assert bool(upload.lacking(own)) == (not is_whole(there, folder))
        copied()
        assert good(there) == ["step-000020"] and upload.lacking(own) == []
        assert (at / "job/final/config.json").read_text() == '{"later": 1}'
        shutil.rmtree(at)
        shutil.copytree(begins, at)
    # the older one goes after the newer one is whole
    assert actual == {("step-000010",), ("step-000010", "step-000020"), ("step-000020",)}


def is_whole(there: str, folder: Path) -> bool:
    own = [path.name for path in published(folder / "checkpoints")]
    models = Path(there.removeprefix("file://"), "job", "models.json")
    marked = models.is_file() and json.loads(models.read_text()).get("final")
    same = marked == upload_module.identity(folder / "final")
    return same and set(own) <= set(whole(there))


@contextmanager
def held_at(phase: str, when: Callable[[], bool] = lambda: True) -> Iterator[threading.Event]:
    """Hold threads at a moment until the event is set."""
    free = threading.Event()

    def hold(moment: str) -> None:
        if moment == phase and when():
            free.wait()

    with patch.object(faults, "at", hold):
        try:
            yield free
        finally:
            free.set()


def test_copying_that_is_slower_than_saving_completes_and_says_what_it_left_out(
    tmp_path: Path, there: str
) -> None:
    """With keep_last 1: the one that is copied stays, and the copy's only whole one, too."""
    folder, notes = begun_at(tmp_path, 10), list[str]()
    upload = Upload(there, folder)
    upload.finish()
    checkpoints(folder, 20)
    upload.prune(1, False)
    with held_at("block") as free:
        upload.soon(notes.append)
        while upload._kept is None:
            time.sleep(0.01)
        for step in (30, 40, 50):
            checkpoints(folder, step)
            upload.prune(1, False)
            upload.soon(notes.append)
            assert good(there) == ["step-000010"]
        assert [p.name for p in published(folder / "checkpoints")] == ["step-000020", "step-000050"]
        free.set()
        settled(upload)
    assert {"step-000020", "step-000050"} <= set(good(there))
    assert len(notes) == 1 and "slower than saving" in notes[0], notes
    assert "step-000030" in notes[0] and "step-000040" in notes[0]
    upload.prune(1, False)
    upload.finish()
    assert good(there) == ["step-000050"] and len(published(folder / "checkpoints")) == 1


def test_slow_copying_leaves_no_more_than_the_run_keeps(tmp_path: Path, there: str) -> None:
    """There is always a next one to copy, so that the update has no end."""
    folder, steps = begun_at(tmp_path, 10), iter(range(20, 90, 10))
    upload, copy = Upload(there, folder), Upload._copy

    def saving(own: Upload, path: Path) -> None:
        copy(own, path)
        assert len(whole(there)) <= 3
        if (step := next(steps, None)) is not None:
            checkpoints(folder, step)
            upload.prune(1, False)

    with patch.object(Upload, "_copy", saving):
        upload.finish(keep=(1, False))
    assert good(there) == ["step-000080"]


def test_the_only_whole_one_is_never_removed(tmp_path: Path, there: str) -> None:
    folder = begun_at(tmp_path, 10)
    Upload(there, folder).finish()
    shutil.rmtree(folder / "checkpoints")
    upload = Upload(there, folder)
    upload.finish()  # nothing is here
    assert good(there) == ["step-000010"]
    (checkpoints(folder, 20) / "checkpoints/step-000020/trainer.json").write_text("")
    upload.finish()  # what has lost something is not copied
    assert good(there) == ["step-000010"]
    checkpoints(folder, 5)  # an older backup of the folder
    shutil.rmtree(folder / "checkpoints/step-000020")
    upload.finish()
    assert good(there) == ["step-000005", "step-000010"]
    checkpoints(folder, 30)
    upload.finish()
    assert good(there) == ["step-000005", "step-000030"]


def test_a_copy_that_fails_half_way_goes_on_with_the_same_checkpoint(
    tmp_path: Path, there: str
) -> None:
    """Or copies over a network that fails now and then would never be whole."""
    folder, notes, count = begun_at(tmp_path, 10), list[str](), [0]

    def fail(moment: str) -> None:
        if moment == "block":
            count[0] += 1
            if count[0] % 2 == 0:
                raise ConnectionError("gone for now")

    upload = Upload(there, folder)
    with patch.object(faults, "at", fail), patch.object(bucket_module, "STREAMS", 1):
        for step in range(20, 80, 10):
            upload.soon(notes.append)
            settled(upload)
            checkpoints(folder, step)
            upload.prune(1, False)
    assert good(there) and len(notes) >= 2


# finished


def finished(config: Config) -> Path:
    folder = begun(config, 10)
    finish(folder, 1.0)
    (folder / "final/config.json").write_text("{}")
    os.utime(folder / "final", None)
    return folder


def test_a_run_is_finished_once_its_copy_is_whole(config: Config, there: str) -> None:
    folder = finished(config)
    start = choose(config, Request(), ALONE)
    assert start.finished and start.upload is not None
    with patch.object(faults, "at", failing), pytest.raises(DiskError, match="no network"):
        start.upload.finish()
    start.upload.close()
    release()
    again = choose(config, Request(), ALONE)
    assert again.finished and again.upload is not None
    again.upload.finish()
    release()
    last = choose(config, Request(), ALONE)
    assert last.finished and last.upload is None and good(there) == ["step-000010"]
    (folder / "final/config.json").write_text('{"other": 1}')
    assert choose(config, Request(), ALONE).upload is not None


def failing(moment: str) -> None:
    if moment == "block":
        raise ConnectionError("no network")


def test_a_finished_run_whose_copy_is_anothers_is_not_finished(config: Config, there: str) -> None:
    folder = finished(config)
    start = choose(config, Request(), ALONE)
    assert start.upload is not None
    start.upload.finish()
    release()
    Bucket(f"{there}/{folder.name}").write("upload.json", b'{"token": "another"}')
    with pytest.raises(DiskError, match="written by"):
        choose(config, Request(), ALONE)


# restoring -> restored -> in place


def lost(config: Config, there: str, *names: str) -> Path:
    for name in names:
        folder = begun(config, 10, 20, name=name)
        (folder / "metrics.jsonl").write_text('{"step": 21}\n')
        upload = Upload(there, folder)
        upload.claim({"token": name})
        upload.finish()
        shutil.rmtree(folder)
    return folder


@pytest.mark.more
@pytest.mark.parametrize("names", [("job",), ("job", "job-2", "job-3")])
def test_a_restore_that_is_killed_at_any_moment_is_done_by_the_next_start(
    config: Config, there: str, names: tuple[str, ...]
) -> None:
    folder = lost(config, there, *names)
    runs = Path(config.trainer.run.folder)
    at, begins = Path(there.removeprefix("file://")), runs.parent / "begins"
    shutil.copytree(at, begins)
    for number in moments(lambda: choose(config, Request(), ALONE)):
        start = choose(config, Request(), ALONE)
        assert start.source == folder / "checkpoints/step-000020", number
        assert verify(start.source) == [] and (folder / "metrics.jsonl").exists()
        assert start.upload is not None
        start.upload.close()
        release()
        left = {path.name for path in runs.iterdir()} - set(names)
        assert left == set(), number
        shutil.rmtree(runs)
        shutil.rmtree(at)
        shutil.copytree(begins, at)


def test_what_an_earlier_version_left_of_a_killed_restore_is_no_obstacle(
    config: Config, there: str
) -> None:
    folder = lost(config, there, "job")
    checkpoints(folder, 20)  # was renamed there, before the records came
    (folder / "checkpoints/step-000020/more").write_text("")
    (folder / "logs").mkdir()
    start = choose(config, Request(), ALONE)
    assert start.source == folder / "checkpoints/step-000020" and verify(start.source) == []
    assert (folder / "logs").is_dir()


def test_of_two_starts_at_once_one_restores_and_the_other_sees_its_run(
    config: Config, there: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locks, "LOCK_SECONDS", 0.1)
    folder = lost(config, there, "job")
    wakes, tell = os.pipe()
    if (child := os.fork()) == 0:

        def slow(moment: str) -> None:
            if moment == "block":
                os.write(tell, b".")
            time.sleep(0.1)

        with suppress(BaseException):
            with patch.object(faults, "at", slow):
                choose(config, Request(), ALONE)
            time.sleep(600)
        os._exit(1)
    try:
        os.read(wakes, 1)
        with pytest.raises(ConfigError, match="another process|being trained"):
            choose(config, Request(), ALONE)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert verify(folder / "checkpoints/step-000020") == []


def damage(there: str, name: str) -> None:
    path = Path(there.removeprefix("file://"), "job/checkpoints", name, "trainer.json")
    content = bytearray(path.read_bytes())
    content[9] ^= 2
    path.write_bytes(content)


@pytest.mark.parametrize("kind", ["a bit", "cut off", "gone", "manifest"])
def test_a_damaged_newest_copy_is_skipped_with_a_note_and_replaced_later(
    config: Config, there: str, kind: str
) -> None:
    folder = lost(config, there, "job")
    path = Path(there.removeprefix("file://"), "job/checkpoints/step-000020")
    if kind == "a bit":
        damage(there, "step-000020")
    elif kind == "cut off":
        (path / "trainer.json").write_text("{")
    elif kind == "gone":
        (path / "trainer.json").unlink()
    else:
        (path / "manifest.json").write_text("{")
    start = choose(config, Request(), ALONE)
    assert start.source == folder / "checkpoints/step-000010"
    assert "step-000020" in start.lines[0] and "is damaged" in start.lines[0], start.lines
    assert whole(there) == ["step-000010"]  # the damaged one does not count any more
    checkpoints(folder, 20)
    assert start.upload is not None
    start.upload.finish()
    assert good(there) == ["step-000010", "step-000020"]
    assert "damaged" not in json.loads((folder / "upload.json").read_text())


def test_nothing_but_damaged_copies_is_an_error(config: Config, there: str) -> None:
    folder = lost(config, there, "job")
    for name in ("step-000010", "step-000020"):
        damage(there, name)
    with pytest.raises(DiskError, match="step-000020 .* is damaged.*--fresh"):
        choose(config, Request(), ALONE)
    assert not folder.exists()


def test_a_network_that_fails_skips_nothing(config: Config, there: str) -> None:
    folder = lost(config, there, "job")
    with patch.object(faults, "at", failing), pytest.raises(DiskError, match="no network"):
        choose(config, Request(), ALONE)
    assert choose(config, Request(), ALONE).source == folder / "checkpoints/step-000020"


def test_fresh_forgets_a_restore_that_was_killed(config: Config, there: str) -> None:
    folder = lost(config, there, "job")
    assert killed_at(3, lambda: restore(there, folder), "block")
    runs = Path(config.trainer.run.folder)
    assert [path.name for path in runs.iterdir()] == [".job.restoring"]
    with pytest.raises(DiskError, match="another trainer.run.name"):  # it is not overwritten
        choose(config, Request(fresh=True), ALONE)
    assert not (runs / ".job.restoring").exists()


# no answer


@pytest.fixture
def quick() -> Iterator[None]:
    with patch.multiple(bucket_module, SILENT_SECONDS=1.0, SLOW_NETWORK=1e8):
        yield


@pytest.mark.parametrize("phase", ["bucket", "block"])
def test_an_operation_without_an_answer_is_given_up_and_names_the_address(
    tmp_path: Path, there: str, quick: None, phase: str
) -> None:
    folder, notes = begun_at(tmp_path, 10), list[str]()
    with held_at(phase):
        if phase == "bucket":
            with pytest.raises(DiskError, match=f"{there}.*no answer"):
                check(there)
        upload = Upload(there, folder)
        with pytest.raises(DiskError, match=f"{there}/job.*no answer"):
            upload.finish()
        upload.soon(notes.append)
        settled(upload)
    assert len(notes) == 1 and "no answer" in notes[0] and there in notes[0]
    upload.finish()
    assert good(there) == ["step-000010"]


def test_a_slow_copy_is_not_given_up_while_bytes_move(
    tmp_path: Path, there: str, quick: None
) -> None:
    folder, moved = begun_at(tmp_path, 10), list[int]()
    (folder / "final").mkdir()
    (folder / "final/model.safetensors").write_bytes(bytes(range(256)) * 40)

    def slow(moment: str) -> None:
        if moment == "block":
            time.sleep(0.2)

    upload = Upload(there, folder)
    with patch.object(faults, "at", slow), patch.object(bucket_module, "BLOCK", 1024):
        begun = time.monotonic()
        upload.finish(moved.append)
    assert time.monotonic() - begun > 2.0 and sum(moved) > 10240 and len(moved) > 20
    copied = Path(there.removeprefix("file://"), "job/final/model.safetensors")
    assert copied.read_bytes() == bytes(range(256)) * 40


def test_a_restore_is_progress_while_bytes_move(config: Config, there: str) -> None:
    from trainer.data.progress import Progress

    lost(config, there, "job")
    actual: list[float] = []
    choose(config, Request(), ALONE, Progress(moves=actual.append))
    assert len(actual) > 8


@pytest.mark.more
def test_a_server_that_accepts_and_never_answers(tmp_path: Path) -> None:
    """S3's client retries by itself, for minutes."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        host, port = server.getsockname()
        own = {"AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_DEFAULT_REGION": "us-east-1"}
        own |= {"AWS_ACCESS_KEY_ID": "here", "AWS_SECRET_ACCESS_KEY": "here"}
        with patch.dict("os.environ", own), patch.object(bucket_module, "SILENT_SECONDS", 3.0):
            begun = time.monotonic()
            with raises(DiskError, "s3://bucket/runs", "answer", "3 s"):
                check("s3://bucket/runs")
        assert time.monotonic() - begun < 30


# The whole command


@pytest.mark.more
def test_a_run_says_that_it_is_finished_once_its_copy_is_whole(tmp_path: Path, there: str) -> None:
    """The last copy fails; then it is killed; then nothing is in its way."""
    path = write_job(tmp_path, steps=2, checkpoint={"every": 1, "upload": there})
    words: list[str | Path] = ["python", TRAIN, "--config", path]
    at = Path(there.removeprefix("file://"), "job")
    at.mkdir(parents=True)
    (at / "final").write_text("in the way")
    first = run(*words)
    assert first.code == 74 and there in first.output, first.output
    again = run(*words)
    assert again.code == 74 and "finished: " not in again.output, again.output
    (at / "final").unlink()
    killed = run("python", "-c", KILLED.format(train=TRAIN), "--config", path)
    assert killed.code == -9 and "finished: " not in killed.output, killed.output
    last = run(*words)
    assert last.code == 0 and f"copied: {there}/job" in last.output, last.output
    assert "finished: " in last.output and good(there) == ["step-000001", "step-000002"]
    folder = tmp_path / "runs/job/final"
    for one in folder.iterdir():
        assert (at / "final" / one.name).read_bytes() == one.read_bytes()
    once_more = run(*words)
    assert once_more.code == 0 and "copied: " not in once_more.output, once_more.output


KILLED = """
import os, runpy, signal, sys
from trainer.checkpoint import faults
def at(moment):
    if moment == "block":
        os.kill(os.getpid(), signal.SIGKILL)
faults.at = at
sys.argv[0] = {train!r}
runpy.run_path({train!r}, run_name="__main__")
"""


SLOW = """
import os, runpy, sys, time
from trainer.checkpoint import faults
def at(moment):
    if moment == "block":
        time.sleep(float(os.environ["SLOW"]))
faults.at = at
sys.argv[0] = {train!r}
runpy.run_path({train!r}, run_name="__main__")
"""


@pytest.mark.more
def test_a_restore_that_takes_longer_than_the_watchdog_waits_is_no_hang(
    tmp_path: Path, there: str
) -> None:
    """15 times the patience, 2 s."""
    path = write_job(tmp_path, steps=1, checkpoint={"every": 1, "upload": there})
    words: list[str | Path] = ["python", TRAIN, "--config", path]
    first = run(*words)
    assert first.code == 0, first.output
    shutil.rmtree(tmp_path / "runs")
    slow = ("python", "-c", SLOW.format(train=TRAIN), "--config", path, "trainer.patience=2")
    begun = time.monotonic()
    again = run(*slow, SLOW="8")
    assert again.code == 0 and "step-000001 was copied from" in again.output, again.output
    assert time.monotonic() - begun > 45 and "step 1, 8 samples" in again.output, again.output
