"""A corpus whose files are prepared one by one, as their samples are needed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from io import StringIO
from itertools import product
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any, cast

import fsspec
import psutil
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from rich.console import Console

import trainer
from tests.support.commands import run, start, write_job
from tests.support.data.text_samples import options, tokenizer
from tests.support.messages import raises, shows, shows_each
from tests.support.run.interruptions import command, environment, nothing_left
from tests.support.s3 import served
from trainer.checkpoint import newest
from trainer.data.loader import Batching, BatchLoader
from trainer.data.order import SampleOrder
from trainer.data.progress import Progress
from trainer.data.stream import Place
from trainer.data.text.preparation import open_data
from trainer.data.text.prepared import Data
from trainer.data.text.tokenizer import embedded_tokenizer
from trainer.data.workers import Beside, in_order
from trainer.distributed.ranks import ALONE
from trainer.errors import DataError
from trainer.recipes.causal_lm.subject import LanguageSubject
from trainer.run.loop import LoopPlan
from trainer.run.prepare import Prepared
from trainer.run.vote import Vote
from trainer.state import RunState
from trainer.supervise.process import cache_folder

SIZES = (5, 9, 3, 7, 4)
TEXTS = [" ".join(words) for words in product("abcdefg", repeat=3)]


def write_files(folder: Path, sizes: tuple[int, ...] = SIZES) -> list[list[str]]:
    """Write files of so many rows, each of another text; return the texts."""
    left, result = iter(TEXTS), []
    for number, size in enumerate(sizes):
        texts = [next(left) for _ in range(size)]
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        (folder / f"{number}.jsonl").write_text(lines)
        result.append(texts)
    return result


@pytest.fixture
def texts(tmp_path: Path) -> list[list[str]]:
    return write_files(tmp_path)


def opened(tmp_path: Path, path: Any = None, cache: str = "cache", **changes: Any) -> Data:
    own = {"documents": "pad", "stream": True, **changes}
    given = options(path or tmp_path / "*.jsonl", **own)
    return open_data(given, tokenizer(), tmp_path / cache, ALONE, SampleOrder(1))


def collate(samples: Any) -> Any:
    return {"input_ids": torch.tensor([sample["input_ids"].tolist() for sample in samples])}


def read(
    data: Data, steps: range, ranks: int = 1, rank: int = 0, place: Place | None = None
) -> list[list[str]]:
    """Return the texts of each step of 4 samples, and the place after the last."""
    batching = Batching(4 // ranks, 1, ranks, rank)
    results = []
    data.train.begin(place or Place())
    with BatchLoader(
        data.train, collate, batching, steps, order=SampleOrder(1), position=4 * steps.start
    ) as loader:
        for step in loader:
            rows = step.micro_batches[0]["input_ids"].tolist()
            results.append([tokenizer().decode(row[:3]) for row in rows])
        results.append(data.train.place(4 * steps.stop))
    return results


def folders(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.glob("data-*"))


def test_each_epoch_has_each_sample_once_a_file_after_another(
    tmp_path: Path, texts: list[list[str]]
) -> None:
    *steps, _ = read(opened(tmp_path), range(14))
    order = [text for step in steps for text in step]
    epochs = [order[:28], order[28:]]
    for epoch in epochs:
        files = [next(i for i, part in enumerate(texts) if text in part) for text in epoch]
        turns = [file for i, file in enumerate(files) if i == 0 or file != files[i - 1]]
        assert sorted(turns) == [0, 1, 2, 3, 4]
        assert sorted(epoch) == sorted(sum(texts, []))
    assert epochs[0] != epochs[1] and order[:28] != sum(texts, [])


def test_any_number_of_ranks_has_the_same_stream(tmp_path: Path, texts: list[list[str]]) -> None:
    *alone, place = read(opened(tmp_path), range(9))
    of_ranks = [read(opened(tmp_path), range(9), 2, rank) for rank in range(2)]
    assert [
        one + other for one, other in zip(*(steps[:-1] for steps in of_ranks), strict=True)
    ] == alone
    assert [steps[-1] for steps in of_ranks] == [place, place] and place.fingerprint


@pytest.mark.parametrize("stop", [2, 5, 7])  # with 7, between two files
def test_it_goes_on_from_any_step_in_an_empty_cache(
    tmp_path: Path, texts: list[list[str]], stop: int
) -> None:
    *whole, _ = read(opened(tmp_path), range(9))
    *first, place = read(opened(tmp_path), range(stop))
    saved = Place(*json.loads(json.dumps(place)))
    *rest, _ = read(opened(tmp_path, cache="other"), range(stop, 9), place=saved)
    assert first + rest == whole


@pytest.mark.parametrize("recorded", [[], [1, 9], [1, 9, ""]])
def test_a_run_begins_its_stream_where_its_checkpoint_says(
    tmp_path: Path, texts: list[list[str]], recorded: list[object]
) -> None:
    """A new run has no place; one that resumes anyway has no digest of the file."""
    data = opened(tmp_path)
    with LanguageSubject.reading(cast(Any, SimpleNamespace(data=data)), recorded):
        assert data.train.place(20) == (Place(1, 9) if recorded else Place())


def test_files_that_are_done_leave_the_cache(tmp_path: Path) -> None:
    write_files(tmp_path, (9,) * 12)
    data = opened(tmp_path)
    most = 0
    data.train.begin(Place())
    with BatchLoader(
        data.train, collate, Batching(4), range(25), order=SampleOrder(1), position=0
    ) as loader:
        for _ in loader:
            most = max(most, len(folders(tmp_path / "cache")))
    # the first, the one before, this one, and two that the loader and the preparation have begun
    assert 3 <= most <= 5, most
    assert read(data, range(1))[0] == read(opened(tmp_path), range(1))[0]


def test_a_file_like_the_first_one_leaves_its_folder(tmp_path: Path) -> None:
    write_files(tmp_path, (9,) * 5)
    for number in range(1, 5):
        shutil.copy(tmp_path / "0.jsonl", tmp_path / f"{number}.jsonl")
    assert read(data := opened(tmp_path), range(11))
    assert [folder.is_dir() for folder in data.train._kept] == [True]


def test_a_file_that_another_run_has_removed_is_prepared_again(
    tmp_path: Path, texts: list[list[str]]
) -> None:
    *whole, _ = read(opened(tmp_path), range(7))
    data = opened(tmp_path)
    open_source, removed = data.train._files.opened, []

    def gone(folder: Path) -> Any:
        if not removed:
            removed.append(shutil.rmtree(folder))
        return open_source(folder)

    data.train._files.opened = gone
    *again, _ = read(data, range(7))
    assert removed and again == whole


def test_a_file_that_has_changed_since_the_checkpoint_is_refused(
    tmp_path: Path, texts: list[list[str]]
) -> None:
    *_, place = read(opened(tmp_path), range(4))
    file = tmp_path / f"{opened(tmp_path).train._file(place.turn)}.jsonl"
    file.write_text(file.read_text().replace('"a ', '"g '))  # of the same size
    with pytest.raises(DataError, match="those of before, "):
        read(opened(tmp_path), range(4, 5), place=place)
    assert read(opened(tmp_path), range(4, 5), place=Place(*place[:2]))


@pytest.mark.parametrize("name", ["3.jsonl", "5.jsonl"])
def test_another_list_of_files_is_other_data_to_a_checkpoint(
    tmp_path: Path, texts: list[list[str]], name: str
) -> None:
    before = opened(tmp_path).description()
    (tmp_path / name).write_text('{"text": "of another size"}\n')
    assert opened(tmp_path).description() != before


def test_a_file_that_changes_between_two_epochs_is_refused(
    tmp_path: Path, texts: list[list[str]]
) -> None:
    data = opened(tmp_path)
    data.train.begin(Place())
    data.train.reach(27)  # the first epoch
    data.train.close()
    file = tmp_path / f"{data.train._file(6)}.jsonl"
    file.write_text(file.read_text().replace('"a ', '"g '))
    data.train._beside = type(data.train._beside)(data.train._files.prepared)
    data.train._beside.begin(data.train._file(5))
    with pytest.raises(DataError, match="those of before, "):
        data.train.reach(55)
    data.train.close()


def test_a_file_that_is_wrong_ends_the_run_where_it_comes(
    tmp_path: Path, texts: list[list[str]]
) -> None:
    files = [opened(tmp_path).train._file(turn) for turn in range(5)]
    last = tmp_path / f"{files[-1]}.jsonl"
    last.write_text(last.read_text() + '{"text": 3}\n')
    data = opened(tmp_path)
    assert read(data, range(4))
    with pytest.raises(DataError, match=last.name):
        read(opened(tmp_path), range(7))


def test_files_without_a_sample_are_left_out_where_bad_rows_are(tmp_path: Path) -> None:
    (tmp_path / "all").mkdir()
    texts = write_files(tmp_path / "all")
    (tmp_path / "all/bad.jsonl").write_text("no json\n")
    (tmp_path / "all/blank.jsonl").write_text('{"text": ""}\n')
    path = tmp_path / "all/*.jsonl"
    shown = StringIO()
    progress = Progress(Console(file=shown, width=300))
    given = options(path, documents="pad", stream=True, corrupt="skip")
    data = open_data(given, tokenizer(), tmp_path / "cache", ALONE, SampleOrder(1), progress)
    *steps, place = read(data, range(14))
    results = [text for step in steps for text in step]
    assert sorted(results[:28]) == sorted(results[28:]) == sorted(sum(texts, []))
    notes = shown.getvalue().splitlines()
    shows_each(
        sorted(line for line in notes if "waits" not in line and "still" not in line),
        ("note", str(tmp_path / "all" / "bad.jsonl"), "no samples"),
        ("note", str(tmp_path / "all" / "blank.jsonl"), "no samples"),
    )
    *rest, _ = read(opened(tmp_path, path, corrupt="skip"), range(14, 16), place=place)
    *whole, _ = read(opened(tmp_path, path, corrupt="skip"), range(16))
    assert whole[:14] == steps and whole[14:] == rest
    with pytest.raises(DataError, match=r"bad\.jsonl|blank\.jsonl"):
        read(opened(tmp_path, path), range(14))


def test_a_killed_preparation_is_told(tmp_path: Path, texts: list[list[str]]) -> None:
    data = opened(tmp_path)
    data.train._files.prepared = lambda file: os._exit(1)
    with raises(RuntimeError, "killed", "memory"):
        read(data, range(1))


def many(given: int) -> int:
    """Have workers of the process that prepares work for some seconds."""
    return sum(in_order(lambda one: time.sleep(0.2) or one, range(given), workers=2))


def processes_of(beside: Beside) -> list[psutil.Process]:
    [own] = map(psutil.Process, beside._pool._processes)
    return [own, *own.children()]


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
@pytest.mark.first("15")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP])
def test_signals_of_a_launcher_to_all_processes_do_not_end_the_preparation(number: int) -> None:
    with closing(Beside(many)) as beside:
        beside.begin(20)
        while len(started := processes_of(beside)) < 3:
            time.sleep(0.01)
        time.sleep(0.3)
        for process in started:
            process.send_signal(number)
        assert beside.result() == sum(range(20))
    assert not any(process.is_running() for process in started)


def test_a_preparation_that_is_killed_between_two_files_is_told() -> None:
    with closing(Beside(abs)) as beside:
        beside.begin(-1)
        assert beside.result() == 1
        processes_of(beside)[0].kill()
        time.sleep(0.5)
        with raises(RuntimeError, "killed", "memory"):
            beside.begin(-2)
            beside.result()


def test_who_waits_for_a_file_moves_and_can_be_closed(
    tmp_path: Path, texts: list[list[str]]
) -> None:
    moved: list[float] = []
    given = options(tmp_path / "*.jsonl", documents="pad", stream=True)
    shown = StringIO()
    progress = Progress(Console(file=shown, width=300), moves=moved.append)
    data = open_data(given, tokenizer(), tmp_path / "cache", ALONE, SampleOrder(1), progress)
    data.train._files.prepared = lambda file: time.sleep(600)
    moved.clear()
    data.train.begin(Place())
    loader = BatchLoader(
        data.train, collate, Batching(4), range(1), order=SampleOrder(1), position=0
    )
    time.sleep(2.5)
    assert not moved  # the reader does something else, which may have been given its own time
    Thread(target=partial(pytest.raises, RuntimeError, next, iter(loader)), daemon=True).start()
    time.sleep(2.5)
    begun = time.monotonic()
    loader.close()
    assert len(moved) >= 2 and time.monotonic() - begun < 5
    name = tmp_path / f"{data.train._file(0)}.jsonl"
    [line] = shown.getvalue().splitlines()
    shows(line, str(name), "being prepared")


def test_who_waits_moves_as_long_as_the_file_does(
    tmp_path: Path, texts: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that prepares makes progress once, and then hangs."""
    moved: list[float] = []
    given = options(tmp_path / "*.jsonl", documents="pad", stream=True)
    monkeypatch.setattr("trainer.data.text.preparation._SILENT_SECONDS", 0.0)
    data = open_data(
        given, tokenizer(), tmp_path / "cache", ALONE, SampleOrder(1), Progress(moves=moved.append)
    )
    prepare = data.train._files.prepared

    def hangs(file: int) -> Path:
        prepare(file)
        time.sleep(600)
        raise AssertionError

    data.train._files.prepared = hangs
    moved.clear()
    data.train.begin(Place())
    with BatchLoader(data.train, collate, Batching(4), range(1), order=SampleOrder(1), position=0):
        ends = time.monotonic() + 4
        plan = LoopPlan(1, 4, 1, None, None)
        vote = Vote(ALONE, lambda: time.monotonic() > ends, data.train, plan, RunState())
        assert vote.wait(0)
        assert time.monotonic() > ends and vote.paused_seconds > 3
    last = moved[-4:]  # before, the process made progress
    assert len(last) == 4 and last[-1] < -1 and last == sorted(last, reverse=True), moved


