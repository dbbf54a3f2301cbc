"""Prepared data as it is found again: whole, damaged, somebody else's, or where nothing can be
written.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import shutil
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from rich.console import Console

from tests.support import warm
from tests.support.commands import run, warm_server, write_job
from tests.support.data.cache import contents
from tests.support.data.text_samples import options, tokenizer, write_rows
from tests.support.messages import raises, shows
from trainer.config import DataSection
from trainer.data import cache, digest, sealed
from trainer.data.cache import Check, cached_folder
from trainer.data.progress import Progress
from trainer.data.text import preparation
from trainer.data.text.encode import Tokenising
from trainer.data.text.preparation import open_data
from trainer.distributed.ranks import Ranks
from trainer.errors import DataError, DiskError, Problem
from trainer.storage import private_folder

FORK = multiprocessing.get_context("fork")
NOBODY = 65534
TEXTS = [" ".join("abcdefgh"[(row * at) % 8] for at in range(1 + row % 7)) for row in range(60)]


def prepared(path: Path, cache: Path, told: io.StringIO | None = None) -> Path:
    progress = Progress(Console(file=told or io.StringIO(), width=200))
    return preparation.prepare(
        options(path, evaluation_fraction=0.1, workers=1), tokenizer(), cache, progress
    )


# Damage


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def halve(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def instead(folder: Path) -> None:
    folder.rename(folder.with_name("moved"))
    folder.write_text("a file")


FILES = (
    "train/tokens.bin",
    "train/counted.bin",
    "train/samples.npy",
    "evaluation/spans.npy",
    "train/summary.json",
)
DAMAGE: dict[str, tuple[Callable[[Path], Any], tuple[str, ...]]] = {
    **{
        f"a flipped bit of {name}": (lambda f, n=name: flip(f / n), f"the bytes of {name} are not")
        for name in FILES
    },
    "a short file": (
        lambda f: halve(f / "train" / "spans.npy"),
        ("train/spans.npy", "the size"),
    ),
    "an empty file": (
        lambda f: os.truncate(f / "train" / "counted.bin", 0),
        ("train/counted.bin", "the size"),
    ),
    "a lost file": (
        lambda f: (f / "train" / "summary.json").unlink(),
        ("train/summary.json", "the size"),
    ),
    "a foreign file": (
        lambda f: (f / "train" / "more").write_text(""),
        ("train/more", "the size"),
    ),
    "a damaged seal": (lambda f: flip(f / "seal.json"), ("seal.json", "it was written")),
    "an empty seal": (
        lambda f: os.truncate(f / "seal.json", 0),
        ("seal.json", "it was written"),
    ),
    "no seal": (lambda f: (f / "seal.json").unlink(), ("seal.json is missing",)),
    "no folder": (instead, ("it is no folder",)),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_what_is_not_as_it_was_is_made_again_with_a_line(tmp_path: Path, kind: str) -> None:
    path, cache = write_rows(tmp_path / "data.jsonl", *TEXTS), tmp_path / "cache"
    whole = contents(prepared(path, cache))
    folder = prepared(path, cache)
    damage, keys = DAMAGE[kind]
    damage(folder)
    message = io.StringIO()
    assert prepared(path, cache, message) == folder
    assert contents(folder) == whole
    [line] = message.getvalue().splitlines()
    assert line.startswith(f"cache: {folder} is damaged: ")
    shows(line, *keys, "prepared again")
    assert {name.name for name in cache.iterdir()} - {"moved"} == {folder.name}
    message = io.StringIO()
    with patch.object(Tokenising, "__call__", side_effect=AssertionError):
        prepared(path, cache, message)
    assert message.getvalue() == ""


def test_hidden_files_of_a_file_manager_are_no_damage(tmp_path: Path) -> None:
    path, cache = write_rows(tmp_path / "data.jsonl", *TEXTS), tmp_path / "cache"
    (prepared(path, cache) / ".DS_Store").write_text("")
    with patch.object(Tokenising, "__call__", side_effect=AssertionError):
        prepared(path, cache)


def test_all_is_on_the_disk_before_it_has_its_name(tmp_path: Path) -> None:
    path, cache = write_rows(tmp_path / "data.jsonl", *TEXTS), tmp_path / "cache"
    flushed: set[int] = set()
    left: list[str] = []
    fsync, rename = os.fsync, os.rename

    def note(handle: int) -> None:
        fsync(handle)
        flushed.add(os.fstat(handle).st_ino)

    def look(old: Path, new: Path) -> None:
        if new.name.startswith("data-"):
            left.extend(
                str(one) for one in (old, *old.rglob("*")) if one.stat().st_ino not in flushed
            )
        rename(old, new)

    with patch("os.fsync", note), patch("os.rename", look):
        folder = prepared(path, cache)
    assert left == [] and folder.is_dir()
    assert cache.stat().st_ino in flushed


@pytest.mark.parametrize(
    "damage", [flip, halve, lambda path: os.truncate(path, 0)], ids=["flip", "short", "empty"]
)
def test_a_damaged_digest_of_a_large_file_is_not_believed(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    path, cache = tmp_path / "file", tmp_path / "cache"
    path.write_text("one")
    os.utime(path, (1, 1))
    with patch.object(digest, "_QUICK", 0):
        known = digest.digests([path], cache)
        [remembered] = cache.iterdir()
        damage(remembered)
        assert digest.digests([path], cache) == known
        with patch("hashlib.file_digest", side_effect=AssertionError):
            assert digest.digests([path], cache) == known


def test_old_leftovers_go_and_new_ones_stay(tmp_path: Path) -> None:
    for name in (".gone-1", ".partial-old", ".partial-new"):
        (tmp_path / name / "data").mkdir(parents=True)
    os.utime(tmp_path / ".partial-old", (1, 1))
    cached_folder(tmp_path, "name", lambda folder: None)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".partial-new", "name"]


# What a start does not read


def test_of_many_files_a_start_reads_a_few(tmp_path: Path) -> None:
    for number in range(300):
        (tmp_path / f"{number}.png").write_bytes(b"image %d" % number)
    sealed.seal(tmp_path)
    with patch.object(sealed, "_hash", side_effect=sealed._hash) as hashed:
        assert sealed.flaw(tmp_path) == ""
    assert 50 <= hashed.call_count <= 80
    (tmp_path / "299.png").unlink()
    assert "299.png" in sealed.flaw(tmp_path)


SMALL_CHUNKS: dict[str, Any] = {"_CHUNK": 64, "LOOKED_AT": 2}


def flip_quietly(path: Path, at: int) -> None:
    """Flip a bit as a failing disk does, which leaves the file's time as it is."""
    times = path.stat().st_atime_ns, path.stat().st_mtime_ns
    content = bytearray(path.read_bytes())
    content[at] ^= 4
    path.write_bytes(content)
    os.utime(path, ns=times)


