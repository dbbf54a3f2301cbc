"""The embedded default: the corpus that comes with Python, and its tokenizer."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from unittest.mock import patch

import pytest
from filelock import FileLock

from tests.support.messages import raises, shows
from trainer.data.cache import cached_folder
from trainer.data.text import corpus
from trainer.data.text.tokenizer import (
    embedded_tokenizer,
    end_of_text,
    load_tokenizer,
    tokenizer_key,
)
from trainer.errors import DataError, DiskError


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def test_corpus_is_real_text_in_a_fixed_order() -> None:
    texts = list(corpus.documents())
    assert texts == list(corpus.documents())
    assert 3_000_000 < sum(map(len, texts)) <= corpus.MAX_CHARACTERS
    assert any("def dataclass(" in text for text in texts)


def test_tokenizer_is_trained_once_and_gives_text_back(cache: Path) -> None:
    tokenizer = embedded_tokenizer(cache, 1024)
    (folder,) = cache.iterdir()
    before = {file.name: file.stat().st_mtime_ns for file in folder.iterdir()}
    again = embedded_tokenizer(cache, 1024)
    assert before == {file.name: file.stat().st_mtime_ns for file in folder.iterdir()}
    assert len(tokenizer) == 1024
    text = "def f(x):\n\treturn  'é — 😀'\n"
    ids = again(text)["input_ids"]
    assert again.decode(ids) == text
    assert again.decode([end_of_text(again)]) == "<|endoftext|>"


def test_training_the_tokenizer_is_deterministic(cache: Path, tmp_path: Path) -> None:
    first, second = embedded_tokenizer(cache, 1024), embedded_tokenizer(tmp_path, 1024)
    assert tokenizer_key(first) == tokenizer_key(second)
    assert tokenizer_key(first) != tokenizer_key(embedded_tokenizer(tmp_path, 512))


def test_the_saved_tokenizer_opens_with_transformers(cache: Path) -> None:
    embedded = embedded_tokenizer(cache, 1024)
    (folder,) = cache.iterdir()
    assert tokenizer_key(load_tokenizer(str(folder))) == tokenizer_key(embedded)


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        load_tokenizer(str(tmp_path))
    (problem,) = caught.value.problems
    assert problem.place == str(tmp_path)
    shows(problem.actual, "loaded")
    assert len(str(caught.value).splitlines()) == 1


def test_a_tokenizer_without_an_end_is_refused(cache: Path) -> None:
    tokenizer = embedded_tokenizer(cache, 1024)
    tokenizer.eos_token = None
    with raises(DataError, "tokenizer without", "end-of-text", "eos_token"):
        end_of_text(tokenizer)


def test_a_killed_writer_leaves_no_folder_behind(tmp_path: Path) -> None:
    def dies(folder: Path) -> None:
        (folder / "half").write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cached_folder(tmp_path, "name", dies)
    assert list(tmp_path.iterdir()) == []


def test_two_writers_at_once_agree_where_files_have_no_locks(tmp_path: Path) -> None:
    def slower(folder: Path) -> None:
        cached_folder(tmp_path, "name", lambda other: (other / "file").write_text("first"))
        (folder / "file").write_text("second")

    with patch.object(FileLock, "acquire", side_effect=OSError(errno.ENOLCK, "No locks available")):
        assert (cached_folder(tmp_path, "name", slower) / "file").read_text() == "first"
    shutil.rmtree(tmp_path / ".partial-name")
    assert [path.name for path in tmp_path.iterdir()] == ["name"]


def test_a_full_disk_is_a_disk_error(tmp_path: Path) -> None:
    def fills(folder: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(DiskError) as caught:
        cached_folder(tmp_path, "name", fills)
    shows(caught.value, f"{tmp_path}", "permissions", "XDG_CACHE_HOME")