HANGS = """
import os, trainer.data.text.preparation as m
real, calls, m._SILENT_SECONDS = m.prepare, [], 0.0
def prepare(*given):
    calls.append(os.getpid())
    if calls.count(os.getpid()) == {call} and os.getpid() != calls[0]:
        (folder / f"reached-{{rank}}").touch()
        time.sleep(600)
    return real(*given)
m.prepare = prepare
calls.append(os.getpid())
"""


@pytest.mark.more
@pytest.mark.parametrize(
    ("call", "ends"), [(3, "signal"), (3, "signal, saved"), (1, "signal"), (3, "patience")]
)
def test_a_run_that_waits_for_a_file_can_be_stopped(tmp_path: Path, call: int, ends: str) -> None:
    """It saves at the last step whose samples were there; without a signal it ends as hung."""
    for number in range(6):
        text = " ".join(["the", "model", "reads", "text"][number % 3 :] * 40)
        (tmp_path / f"{number}.of.jsonl").write_text(json.dumps({"text": text}) + "\n")
    data = {"path": str(tmp_path / "*.of.jsonl"), "stream": True, "sequence_length": 16}
    own: dict[str, Any] = {"patience": 3} if ends == "patience" else {}
    own |= {"checkpoint": {"every": 1}} if "saved" in ends else {}
    job = write_job(tmp_path, engine="mesh", data=data, steps=60, evaluation={}, **own)
    words = command(tmp_path, job, HANGS.format(call=call))
    process = start(*words, **environment(tmp_path / "cache"))
    if "signal" in ends:
        deadline = time.monotonic() + 100
        while not list(tmp_path.glob("reached-*")) and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(4)  # until all wait
        result, _ = newest(tmp_path / "runs" / "job" / "checkpoints")
        assert bool(result) is ("saved" in ends)  # before it waits
        process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=100)
    assert process.returncode == (77 if ends == "patience" else 75), output
    shows(output, "next samples")
    assert nothing_left(tmp_path)
    result, _ = newest(tmp_path / "runs" / "job" / "checkpoints")
    assert bool(result) is (call > 1 and "signal" in ends), output
    if result:
        again = run(*command(tmp_path, job), "trainer.steps=9", **environment(tmp_path / "cache"))
        assert f"resumed from {result}" in again.output and again.code == 0, again.output