def finish(check: Check) -> None:
    """Wait for a comparison. Raises its error."""
    while check.goes_on:
        time.sleep(0.01)
    check.refuse()


def compared(folder: Path) -> Check:
    with Check([folder], begins=True) as check:
        finish(check)
    return check


def cached(cache: Path, notes: io.StringIO | None = None) -> Path:
    """A folder with a file of ten chunks, of which a start reads two, and a small one."""

    def write(folder: Path) -> None:
        (folder / "file").write_text("a" * 640)
        (folder / "small").write_text("b")

    progress = Progress(Console(file=notes or io.StringIO(), width=200))
    with patch.multiple("trainer.data.sealed", **SMALL_CHUNKS):
        return cached_folder(cache, "name", write, progress)


@pytest.mark.parametrize(
    ("name", "chunk", "at_once"),
    [
        ("file", 0, True),
        ("file", 3, False),
        ("file", 9, False),
        ("file", 5, True),
        ("small", 0, True),
    ],
)
def test_what_a_start_does_not_read_is_compared_beside_the_first_steps(
    tmp_path: Path, name: str, chunk: int, at_once: bool
) -> None:
    notes = io.StringIO()
    with patch.multiple("trainer.data.sealed", **SMALL_CHUNKS):
        flip_quietly(cached(tmp_path) / name, 64 * chunk)
        folder = cached(tmp_path, notes)
        assert (f"the bytes of {name}" in notes.getvalue()) is at_once
        if not at_once:
            wrong = f"{folder}: damaged: the bytes of file are not those that were written"
            with pytest.raises(DataError, match=wrong), Check([folder], begins=True) as check:
                finish(check)
            assert check.failed and not folder.exists()
        assert not compared(cached(tmp_path)).failed


def test_a_comparison_that_breaks_off_has_compared_nothing(tmp_path: Path) -> None:
    folder = cached(tmp_path)
    with (
        patch.multiple("trainer.data.sealed", **SMALL_CHUNKS),
        patch("trainer.data.sealed._hash") as hashed,
    ):
        hashed.side_effect = MemoryError("no room")
        with raises(DataError, "compared: MemoryError"):
            compared(folder)


