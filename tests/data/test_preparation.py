"""Preparing: the same bytes by any number of processes, begun again after a kill, once for all."""

from __future__ import annotations

import datetime
import io
import json
import multiprocessing
import os
import queue
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch.distributed as dist
from rich.console import Console

from tests.support.data.cache import contents
from tests.support.data.text_samples import options, tokenizer, write_rows
from tests.support.messages import raises, shows
from tests.support.pool import Pools
from trainer.data import digest, workers
from trainer.data.cache import cached_folder
from trainer.data.progress import Progress
from trainer.data.text import preparation
from trainer.data.text.cutting import PartWriter
from trainer.data.text.token_files import PreparedSource
from trainer.distributed.ranks import Ranks
from trainer.errors import DataError, Problem

FORK = multiprocessing.get_context("fork")
TEXTS = [" ".join("abcdefgh"[(row * at) % 8] for at in range(1 + row % 7)) for row in range(60)]
CHATS = [[("user", text), ("assistant", "a b")] for text in TEXTS]


@pytest.fixture(autouse=True)
def small_chunks() -> Any:
    with patch("trainer.data.text.encode._DOCUMENTS", 4):
        yield


def chat(*turns: tuple[str, str]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def prepared(path: Path, cache: Path, **changes: Any) -> Path:
    return preparation.prepare(
        options(path, evaluation_fraction=0.1, **changes), tokenizer(), cache
    )


# Processes


@pytest.mark.parametrize("documents", ["concatenate", "pack"])
@pytest.mark.parametrize("rows", [TEXTS, [chat(*turns) for turns in CHATS]], ids=["texts", "chats"])
def test_the_same_bytes_by_one_process_and_by_three(
    tmp_path: Path, rows: list[Any], documents: str
) -> None:
    path = write_rows(tmp_path / "data.jsonl", *rows)
    alone, together = (
        contents(prepared(path, tmp_path / str(count), documents=documents, workers=count))
        for count in (1, 3)
    )
    assert alone == together
    assert {"train/tokens.bin", "evaluation/samples.npy"} < alone.keys()
    assert not any("lengths" in name for name in alone)


@pytest.mark.parametrize("count", [1, 3])
def test_the_first_bad_row_is_named_whoever_finds_it(tmp_path: Path, count: int) -> None:
    rows: list[Any] = [chat(*turns) for turns in CHATS]
    path = write_rows(tmp_path / "data.jsonl", *rows)
    lines = path.read_text().splitlines()
    lines[45] = "{"
    path.write_text("\n".join(lines))
    with pytest.raises(DataError, match=r"data.jsonl:46: not JSON"):
        prepared(path, tmp_path / "cache", workers=count)
    template = tmp_path / "template"
    refuses = "{% if m.content == 'stop' %}{{ nothing.there }}{% endif %}"
    template.write_text("{% for m in messages %}" + refuses + "{{ m.content }} {% endfor %}")
    lines[42] = json.dumps(
        chat(("user", "stop"), ("assistant", "a"))
    )  # of the same chunk as the line that is no JSON
    path.write_text("\n".join(lines))
    with raises(DataError, "data.jsonl:43", "template rejects"):
        prepared(path, tmp_path / "cache", workers=count, chat_template=str(template))
    limits = {"sequence_length": 12, "documents": "pad", "too_long": "error"}
    lines[41] = json.dumps(chat(("user", "a b c d e f g h a b c d"), ("assistant", "a")))
    path.write_text("\n".join(lines))
    with raises(DataError, "data.jsonl:42", "tokens", "most 12"):
        prepared(path, tmp_path / "cache", workers=count, chat_template=str(template), **limits)
    assert list((tmp_path / "cache").iterdir()) == []


def test_little_is_done_by_this_process(tmp_path: Path) -> None:
    with patch.object(workers, "ProcessPoolExecutor", side_effect=AssertionError):
        assert list(workers.in_order(abs, range(workers._ALONE))) == [0, 1, 2, 3]
        assert list(workers.in_order(abs, [])) == []
    assert list(workers.in_order(abs, range(-9, 0))) == list(range(9, 0, -1))


def _die(number: int) -> int:
    if number == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def test_a_worker_that_is_killed_is_an_error_and_no_hang() -> None:
    with raises(RuntimeError, "prepares data", "killed"):
        list(workers.in_order(_die, range(9), 2))


# Kills, and several at once


def _killed(path: Path, cache: Path, count: int) -> None:
    """In a process of its own, which dies once a third chunk is written."""
    written, real = [0], PartWriter.append

    def append(*arguments: Any) -> None:
        real(*arguments)
        written[0] += 1
        if written[0] == 6:  # of two parts
            (cache / "pids").write_text(
                " ".join(str(child.pid) for child in multiprocessing.active_children())
            )
            os.kill(os.getpid(), signal.SIGKILL)

    with patch.object(PartWriter, "append", append):
        prepared(path, cache, workers=count)


def alive(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("count", [1, 2])
def test_what_a_killed_process_has_begun_is_begun_anew(tmp_path: Path, count: int) -> None:
    path, cache = write_rows(tmp_path / "data.jsonl", *TEXTS), tmp_path / "cache"
    child = FORK.Process(target=_killed, args=(path, cache, count))
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    deadline = time.monotonic() + 20
    while any(map(alive, (cache / "pids").read_text().split())):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    (cache / "pids").unlink()
    [begun] = cache.iterdir()
    assert begun.name.startswith(".partial-data-")
    for left in (
        begun / "data" / "train"
    ).iterdir():  # a disk that lost power may have anything in it
        left.write_bytes(b"left by another" * 1000)
    again = prepared(path, cache, workers=1)
    assert [name.name for name in cache.iterdir()] == [again.name]
    assert contents(again) == contents(prepared(path, tmp_path / "undisturbed"))


def test_one_that_ends_just_before_the_end_leaves_nothing(tmp_path: Path) -> None:
    path, cache = write_rows(tmp_path / "data.jsonl", *TEXTS), tmp_path / "cache"
    with (
        patch.object(preparation, "_check_samples", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        prepared(path, cache)
    assert list(cache.iterdir()) == []
    assert contents(prepared(path, cache)) == contents(prepared(path, tmp_path / "undisturbed"))


def test_a_text_of_over_a_million_characters_has_the_tokens_of_the_whole(tmp_path: Path) -> None:
    text = " ".join("abcdefgh"[at * at % 8] for at in range(600_000))
    train = PreparedSource(
        prepared(write_rows(tmp_path / "data.jsonl", text, "a"), tmp_path / "cache") / "train"
    )
    assert len(text) > 1_000_000
    ids = np.concatenate([train[at]["input_ids"] for at in range(3)])
    assert (
        ids.tolist() == tokenizer()(text[:1000], add_special_tokens=False)["input_ids"][: len(ids)]
    )
    assert train.summary.tokens > 599_000


class Waits(Progress):
    def __init__(self, told: Any, waits: Any) -> None:
        super().__init__(moves=lambda seconds: waits.is_set() and told.put("moves"))
        self.told, self.is_heard = told, waits

    def waits(self) -> None:
        self.told.put("waits")
        self.is_heard.set()


def _slowly(cache: Path, told: Any, waits: Any, hangs: float = 0.0) -> None:
    progress = Waits(told, waits)

    def write(folder: Path) -> None:
        told.put("writes")
        assert waits.wait(60)  # of the other one
        for _ in range(int(hangs)):
            time.sleep(1.2)
            progress.say("goes on")
        time.sleep(hangs * 100)
        (folder / "file").write_text("whole")

    told.put((cached_folder(cache, "name", write, progress) / "file").read_text())


@pytest.mark.more
def test_who_waits_for_another_process_moves_as_long_as_that_does(tmp_path: Path) -> None:
    other, mine, waits = FORK.Queue(), FORK.Queue(), FORK.Event()
    writer = FORK.Process(target=_slowly, args=(tmp_path, other, waits, 3))
    writer.start()
    assert other.get(timeout=60) == "writes"
    waiter = FORK.Process(target=_slowly, args=(tmp_path, mine, waits))
    waiter.start()
    assert mine.get(timeout=60) == "waits"
    for _ in range(2):
        assert mine.get(timeout=60) == "moves"
    time.sleep(3.0)  # in which it hangs
    while not mine.empty():
        mine.get()
    with pytest.raises(queue.Empty):
        mine.get(timeout=3.0)
    writer.kill()
    results = [mine.get(timeout=60) for _ in range(2)]
    waiter.join()
    writer.join()
    assert "writes" in results


def test_two_at_once_write_once(tmp_path: Path) -> None:
    message, waits = FORK.Queue(), FORK.Event()
    both = [FORK.Process(target=_slowly, args=(tmp_path, message, waits)) for _ in range(2)]
    for process in both:
        process.start()
    heard: list[str] = []
    while len(heard) < 4:
        heard += [word for word in [message.get(timeout=60)] if word != "moves"]
    for process in both:
        process.join()
    assert sorted(heard) == ["waits", "whole", "whole", "writes"]
    assert [path.name for path in tmp_path.iterdir()] == ["name"]


# The key


def test_the_same_content_is_prepared_once_whatever_it_is_called(tmp_path: Path) -> None:
    path, cache = write_rows(tmp_path / "data.jsonl", *TEXTS), tmp_path / "cache"
    first = prepared(path, cache)
    os.utime(path, (1, 1))
    assert prepared(path, cache) == first
    assert prepared(path.rename(tmp_path / "other.jsonl"), cache) == first
    write_rows(tmp_path / "other.jsonl", *TEXTS[1:], TEXTS[0])
    assert prepared(tmp_path / "other.jsonl", cache) != first


def test_a_large_file_is_read_again_only_when_it_looks_changed(tmp_path: Path) -> None:
    path, cache = tmp_path / "file", tmp_path / "cache"
    path.write_text("one")
    with patch.object(digest, "_QUICK", 0):
        fresh = digest.digests([path], cache)
        assert not cache.exists()  # it might be changed within its time stamp's grain
        os.utime(path, (1, 1))
        assert digest.digests([path], cache) == fresh
        with patch("hashlib.file_digest", side_effect=AssertionError):
            assert digest.digests([path], cache) == fresh
        path.write_text("two")
        os.utime(path, (1, 1_000))
        assert digest.digests([path], cache) != fresh


def test_a_file_that_changes_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "data.jsonl", *TEXTS)
    real = preparation._write

    def write(*arguments: Any) -> None:
        real(*arguments)
        os.utime(path, (1, 1))

    with (
        patch.object(preparation, "_write", write),
        raises(DataError, "changed while"),
    ):
        prepared(path, tmp_path / "cache")


# Progress


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_is_shown_when_it_takes_longer_than_a_moment(
    tmp_path: Path, terminal: bool
) -> None:
    path, message = write_rows(tmp_path / "data.jsonl", *TEXTS), io.StringIO()
    shown = Progress(Console(file=message, force_terminal=terminal, width=200))
    preparation.prepare(options(path), tokenizer(), tmp_path / "quick", shown)
    assert message.getvalue() == ""
    at_once = {
        name: patch(f"trainer.data.{name}", 0) for name in ("progress._MOMENT", "progress._BETWEEN")
    }
    with (
        at_once["progress._MOMENT"],
        at_once["progress._BETWEEN"],
        patch("trainer.data.sources.formats.OFTEN", 10),
    ):
        preparation.prepare(options(path), tokenizer(), tmp_path / "slow", shown)
    if terminal:  # drawn four times a second, and wiped at the end
        assert f"prepare {path} " in message.getvalue() and message.getvalue().endswith(
            "\x1b[1A\x1b[2K"
        )
        return
    lines = message.getvalue().splitlines()
    shows(lines[0], f"{path}: looked up 1", "of 1 files")
    assert "4 documents, " in lines[1]
    done = f"prepare {path}: 100%, 60 documents, "
    assert any(line.startswith(done) for line in lines)
    assert f"prepare {path}: arranging samples" in lines
    shows(lines[-1], f"{path}: 100%, checking", "0.0 of 0.0 GB")


# Ranks that wait


def _waits(rank: int) -> str:
    """Rank 0 takes longer than a collective would wait."""
    short = dist.new_group(timeout=datetime.timedelta(seconds=1))
    ranks = replace(Ranks(rank, 2), group=short)

    def work() -> str:
        time.sleep(2)
        return "done"

    result = ranks.await_first(work)
    with pytest.raises(RuntimeError):  # in a collective it would be
        ranks.on_first(work)
    return result


def _fails(rank: int) -> str:
    def work() -> None:
        time.sleep(0.3)
        raise DataError(Problem("data", "nothing", "something"))

    with pytest.raises(DataError) as caught:
        Ranks(rank, 2).await_first(work)
    assert caught.value.shared
    return str(caught.value)


def _as_a_rank(named: str) -> Any:
    return globals()[named](dist.get_rank())


@pytest.mark.more
def test_ranks_wait_longer_than_a_collective_would(pools: Pools) -> None:
    assert pools[2].run(_as_a_rank, named="_waits") == ["done", "done"]


def test_what_fails_on_the_first_is_raised_on_all(pools: Pools) -> None:
    assert pools[2].run(_as_a_rank, named="_fails") == ["data: nothing; expected something"] * 2