def test_documents_of_the_first_file_are_held_out(tmp_path: Path, texts: list[list[str]]) -> None:
    data = opened(tmp_path, evaluation_fraction=0.4)
    kept = data.evaluations[""]
    left = [tokenizer().decode(kept[i]["input_ids"][:3]) for i in range(len(kept))]
    assert left and set(left) < set(texts[0])
    *steps, _ = read(data, range(7))
    assert sorted(sum(steps, [])[: 28 - len(left)]) == sorted(set(sum(texts, [])) - set(left))


@pytest.fixture
def bucket(tmp_path: Path, texts: list[list[str]]) -> Iterator[MemoryFileSystem]:
    files = MemoryFileSystem()
    for path in tmp_path.glob("*.jsonl"):
        files.pipe_file(f"/bucket/{path.name}", path.read_bytes())
    yield files
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


@pytest.mark.parametrize("path", ["memory://bucket/*.jsonl", "memory://bucket"])
def test_files_at_an_address_are_copied_while_they_are_prepared(
    tmp_path: Path, bucket: MemoryFileSystem, path: str
) -> None:
    *here, _ = read(opened(tmp_path), range(7))
    *there, _ = read(opened(tmp_path, path, cache="there"), range(7))
    assert there == here
    bucket.mv("/bucket/1.jsonl", "/bucket/1[b].jsonl")  # of the same place in the order
    *again, _ = read(opened(tmp_path, path, cache="again"), range(7))
    assert again == here
    assert not list((tmp_path / "there").glob("data-*/**/*.jsonl"))  # the next one may be half done


