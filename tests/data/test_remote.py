"""Data at addresses of fsspec: copied once, then the same as local files."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from io import StringIO
from pathlib import Path
from threading import Thread
from typing import Any
from unittest.mock import patch

import fsspec
import numpy as np
import pytest
import torch.distributed as dist
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from PIL import Image
from rich.console import Console

from tests.support.commands import run, train, write_job
from tests.support.messages import raises, shows
from tests.support.pool import Pools
from tests.support.s3 import served
from trainer.config import DataSection, ImagesSection, load
from trainer.config.sections.model_and_data import SourceSection
from trainer.data.images.image_samples import open_images
from trainer.data.progress import QUIET, Progress
from trainer.data.sources.location import check_paths
from trainer.data.sources.remote import absent, fetched
from trainer.data.text.preparation import open_data
from trainer.data.text.tokenizer import embedded_tokenizer
from trainer.distributed.ranks import ALONE, Ranks
from trainer.errors import DataError, DiskError
from trainer.supervise.process import cache_folder

ADDRESS = "memory://bucket/texts/*.jsonl"


def rows(name: str, count: int = 9) -> bytes:
    return b"".join(json.dumps({"text": f"{name} says {i}"}).encode() + b"\n" for i in range(count))


@pytest.fixture
def bucket() -> Iterator[MemoryFileSystem]:
    """Two files of text in memory."""
    files = MemoryFileSystem()
    for name in ("a", "b"):
        files.pipe_file(f"/bucket/texts/{name}.jsonl", rows(name))
    yield files
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


def local_data(data: DataSection, cache: Path) -> DataSection:
    return fetched(data, cache, ALONE, QUIET)


@contextmanager
def copied(kind: Any) -> Iterator[Any]:
    """Count the files that a file system copies."""
    with patch.object(kind, "get_file", autospec=True, side_effect=kind.get_file) as get:
        yield get


def copies(bucket: MemoryFileSystem, *sections: DataSection, cache: Path) -> list[str]:
    """The files that are copied when these sections are fetched."""
    with copied(MemoryFileSystem) as get:
        for data in sections:
            local_data(data, cache)
    return sorted(call.args[1].rpartition("/")[2] for call in get.call_args_list)


def fingerprint(data: DataSection, cache: Path) -> str:
    tokenizer = embedded_tokenizer(cache_folder())
    return open_data(local_data(data, cache), tokenizer, cache, ALONE).fingerprint


def test_names_of_a_file_a_glob_and_a_folder(bucket: MemoryFileSystem, tmp_path: Path) -> None:
    bucket.pipe_file("/bucket/texts/.hidden/c.jsonl", b"")  # as in a local folder
    bucket.pipe_file("/bucket/texts/more/c.jsonl", rows("c"))
    texts = "memory://bucket/texts"
    data = DataSection(
        sources=[
            SourceSection(path=[f"{texts}/*.jsonl", "d.jsonl"], label="mine"),
            SourceSection(path=f"{texts}/"),
        ],
        evaluation_path={"one": f"{texts}/a.jsonl", "all": f"{texts}/**/*.jsonl"},
    )
    result = local_data(data, tmp_path)
    mine, folder = result.sources
    assert [Path(name).name for name in mine.path] == ["a.jsonl", "b.jsonl", "d.jsonl"]
    assert (mine.label, folder.label) == ("mine", f"{texts}/")  # a checkpoint has the label
    below = Path(folder.path)
    assert sorted(str(path.relative_to(below)) for path in below.rglob("*.jsonl")) == [
        "a.jsonl",
        "b.jsonl",
        "more/c.jsonl",
    ]
    assert (below / "more/c.jsonl").read_bytes() == rows("c")
    assert isinstance(result.evaluation_path, dict)
    assert str(result.evaluation_path["one"]).endswith("bucket/texts/a.jsonl")
    own = DataSection(tokenizer=texts, chat_template=f"{texts}/a.jsonl")
    own = local_data(own, tmp_path)
    assert Path(str(own.tokenizer), "more/c.jsonl").read_bytes() == rows("c")
    assert Path(str(own.chat_template)).read_bytes() == rows("a")
    plain = DataSection(path=["x.jsonl"], tokenizer="gpt2")
    assert local_data(plain, tmp_path) == plain and local_data(DataSection(), tmp_path).path is None


def test_the_samples_are_those_of_local_files_wherever_they_are_copied(
    bucket: MemoryFileSystem, tmp_path: Path
) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_bytes(rows(name))
    here = fingerprint(DataSection(path=str(tmp_path / "*.jsonl"), sequence_length=16), tmp_path)
    remote = DataSection(path=ADDRESS, sequence_length=16)
    assert [fingerprint(remote, tmp_path / cache) for cache in ("one", "two")] == [here, here]
    bucket.pipe_file("/bucket/texts/b.jsonl", rows("c"))
    assert fingerprint(remote, tmp_path / "one") != here


def test_an_address_is_copied_once_and_again_when_a_file_changes(
    bucket: MemoryFileSystem, tmp_path: Path
) -> None:
    data = DataSection(path=ADDRESS)
    assert copies(bucket, data, data, cache=tmp_path) == ["a.jsonl", "b.jsonl"]
    before = local_data(data, tmp_path).path
    bucket.pipe_file("/bucket/texts/b.jsonl", rows("c"))  # of the same size
    assert copies(bucket, data, data, cache=tmp_path) == ["a.jsonl", "b.jsonl"]
    after = local_data(data, tmp_path).path
    assert before is not None and after is not None
    assert [Path(name).read_bytes() for name in before] == [rows("a"), rows("b")]  # as a run has it
    assert [Path(name).read_bytes() for name in after] == [rows("a"), rows("c")]
    Path(after[1]).write_bytes(b"damaged")
    assert copies(bucket, data, cache=tmp_path) == ["a.jsonl", "b.jsonl"]
    assert Path(after[1]).read_bytes() == rows("c")


def test_each_part_of_a_large_file_is_progress(bucket: MemoryFileSystem, tmp_path: Path) -> None:
    """Of any file system: many do not tell what has come."""
    moved: list[float] = []
    shown = StringIO()

    def slowly(self: Any, path: str, to: str, **options: Any) -> None:
        with Path(to).open("wb", buffering=0) as file:
            for _ in range(4 * path.endswith("b.jsonl")):
                file.write(b"x" * 5_000_000)
                os.fsync(file.fileno())
                time.sleep(0.3)

    bucket.pipe_file("/bucket/texts/a.jsonl", b"")
    bucket.pipe_file("/bucket/texts/b.jsonl", b"x" * 20_000_000)
    progress = Progress(Console(file=shown, width=100), moves=moved.append)
    own = patch.multiple("trainer.data.progress", _MOMENT=0.0, _BETWEEN=0.0)
    with (
        own,
        patch("trainer.data.sources.remote._SHOWN_SECONDS", 0.1),
        patch.object(MemoryFileSystem, "get_file", slowly),
    ):
        fetched(DataSection(path=ADDRESS), tmp_path, ALONE, progress)
    message = re.findall(r"copied (\d+) of 20 MB", shown.getvalue())
    assert len(set(message)) >= 3 and len(moved) >= 3, message


def test_processes_of_a_machine_copy_once(bucket: MemoryFileSystem, tmp_path: Path) -> None:
    data = DataSection(path=ADDRESS)

    with copied(MemoryFileSystem) as get, ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: local_data(data, tmp_path).path, range(4)))
    assert get.call_count == 2 and all(one == results[0] for one in results)


@pytest.mark.parametrize("fault", ["dies", "short"])
def test_half_a_copy_never_counts(bucket: MemoryFileSystem, tmp_path: Path, fault: str) -> None:
    plain = MemoryFileSystem.get_file

    def get(self: Any, path: str, to: str, **options: Any) -> None:
        plain(self, path, to, **options)
        if path.endswith("b.jsonl"):
            Path(to).write_bytes(Path(to).read_bytes()[:20])
            if fault == "dies":
                raise ConnectionError("the network is gone")

    data = DataSection(path=ADDRESS)
    with patch.object(MemoryFileSystem, "get_file", get), pytest.raises(DataError) as caught:
        local_data(data, tmp_path)
    words = {"dies": "the network is gone", "short": "20 of 189 bytes came of b.jsonl"}
    assert words[fault] in str(caught.value) and str(caught.value).startswith(ADDRESS)
    assert [path for path in tmp_path.iterdir() if path.name.startswith("remote")] == []
    result = local_data(data, tmp_path).path
    assert result is not None and Path(result[1]).read_bytes() == rows("b")


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("memory://bucket/none.jsonl", "no file"),
        ("memory://bucket/texts/*.parquet", "no file"),
        ("memory://bucket/empty", "no file"),
        ("nowhere://bucket/a.jsonl", "Protocol not known: nowhere"),
        ("gs://bucket/a.jsonl", "Please install gcsfs"),
        ("memory://bucket/paper.pdf", 'a file ending in ".pdf"'),
        ("memory://bucket/papers", 'a file ending in ".pdf"'),
    ],
)
def test_what_is_wrong_is_said_before_torch_is_imported(
    bucket: MemoryFileSystem, tmp_path: Path, address: str, words: str
) -> None:
    bucket.mkdir("/bucket/empty")
    for name in ("paper.pdf", "papers/paper.pdf"):
        bucket.pipe_file(f"/bucket/{name}", b"%PDF")
    config = load(write_job(tmp_path, data={"path": address, "sequence_length": 16}))
    with pytest.raises(DataError, match=words) as caught:
        check_paths(config.trainer)
    assert len(str(caught.value)) < 500


class Denies(BaseHTTPRequestHandler):
    """A bucket to which nobody has access."""

    def do_GET(self) -> None:
        self.send_response(403)
        self.end_headers()
        self.wfile.write(
            b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
        )

    do_HEAD = do_GET


@pytest.mark.parametrize("address", ["s3://bucket/*.jsonl", "s3://bucket/a.jsonl", "s3://bucket"])
def test_an_address_without_access_is_refused(tmp_path: Path, address: str) -> None:
    with served(), HTTPServer(("127.0.0.1", 0), Denies) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        denied = raises(DataError, "Access Denied", "credentials")
        with patch.dict("os.environ", {"AWS_ENDPOINT_URL": url}), denied:
            local_data(DataSection(path=address), tmp_path)
        server.shutdown()


@pytest.mark.parametrize("key", ["/bucket/texts/../../../up.jsonl", "/bucket/texts//a.jsonl"])
def test_a_key_does_not_lead_out_of_the_cache(
    bucket: MemoryFileSystem, tmp_path: Path, key: str
) -> None:
    about = {key: {"name": key, "size": 1, "type": "file"}}
    odd = patch.object(MemoryFileSystem, "glob", return_value=about)
    with odd, raises(DataError, "file named '/bucket/texts/", "plain path"):
        local_data(DataSection(path=ADDRESS), tmp_path)


def test_a_cache_that_is_too_small_is_refused(bucket: MemoryFileSystem, tmp_path: Path) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=3)
    with (
        patch("shutil.disk_usage", return_value=usage),
        pytest.raises(DiskError, match="3 bytes free"),
    ):
        local_data(DataSection(path=ADDRESS), tmp_path)


def test_a_dry_run_lists_and_copies_nothing(bucket: MemoryFileSystem, tmp_path: Path) -> None:
    data = DataSection(path=ADDRESS)
    [line] = absent(data, tmp_path / "cache")
    assert line == f"{ADDRESS} (2 files)" and not (tmp_path / "cache").exists()
    local_data(data, tmp_path / "cache")
    assert absent(data, tmp_path / "cache") == []


def test_folders_of_classes(tmp_path: Path) -> None:
    for index in range(8):
        folder = tmp_path / "images" / ("cat", "dog")[index % 2]
        folder.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(index).integers(0, 256, (4, 4, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"{index}.png")

    def opened(path: str) -> Any:
        data = local_data(DataSection(path=path), tmp_path / "cache")
        return open_images(data, ImagesSection(), 0, tmp_path / "cache", ALONE)

    here, there = opened(str(tmp_path / "images")), opened(f"file://{tmp_path}/images")
    assert (here.fingerprint, here.images) == (there.fingerprint, there.images)
    assert here.description() == there.description()


def elsewhere(folder: Path) -> Any:
    """What three ranks find, of which the last has a cache of its own, and sees no other."""
    ranks = Ranks(dist.get_rank(), 3)
    cache = folder / ("cache", "cache", "own")[ranks.rank]
    blind = patch("os.path.exists", lambda path: ranks.rank < 2 or str(cache) in str(path))
    with blind, copied(LocalFileSystem) as get:
        data = fetched(DataSection(path=f"file://{folder}/*.jsonl"), cache, ranks, QUIET)
    with pytest.raises(DataError) as caught:
        fetched(DataSection(path=f"file://{folder}/*.csv"), cache, ranks, QUIET)
    return data.path, get.call_count, caught.value.shared


def test_one_rank_of_a_machine_copies(tmp_path: Path, pools: Pools) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_bytes(rows(name))
    result = pools[3].run(elsewhere, timeout=60, folder=tmp_path)
    assert [count for _, count, _ in result] == [2, 0, 2] and all(shared for *_, shared in result)
    assert result[0][0] == result[1][0] != result[2][0]
    for paths, *_ in result:
        assert [Path(path).read_bytes() for path in paths] == [rows("a"), rows("b")]


def test_what_is_wrong_in_a_bucket(tmp_path: Path) -> None:
    with served():
        for address, words in (
            ("s3://nowhere/*.jsonl", "no file"),
            ("s3://bucket/none.jsonl", "no file"),
            ("s3://bucket/*.jsonl", "no file"),
        ):
            with pytest.raises(DataError, match=words):
                local_data(DataSection(path=address), tmp_path)


@pytest.mark.more
def test_training_from_a_bucket_is_training_from_files_bit_for_bit(tmp_path: Path) -> None:
    """Two ranks, a bucket of S3, a resume in a cache that is empty, and a changed file."""
    two: list[str | Path] = ["torchrun", "--standalone", "--nproc-per-node", "2", "launch/train.py"]
    own = {"steps": 4, "checkpoint": {"every": 2}, "engine": "mesh"}
    jobs = {}
    for name, place in (("here", str(tmp_path)), ("there", "s3://bucket")):
        (tmp_path / name).mkdir()
        data = {"path": f"{place}/*.jsonl", "sequence_length": 16}
        jobs[name] = write_job(tmp_path / name, data=data, **own)
    with served() as s3:
        files = fsspec.filesystem("s3", skip_instance_cache=True)
        for name in ("a", "b"):
            (tmp_path / f"{name}.jsonl").write_bytes(rows(name, 60))
            files.pipe_file(f"bucket/{name}.jsonl", rows(name, 60))
        plain = run(*two, "--config", jobs["here"])
        assert plain.code == 0, plain.output
        listed = train(
            "--config", jobs["there"], "--dry-run", XDG_CACHE_HOME=str(tmp_path / "1"), **s3
        )
        shows(listed.output, "s3://bucket/*.jsonl (2", "run copies")
        first = run(*two, "--config", jobs["there"], XDG_CACHE_HOME=str(tmp_path / "1"), **s3)
        assert first.code == 0, first.output
        folder = tmp_path / "there/runs/job"
        shutil.rmtree(folder / "final")
        shutil.rmtree(folder / "checkpoints/step-000004")
        again = run(*two, "--config", jobs["there"], XDG_CACHE_HOME=str(tmp_path / "2"), **s3)
        assert again.code == 0, again.output
        shows(again.output, "step 2, 16 samples", "seen")
        final = tmp_path / "here/runs/job/final"
        for path in final.iterdir():
            assert (folder / "final" / path.name).read_bytes() == path.read_bytes(), path.name
        shutil.rmtree(folder / "final")
        files.pipe_file("bucket/b.jsonl", rows("c", 60))
        changed = run(*two, "--config", jobs["there"], XDG_CACHE_HOME=str(tmp_path / "2"), **s3)
        assert changed.code and "data or tokenizer" in changed.output, changed.output