def test_a_folder_that_another_process_has_replaced_is_not_what_was_opened(tmp_path: Path) -> None:
    with patch.multiple("trainer.data.sealed", **SMALL_CHUNKS):
        check = Check([cached(tmp_path)], begins=True)
        shutil.rmtree(tmp_path / "name")
        folder = cached(tmp_path)
        with raises(DataError, "replaced it"), check:
            finish(check)
        assert folder.is_dir()


@pytest.mark.parametrize("begins", [True, False])
def test_an_error_of_damaged_data_is_named_by_its_cause_and_others_stay(
    tmp_path: Path, begins: bool
) -> None:
    with patch.multiple("trainer.data.sealed", **SMALL_CHUNKS):
        with pytest.raises(IndexError), Check([cached(tmp_path)], begins):
            raise IndexError
        flip_quietly(cached(tmp_path) / "file", 200)
        with pytest.raises(DiskError), Check([cached(tmp_path)]):
            raise DiskError(Problem("a", "b", "c"))
        with pytest.raises(DataError, match="the bytes of file"), Check([cached(tmp_path)], begins):
            raise IndexError


def test_a_damaged_folder_that_cannot_be_removed_is_remembered(tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    discard = cache.discard

    def refused(path: Path) -> None:
        if path == tmp_path / "name":
            raise PermissionError
        discard(path)

    with (
        patch.multiple("trainer.data.sealed", **SMALL_CHUNKS),
        patch("tempfile.tempdir", str(tmp_path / "tmp")),
        patch("trainer.data.cache.discard", refused),
    ):
        flip_quietly(cached(tmp_path) / "file", 200)
        folder = cached(tmp_path)
        with pytest.raises(DataError):
            compared(folder)
        notes = io.StringIO()
        result = cached(tmp_path, notes)
        shows(notes.getvalue(), "earlier run", "other bytes")
        assert result == private_folder() / "name" and not compared(result).failed


def test_files_with_other_times_are_read_whole_at_the_start(tmp_path: Path) -> None:
    with patch.multiple("trainer.data.sealed", **SMALL_CHUNKS):
        folder = cached_folder(
            tmp_path, "name", lambda folder: (folder / "file").write_text("a" * 640)
        )
        assert sealed.flaw(folder) == ""
        flip_quietly(folder / "file", 200)
        assert sealed.flaw(folder) == ""
        os.utime(folder / "file", (1, 1))
        assert "the bytes of file" in sealed.flaw(folder)


@pytest.mark.more
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_flaw_ends_a_run_before_a_checkpoint(tmp_path: Path, asynchronous: bool) -> None:
    from tests.support.run.interruptions import command

    def trained(steps: int) -> Any:
        job = write_job(
            tmp_path,
            steps=steps,
            engine="mesh",
            evaluation={},
            checkpoint={"asynchronous": asynchronous},
        )
        code = f"import trainer.data.sealed as m; vars(m).update({SMALL_CHUNKS})"
        started = command(tmp_path, job, code)
        return run(*started, XDG_CACHE_HOME=str(tmp_path / "cache"), **{warm.SOCKET: warm_server()})

    assert trained(1).code == 0
    shutil.rmtree(tmp_path / "runs")
    [tokens] = (tmp_path / "cache").rglob("train/tokens.bin")
    with patch.multiple("trainer.data.sealed", **SMALL_CHUNKS):
        for at in range(tokens.stat().st_size - 1, 0, -64):  # where a start does not look
            flip_quietly(tokens, at)
            if sealed.flaw(tokens.parent.parent) == "":
                break
            flip_quietly(tokens, at)
    result = trained(2_000)
    assert result.code == 65, result.output
    shows(result.output, "damaged", "train/tokens.bin")
    assert list((tmp_path / "runs").rglob("step-*")) == []
    assert trained(1).code == 0


@pytest.mark.parametrize("sources", [1, 2])
def test_the_rank_that_prepares_compares_the_rest_of_any_number_of_sources(
    tmp_path: Path, sources: int
) -> None:
    paths = [write_rows(tmp_path / f"{number}.jsonl", *TEXTS[number:]) for number in range(sources)]
    given = options(paths[0])
    if sources > 1:
        labels = [{"path": str(path), "label": path.stem} for path in paths]
        given = DataSection(**{**given.model_dump(), "path": None, "sources": labels})
    with patch.multiple("trainer.data.sealed", **SMALL_CHUNKS):
        data = open_data(given, tokenizer(), tmp_path / "cache", Ranks())
        flip_quietly(next((tmp_path / "cache").rglob("train/tokens.bin")), 100)
        with pytest.raises(DataError, match="the bytes of train/tokens.bin"), data.check as check:
            finish(check)


class _Second(Ranks):
    """Rank 1, on another machine than rank 0, which has prepared `theirs`."""

    def __init__(self, theirs: Path) -> None:
        super().__init__(1, 2)
        object.__setattr__(self, "theirs", theirs)

    def await_first(self, work: Any) -> Any:
        return self.theirs, (0, 0)  # type: ignore[attr-defined]

    def gather(self, value: Any) -> list[Any]:
        return ["another machine", value]

    def send(self, source: int, value: Any) -> Any:
        return value

    def _least(self, number: int) -> int:
        return number

    def await_each(self, work: Any) -> list[Any]:
        return [None, work()]


def test_a_machine_of_its_own_compares_its_own_copy(tmp_path: Path) -> None:
    path, cache = write_rows(tmp_path / "data.jsonl", *TEXTS), tmp_path / "cache"
    folder = preparation.prepare(options(path), tokenizer(), cache)
    whole = contents(folder)
    flip(folder / "train" / "tokens.bin")
    open_data(options(path), tokenizer(), cache, _Second(folder))
    assert contents(folder) == whole


# Other users


def as_nobody(work: Callable[[], str]) -> str:
    """What `work` tells in a process that may write nothing of ours."""
    ours, theirs = FORK.Pipe(duplex=False)

    def other() -> None:
        if os.getuid() == 0:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
        theirs.send(work())

    child = FORK.Process(target=other)
    child.start()
    theirs.close()
    try:
        return str(ours.recv())
    finally:
        child.join()


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A folder that all may read, below folders that all may pass."""
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == os.getuid() and folder != Path("/"):
            folder.chmod(folder.stat().st_mode | 0o755)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    temporary.chmod(0o1777)
    with patch("tempfile.tempdir", str(temporary)):
        yield tmp_path


def test_another_users_entry_is_read_and_an_own_one_is_made_elsewhere(shared: Path) -> None:
    path, cache = write_rows(shared / "data.jsonl", *TEXTS), shared / "cache"
    first = prepared(path, cache)
    cache.chmod(0o555)

    def read() -> str:
        message = io.StringIO()
        return f"{prepared(path, cache, message)} {message.getvalue()}"

    assert as_nobody(read) == f"{first} "
    other = write_rows(shared / "other.jsonl", *TEXTS[1:])

    def make() -> str:
        message = io.StringIO()
        result = prepared(other, cache, message)
        assert result.parent == private_folder()
        assert prepared(other, cache, io.StringIO()) == result
        return message.getvalue()

    line = as_nobody(make)
    shows(line, f"{cache} can't", f"{shared}/temporary/")
    shows(line, "XDG_CACHE_HOME", "place")
    assert line.count("\n") == 1
    assert contents(next((shared / "temporary").glob("*/data-*"))) == contents(
        prepared(other, shared / "elsewhere")
    )


def test_another_users_damaged_or_hidden_entry_is_made_again_elsewhere(shared: Path) -> None:
    path, cache = write_rows(shared / "data.jsonl", *TEXTS), shared / "cache"
    folder = prepared(path, cache)
    whole = contents(folder)

    def make() -> str:
        message = io.StringIO()
        assert contents(prepared(path, cache, message)) == whole
        return message.getvalue()

    flip(folder / "train" / "tokens.bin")
    cache.chmod(0o555)
    assert [line.split(":")[0] for line in as_nobody(make).splitlines()] == ["cache", "cache"]
    cache.chmod(0o755)
    prepared(path, cache)
    folder.chmod(0o000 if os.getuid() else 0o700)
    cache.chmod(0o555)
    assert "can't be used" in as_nobody(make)


def test_where_no_folder_can_be_there_is_one_among_temporary_files(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "temporary").mkdir()
    message = io.StringIO()
    with patch("tempfile.tempdir", str(tmp_path / "temporary")):
        progress = Progress(Console(file=message, width=200))
        for _ in range(2):  # told once
            result = cached_folder(
                tmp_path / "file" / "cache", "name", lambda folder: None, progress
            )
    assert result == tmp_path / "temporary" / f"meshloom-{os.getuid()}" / "name"
    assert stat.S_IMODE(result.parent.stat().st_mode) == 0o700
    assert message.getvalue().count("\n") == 1 and "(Not a directory)" in message.getvalue()


def test_a_temporary_folder_that_others_may_write_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / f"meshloom-{os.getuid()}").mkdir()
    (tmp_path / f"meshloom-{os.getuid()}").chmod(0o777)
    with (
        patch("tempfile.tempdir", str(tmp_path)),
        raises(DiskError, "user's own"),
    ):
        cached_folder(tmp_path / "file", "name", lambda folder: None)