@pytest.mark.parametrize(
    ("name", "content", "keys"),
    [
        ("0.jsonl", b'{"text": 3}\n', ("memory://", "bucket/0.jsonl:1: column")),
        ("x.jsonl", b"", ("an empty file",)),
        ("README", b"read", ("without an ending",)),
    ],
)
def test_a_wrong_file_at_an_address_is_named_at_the_start(
    tmp_path: Path, bucket: MemoryFileSystem, name: str, content: bytes, keys: tuple[str, ...]
) -> None:
    bucket.pipe_file(f"/bucket/{name}", content)
    with raises(DataError, *keys):
        opened(tmp_path, "memory://bucket")


def test_a_data_set_of_the_hub_is_no_stream(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no files"):
        opened(tmp_path, "user/name")


def test_the_preparation_begins_before_the_model_is_in_memory_and_ends_with_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fork keeps a copy of what its parent changes: weights and moments in host memory."""

    def built(prepared: Prepared, *_: Any) -> Any:
        [process] = processes_of(cast(Any, prepared.subject).data.train._beside)
        (tmp_path / "process").write_text(str(process.pid))
        raise ValueError("stop here, after 1 process")

    monkeypatch.setattr("trainer.run.run._built", built)
    path = str(tmp_path / "*.jsonl")
    config = write_job(tmp_path, engine="mesh", data={"path": path, "stream": True})
    with raises(RuntimeError, "stop", "1 process"):
        trainer.train(config, quiet=True)
    assert not psutil.pid_exists(int((tmp_path / "process").read_text()))


@pytest.mark.more
def test_training_on_a_stream_of_a_bucket_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """Two ranks, files in S3, and a resume from the midst in an empty cache."""
    two: list[str | Path] = ["torchrun", "--standalone", "--nproc-per-node", "2", "launch/train.py"]
    words = ["the", "model", "reads", "text", "and", "learns", "what", "follows"]
    embedded_tokenizer(cache_folder()).save_pretrained(own := tmp_path / "tokenizer")
    with served() as s3:
        files = fsspec.filesystem("s3", skip_instance_cache=True)
        for number in range(6):
            text = " ".join(words[number % 3 :] * 40)
            files.pipe_file(f"bucket/{number}.jsonl", json.dumps({"text": text}).encode() + b"\n")

        def job(name: str) -> Path:
            (tmp_path / name).mkdir()
            place = {"path": "s3://bucket/*.jsonl", "stream": True, "tokenizer": str(own)}
            data = {**place, "sequence_length": 16}
            return write_job(
                tmp_path / name, data=data, steps=12, checkpoint={"every": 3, "keep_last": 9}
            )

        def trained(config: Path, cache: str, *begin: str | Path) -> str:
            result = run(*begin, "--config", config, XDG_CACHE_HOME=str(tmp_path / cache), **s3)
            assert result.code == 0, result.output
            return result.output

        whole, parts = job("whole"), job("parts")
        trained(whole, "1", *two)
        output = trained(parts, "1", *two)
        shows(output, "6 files", "needed")
        folder = tmp_path / "parts/runs/job"
        shutil.rmtree(folder / "final")
        for step in (9, 12):
            shutil.rmtree(folder / f"checkpoints/step-{step:06}")
        again = trained(parts, "2", *two)
        shows(again, "step 6, 48 samples", "seen")
        for path in (tmp_path / "whole/runs/job/final").iterdir():
            assert (folder / "final" / path.name).read_bytes() == path.read_bytes(), path.name
