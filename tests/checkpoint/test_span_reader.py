"""A rank's parts of tensors, read with `preadv`, against safetensors' own reader."""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from tests.support.messages import raises
from trainer.checkpoint import span_reader
from trainer.checkpoint.safetensors_stream import TensorType, read_places
from trainer.checkpoint.span_reader import SavedTensor, SpanReader
from trainer.errors import DiskError
from trainer.state import Part

NAME = "t.safetensors"
DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e8m0fnu,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
]
preadv = os.preadv


def written(folder: Path, tensors: dict[str, torch.Tensor]) -> dict[str, SavedTensor]:
    save_file(tensors, folder / NAME)
    return {name: SavedTensor(NAME, *place) for name, place in read_places(folder / NAME).items()}


def of_bits(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Any bits, so that floats have NaN of all kinds; of bool 0 and 1."""
    count = torch.Size(shape).numel() * dtype.itemsize
    content = torch.randint(0, 2 if dtype == torch.bool else 256, (count,), dtype=torch.uint8)
    return content.view(dtype).view(shape)


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.contiguous().view(-1).view(torch.uint8).tolist()


def part_of(data: st.DataObject, like: torch.Tensor) -> torch.Tensor:
    """A view of a tensor as ranks have them: cut along some of its dimensions."""
    for dim, length in enumerate(like.shape):
        start = data.draw(st.integers(0, length))
        like = like.narrow(dim, start, data.draw(st.integers(0, length - start)))
    return like


@given(
    shapes=st.lists(st.lists(st.integers(0, 7), max_size=4).map(tuple), min_size=1, max_size=3),
    dtype=st.sampled_from(DTYPES),
    buffer=st.sampled_from([16, 64, 1 << 22]),
    run=st.sampled_from([0, 8, 1 << 20]),
    most=st.integers(1, 40),
    direct=st.booleans(),
    data=st.data(),
)
@settings(max_examples=150, deadline=None)
def test_a_part_has_the_bits_of_the_mapped_tensor(
    shapes: list[tuple[int, ...]],
    dtype: torch.dtype,
    buffer: int,
    run: int,
    most: int,
    direct: bool,
    data: st.DataObject,
) -> None:
    """Directly, through buffers or mapped, whatever a buffer takes, and a read returns."""

    def few(handle: int, buffers: list[memoryview], start: int) -> int:
        return preadv(handle, [buffers[0][:most]], start)

    tensors = {f"t{index}": of_bits(shape, dtype) for index, shape in enumerate(shapes)}
    with (
        TemporaryDirectory() as folder,
        patch.object(span_reader, "BUFFER", buffer),
        patch.object(span_reader, "RUN", run),
        patch.object(os, "preadv", few),
        patch.object(span_reader, "_takes_bytes", lambda *_: direct),
        SpanReader(Path(folder)) as reader,
    ):
        saved = written(Path(folder), tensors)
        with safe_open(Path(folder, NAME), framework="pt") as mapped:
            for name in tensors:
                wanted = mapped.get_tensor(name)
                whole = torch.ones_like(wanted)
                reader.fill(Part(whole), saved[name])
                assert bits(whole) == bits(wanted)
                view = part_of(data, wanted)
                own = torch.ones_like(view).contiguous()
                reader.fill(Part(own, view.storage_offset(), view.stride()), saved[name])
                assert bits(own) == bits(view)


def test_only_the_bytes_of_a_part_are_read(tmp_path: Path) -> None:
    """Columns are mapped, unless their runs are long."""
    saved = written(tmp_path, {"t": torch.arange(600.0).view(30, 20)})["t"]
    reads: list[tuple[int, int]] = []

    def counted(handle: int, buffers: list[memoryview], start: int) -> int:
        reads.append((start - saved.start, len(buffers[0])))
        return preadv(handle, buffers, start)

    def read_by(part: Part) -> list[tuple[int, int]]:
        reads.clear()
        reader.fill(part, saved)
        return list(reads)

    columns = Part(torch.empty(30, 5), 10, (20, 1))
    with SpanReader(tmp_path) as reader, patch.object(os, "preadv", counted):
        assert read_by(Part(torch.empty(4, 20), 60, (20, 1))) == [(240, 320)]
        assert read_by(columns) == []
        with patch.object(span_reader, "RUN", 20):
            assert read_by(columns) == [(40 + 80 * row, 20) for row in range(30)]
        assert read_by(Part(torch.empty(0, 20), 60, (20, 1))) == []


def test_values_become_the_parts_dtype_in_its_own_memory(tmp_path: Path) -> None:
    wide = torch.randn(5, 6)
    saved = written(tmp_path, {"t": wide})["t"]
    target = torch.zeros(6, 5, dtype=torch.bfloat16)
    parameter = torch.nn.Parameter(torch.zeros(5, 6))
    with SpanReader(tmp_path) as reader:
        reader.fill(Part(target.T), saved)
        version = parameter._version
        reader.fill(Part(parameter), saved)
    assert torch.equal(target.T, wide.bfloat16())
    assert torch.equal(parameter.detach(), wide) and parameter.grad_fn is None
    assert parameter._version > version  # who keeps a copy of a weight looks at it


def test_a_tensor_on_the_host_is_read_into_its_own_memory(tmp_path: Path) -> None:
    whole = torch.randn(8, 4)
    saved = written(tmp_path, {"t": whole})["t"]
    with SpanReader(tmp_path) as reader:
        for own in (torch.empty(8, 4), torch.empty(4, 8).T):
            reader.fill(Part(own), saved)
            assert torch.equal(own, whole)
        assert reader._buffers == []


def test_a_large_part_takes_no_more_memory_than_a_buffer(tmp_path: Path) -> None:
    """3 GiB of a file without content: one read returns at most 2 GiB."""
    count = 3 << 30
    with (tmp_path / NAME).open("wb") as file:
        file.truncate(count)
        file.seek(count - 4)
        file.write(b"last")
    saved = SavedTensor(NAME, TensorType((count,), torch.uint8), 0)
    last = torch.zeros(1 << 23, dtype=torch.int16)  # of another dtype, or it would need no buffer
    lengths: list[int] = []

    def counted(handle: int, buffers: list[memoryview], start: int) -> int:
        lengths.append(len(buffers[0]))
        return preadv(handle, buffers, start)

    with SpanReader(tmp_path) as reader, patch.object(os, "preadv", counted):
        reader.fill(Part(last, count - len(last), (1,)), saved)
        assert len(reader._buffers) <= 2
    assert bytes(last[-4:].tolist()) == b"last" and last[:-4].count_nonzero() == 0
    assert max(lengths) == span_reader.BUFFER and sum(lengths) == len(last)


def test_a_file_that_ends_early_or_is_gone_is_an_error(tmp_path: Path) -> None:
    saved = written(tmp_path, {"t": torch.randn(64)})["t"]
    place = str(tmp_path / NAME)
    os.truncate(place, saved.start + 100)
    with SpanReader(tmp_path) as reader:
        with raises(DiskError, "ends", "read") as caught:
            reader.fill(Part(torch.empty(64)), saved)
        assert caught.value.problems[0].place == place
        with raises(DiskError, "ends", "read"):  # of columns, which are mapped
            reader.fill(Part(torch.empty(8, 2), 0, (8, 1)), saved)
        reader.fill(Part(torch.empty(25), 0, (1,)), saved)  # what is there can be read
    os.unlink(place)
    with SpanReader(tmp_path) as reader, raises(DiskError, "file", "read") as caught:
        reader.fill(Part(torch.empty(64)), saved)
    assert caught.value.problems[0].place == place


def test_an_error_of_the_disk_has_the_files_name(tmp_path: Path) -> None:
    saved = written(tmp_path, {"t": torch.randn(4)})["t"]

    def broken(*_: Any) -> int:
        raise OSError(5, os.strerror(5))

    with (
        SpanReader(tmp_path) as reader,
        patch.object(os, "preadv", broken),
        raises(DiskError, os.strerror(5), "read") as caught,
    ):
        reader.fill(Part(torch.empty(4)), saved)
    assert caught.value.problems[0].place == str(tmp_path / NAME)


def test_files_are_opened_once_and_closed(tmp_path: Path) -> None:
    saved = written(tmp_path, {"a": torch.randn(4), "b": torch.randn(4)})
    before = set(os.listdir("/proc/self/fd"))
    with SpanReader(tmp_path) as reader:
        for one in saved.values():
            reader.fill(Part(torch.empty(4)), one)
        assert len(set(os.listdir("/proc/self/fd")) - before) == 1
    assert set(os.listdir("/proc/self/fd")) - before == set()


def test_a_file_system_that_takes_no_advice_is_read(tmp_path: Path) -> None:
    whole = torch.randn(4)
    saved = written(tmp_path, {"t": whole})["t"]
    own = torch.empty(4)
    with (
        SpanReader(tmp_path) as reader,
        patch.object(os, "posix_fadvise", side_effect=OSError(22, "Invalid argument")),
    ):
        reader.fill(Part(own), saved)
    assert torch.equal(own, whole)


class _Event:
    """A GPU's event, which notes what happens to it."""

    log: list[str]

    def record(self, stream: object) -> None:
        self.log.append("sent")

    def synchronize(self) -> None:
        self.log.append("waited")


def test_a_buffer_is_filled_again_when_its_bytes_have_arrived(tmp_path: Path) -> None:
    """Of two buffers, one is read into while the other is sent. Without a GPU: as if one sent."""
    whole = torch.randn(32)
    saved = written(tmp_path, {"t": whole})["t"]
    log: list[str] = []

    def counted(handle: int, buffers: list[memoryview], start: int) -> int:
        log.append("read")
        return preadv(handle, buffers, start)

    event = type("Event", (_Event,), {"log": log})
    empty = torch.empty
    own = torch.empty(32, dtype=torch.float64)
    with (
        SpanReader(tmp_path) as reader,
        patch.object(span_reader, "BUFFER", 32),
        patch.object(os, "preadv", counted),
        patch.object(torch.cuda, "is_available", lambda: True),
        patch.object(torch.cuda, "Event", event),
        patch.object(torch.cuda, "current_stream", lambda device: None),
        patch.object(torch, "empty", lambda *a, pin_memory=False, **k: empty(*a, **k)),
    ):
        sent = span_reader._Buffer.sent

        def as_if_on_gpu(buffer: Any, count: int, device: torch.device) -> torch.Tensor:
            there = sent(buffer, count, device).clone()
            buffer._arrived = torch.cuda.Event()
            buffer._arrived.record(torch.cuda.current_stream(device))
            return there

        with patch.object(span_reader._Buffer, "sent", as_if_on_gpu):
            reader.fill(Part(own), saved)
        assert len(reader._buffers) == 2
    assert torch.equal(own, whole.double())
    assert log == [
        "read",
        "sent",
        "read",
        "sent",
        "waited",
        "read",
        "sent",
        "waited",
        "read",
        "sent",
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_part_on_a_gpu(tmp_path: Path, dtype: torch.dtype) -> None:
    """Over several buffers, of whole rows and of columns; also with other values on the host."""
    whole = torch.randn(4096, 2048)
    saved = written(tmp_path, {"t": whole})["t"]
    with SpanReader(tmp_path) as reader:
        for view in (whole, whole[7:3000], whole[:, 100:700]):
            for device in ("cuda", "cpu", "cuda"):
                own = torch.zeros(view.shape, dtype=dtype, device=device)
                reader.fill(Part(own, view.storage_offset(), view.stride()), saved)
                assert torch.equal(own.cpu(), view.to(dtype))
