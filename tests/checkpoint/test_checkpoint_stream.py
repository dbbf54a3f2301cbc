"""What we write against the safetensors library's own reader."""

from __future__ import annotations

import errno
import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from tests.support.messages import raises
from trainer.checkpoint import safetensors_stream
from trainer.checkpoint.file_records import FileRecord, span
from trainer.checkpoint.safetensors_stream import (
    SharedFile,
    TensorType,
    header_of,
    on_host,
    read_places,
)
from trainer.errors import ConfigError

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.uint8,
    torch.bool,
]
SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)
NAMES = st.text(st.characters(blacklist_categories=["Cs"]), min_size=1, max_size=12).filter(
    "__metadata__".__ne__
)


@given(st.dictionaries(NAMES, st.tuples(SHAPES, st.sampled_from(DTYPES)), max_size=5))
@settings(max_examples=80, deadline=None)
def test_the_library_reads_what_we_write(
    announced: dict[str, tuple[tuple[int, ...], torch.dtype]],
) -> None:
    types = {name: TensorType(shape, dtype) for name, (shape, dtype) in announced.items()}
    tensors = {name: (torch.randn(kind.shape) * 3).to(kind.dtype) for name, kind in types.items()}
    with TemporaryDirectory() as folder, ThreadPoolExecutor(1) as threads:
        path = Path(folder, "t.safetensors")
        header = header_of(types.items())
        size = len(header) + sum(kind.size for kind in types.values())
        path.write_bytes(b"\xff" * size)
        writer = SharedFile(path, threads, "sha256")
        writer.write(span(0, len(header)), header)
        start = len(header)
        for name, tensor in tensors.items():
            content = on_host(name, tensor, tensor.dtype)
            writer.write(span(start, start + len(content)), content)
            start += len(content)
        content = path.read_bytes()
        # one rank wrote it from end to end, so that it has one hash
        assert writer.finish() == [(span(0, size), hashlib.sha256(content).hexdigest())]
        assert int.from_bytes(content[:8], "little") % 8 == 0
        places = read_places(path)
        assert {name: kind for name, (kind, _) in places.items()} == types
        for name, (kind, start) in places.items():
            values = on_host(name, tensors[name], kind.dtype)
            assert content[start : start + kind.size] == bytes(values)
        with safe_open(path, framework="pt") as opened:
            assert opened.metadata() == {"format": "pt"}
            assert set(opened.keys()) == set(types)
            for name, tensor in tensors.items():
                result = opened.get_tensor(name)
                assert (result.dtype, result.shape) == (tensor.dtype, tensor.shape)
                assert torch.equal(result, tensor)


def test_a_strided_gradient_carrying_tensor_is_converted() -> None:
    source = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3))
    content = on_host("x", source.T, torch.bfloat16)
    wanted = source.detach().T.bfloat16().contiguous().view(torch.uint8)
    assert bytes(content) == bytes(wanted.numpy().data)


def test_a_file_that_others_write_has_a_hash_for_each_part(tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(b"0123456789")
    with ThreadPoolExecutor(1) as threads:
        writer = SharedFile(tmp_path / "t", threads, "sha256")
        writer.write(span(1, 3), b"ab")
        writer.write(span(3, 5), b"cd")
        writer.write(span(7, 9), b"ef")
        parts = writer.finish()
    assert (tmp_path / "t").read_bytes() == b"0abcd56ef9"
    assert parts == [
        (place, hashlib.sha256(content).hexdigest())
        for place, content in ((span(1, 5), b"abcd"), (span(7, 9), b"ef"))
    ]
    with pytest.raises(ValueError, match="not the whole file"):
        FileRecord.of(10, parts=[[*place[:2], digest] for place, digest in parts])


def test_a_file_system_that_takes_no_advice_has_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = []

    def refuse(*place: int) -> None:
        requests.append(place[1:3])
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(os, "posix_fadvise", refuse)
    monkeypatch.setattr(safetensors_stream, "EARLY", 2)
    (tmp_path / "t").write_bytes(b"0123456789")
    with ThreadPoolExecutor(1) as threads:
        writer = SharedFile(tmp_path / "t", threads, "sha256")
        writer.write(span(1, 3), b"ab")
        writer.write(span(3, 4), b"c")
        writer.finish()
    assert (tmp_path / "t").read_bytes() == b"0abc456789"
    assert requests == [(1, 2)]


def test_a_dtype_without_a_name_in_the_format_is_refused() -> None:
    with raises(ConfigError, "tensor", "torch.complex128", "torch.float64"):
        header_of([("x", TensorType((1,), torch.complex128))])
