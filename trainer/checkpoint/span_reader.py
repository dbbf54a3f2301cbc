"""A rank's parts of tensors, read from the files of a checkpoint through at most two buffers.

A read takes the bytes of the part and no others: around a byte of a mapped file the system reads
what its disks read ahead, which was 248 times the shard of a rank of 1,024 (docs/many_ranks.md).
Columns are mapped: what is read around them is needed, by this rank or by its neighbours.
"""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from trainer.checkpoint.file_records import Span
from trainer.checkpoint.safetensors_stream import TensorType, spans_of
from trainer.errors import DiskError, Problem
from trainer.state import Part

if TYPE_CHECKING:
    import torch

BUFFER = 1 << 22
"""Bytes of a buffer; 1, 8 and 16 MiB were not faster."""
RUN = 1 << 20
"""The least bytes of runs with gaps that are read one by one. Shorter ones, of columns, are mapped:
reading them, alone or with the gaps, took longer."""
LONG = 1 << 25
"""The least bytes of a part without gaps in which the system is to read ahead."""


class SavedTensor(NamedTuple):
    """A tensor in a file of a checkpoint."""

    file: str
    """The file's path below the checkpoint."""
    type: TensorType
    start: int
    """The byte of the file at which its values begin."""


class SpanReader:
    """Reads parts of the tensors of one checkpoint; its files are open until it is closed.

    With GPUs the buffers are pinned: one is filled while the other is copied to the device.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._handles: dict[str, int] = {}
        self._buffers: list[_Buffer] = []

    def __enter__(self) -> SpanReader:
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles.values():
            os.close(handle)
        self._handles.clear()

    def fill(self, part: Part, saved: SavedTensor) -> None:
        """Replace a part's values, on any device, by those of the file, in the part's dtype.

        Raises DiskError if the file can't be read, or ends before the part does.
        """
        value = part.value.detach()
        target = value.contiguous()  # itself, if it is
        path = self._folder / saved.file
        try:
            if spans := spans_of(part, saved.type, saved.start):
                self._fill(target.view(-1), spans, saved)
        except OSError as error:
            actual = error.strerror or str(error)
            hint = "Resume again: a checkpoint that is damaged is set aside for an older one"
            raise DiskError(Problem(str(path), actual, "a file that can be read", hint)) from error
        if target is not value:
            value.copy_(target)

    def _fill(self, target: torch.Tensor, spans: Sequence[Span], saved: SavedTensor) -> None:
        """Read spans into a flat tensor, directly if it has their form. Raises OSError."""
        if saved.file not in self._handles:
            handle = os.open(self._folder / saved.file, os.O_RDONLY | os.O_CLOEXEC)
            self._handles[saved.file] = handle
        handle = self._handles[saved.file]
        _advise(handle, spans)
        for place in spans:
            own = target[: place.size // saved.type.dtype.itemsize]
            target = target[len(own) :]
            if _has_short_runs(place):
                rows = _mapped(handle, place, saved.type.dtype)
                own.view(rows.shape).copy_(rows)
            elif _takes_bytes(own, saved.type):
                _fill_directly(handle, own, place)
            else:
                self._fill_by_buffers(handle, own, place, saved.type.dtype)

    def _fill_by_buffers(
        self, handle: int, target: torch.Tensor, place: Span, dtype: torch.dtype
    ) -> None:
        """Read a span into a flat tensor on any device and of any dtype. Raises OSError."""
        for start, end in place.runs(BUFFER):
            buffer = self._next_buffer()
            buffer.fill(handle, start, end)
            values = buffer.sent(end - start, target.device).view(dtype)
            target[: len(values)].copy_(values)
            target = target[len(values) :]

    def _next_buffer(self) -> _Buffer:
        """Return the buffer that was used longest ago; they are made at the first read."""
        import torch

        if not self._buffers:
            on_gpus = torch.cuda.is_available()
            self._buffers = [_Buffer(on_gpus) for _ in range(2 if on_gpus else 1)]
        self._buffers.append(self._buffers.pop(0))
        return self._buffers[-1]


class _Buffer:
    """Memory on the host for bytes of files, used again when they have arrived on the device."""

    def __init__(self, pinned: bool) -> None:
        import torch

        self._bytes = torch.empty(BUFFER, dtype=torch.uint8, pin_memory=pinned)
        self._arrived: torch.cuda.Event | None = None

    def fill(self, handle: int, start: int, end: int) -> None:
        """Read bytes of a file when the last ones have arrived. Raises OSError."""
        if self._arrived is not None:
            self._arrived.synchronize()
        self._arrived = None
        _take(handle, self._bytes.numpy().data[: end - start], start)

    def sent(self, count: int, device: torch.device) -> torch.Tensor:
        """Return the first bytes on a device: this memory itself on the host."""
        import torch

        on_gpu = device.type == "cuda"
        values = self._bytes[:count].to(device, non_blocking=on_gpu)
        if on_gpu:
            self._arrived = torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(device))
        return values


@dataclass(frozen=True)
class PartReader:
    """Reads parts of one tensor: see `trainer.state.Reader`."""

    files: SpanReader
    saved: SavedTensor

    def fill(self, part: Part) -> None:
        """Implement `Reader.fill`."""
        self.files.fill(part, self.saved)


def _takes_bytes(target: torch.Tensor, kind: TensorType) -> bool:
    """Return True if the bytes of a file are the values of a tensor in the host's memory."""
    return target.device.type == "cpu" and target.dtype == kind.dtype


def _has_short_runs(place: Span) -> bool:
    """Return True for columns of a matrix."""
    return place.run < min(place.step, RUN)


def _fill_directly(handle: int, target: torch.Tensor, place: Span) -> None:
    """Read a span into a tensor's own memory. Raises OSError."""
    import torch

    free = target.view(torch.uint8).numpy().data
    for start, end in place.runs(place.run):
        _take(handle, free[: end - start], start)
        free = free[end - start :]
    target[:0].zero_()  # its version: autograd and copies of weights look at it


def _mapped(handle: int, place: Span, dtype: torch.dtype) -> torch.Tensor:
    """Return the runs of a span as rows of a mapped file. Raises OSError."""
    import torch

    if os.fstat(handle).st_size < place.end:  # a read beyond the end would be a signal
        raise OSError(f"ends before byte {place.end}")
    start = place.start // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    memory = mmap.mmap(handle, place.end - start, access=mmap.ACCESS_COPY, offset=start)
    content = torch.frombuffer(memory, dtype=torch.uint8, offset=place.start - start).view(dtype)
    rows = (place.end - place.start - place.run) // place.step + 1
    each = dtype.itemsize
    return content.as_strided((rows, place.run // each), (place.step // each, 1))


def _advise(handle: int, spans: Sequence[Span]) -> None:
    """Ask Linux to read ahead in columns and long parts, and else to read no more than a part."""
    if sys.platform == "linux":
        long = any(_has_short_runs(place) or place.run >= LONG for place in spans)
        advice = os.POSIX_FADV_NORMAL if long else os.POSIX_FADV_RANDOM
        with suppress(OSError):  # a file system may not take advice
            os.posix_fadvise(handle, 0, 0, advice)


def _take(handle: int, target: memoryview, start: int) -> None:
    """Fill memory with a file's bytes from `start` on. Raises OSError, also at the file's end."""
    while target:  # a read may return fewer bytes
        count = os.preadv(handle, [target], start)
        if not count:
            raise OSError(f"ends at byte {start}, before its values do")
        target = target[count:]
        start += count
