"""The safetensors format, written by several ranks at once, each hashing the parts that it writes.

Format: https://huggingface.co/docs/safetensors - the header's length as 8 little-endian bytes, the
header as JSON padded with spaces to a multiple of 8, then the tensors' bytes without gaps: where
each value goes is known before any is written.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from trainer.checkpoint.file_records import Hash, Hashed, Span, digest_of, new_hash, span
from trainer.errors import ConfigError, NumericsError, Problem
from trainer.state import Part

if TYPE_CHECKING:
    import torch

_NAMES = {
    "torch.float64": "F64",
    "torch.float32": "F32",
    "torch.float16": "F16",
    "torch.bfloat16": "BF16",
    "torch.int64": "I64",
    "torch.int32": "I32",
    "torch.int16": "I16",
    "torch.int8": "I8",
    "torch.uint8": "U8",
    "torch.bool": "BOOL",
    "torch.uint64": "U64",
    "torch.uint32": "U32",
    "torch.uint16": "U16",
    "torch.float8_e4m3fn": "F8_E4M3",
    "torch.float8_e5m2": "F8_E5M2",
    "torch.float8_e8m0fnu": "F8_E8M0",
    "torch.complex64": "C64",
}
"""The format's name of each dtype, by name: checkpoints are verified without torch."""
_DTYPES = {name: dtype.removeprefix("torch.") for dtype, name in _NAMES.items()}
_ITEMSIZES = {
    name: 1 if name == "BOOL" else int(name.partition("_")[0].lstrip("BFIUC")) // 8
    for name in _DTYPES
}

_NOT_FINITE = (
    "a value that is not finite",
    "finite numbers in a checkpoint",
    "The previous one is good: resume from it with a lower learning rate, or other data",
)


@dataclass(frozen=True)
class TensorType:
    """The shape and dtype of a tensor, without its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


EARLY = 1 << 20
"""The least bytes of a part that the system is asked to write to the disk at once."""


class SharedFile:
    """A file that has its final size, and whose parts of this rank are written and hashed.

    Its methods raise OSError.
    """

    def __init__(self, path: Path, threads: ThreadPoolExecutor, kind: str) -> None:
        self._path = path
        self._threads = threads
        self._kind = kind
        self._file: Any = None
        self._hashes: list[tuple[Span, Hash]] = []

    def write(self, place: Span, content: bytes | memoryview) -> None:
        """Write the runs of a part; `content` has their bytes, without the gaps between them."""
        if self._file is None:
            self._file = self._path.open("r+b", buffering=0)
        hashed = self._threads.submit(self._hash(place).update, content)
        rest = memoryview(content)
        for start, end in place.runs(place.run):
            put(self._file.fileno(), rest[: end - start], start)
            rest = rest[end - start :]
        if place.size >= EARLY:
            begin_writing(self._file.fileno(), place)
        hashed.result()

    def _hash(self, place: Span) -> Hash:
        """Return the hash of a part, which continues where the last one ended."""
        last, digest = self._hashes[-1] if self._hashes else (place, None)
        if digest and (last.end, last, place) == (place.start, span(*last[:2]), span(*place[:2])):
            self._hashes[-1] = span(last.start, place.end), digest
        else:
            self._hashes.append((place, digest := new_hash(self._kind)))
        return digest

    def finish(self) -> list[Hashed]:
        """Flush the file to the disk; return its parts of this rank with their digests."""
        if self._file is not None:
            os.fsync(self._file.fileno())
            self.close()
        return [(place, digest_of(content)) for place, content in self._hashes]

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def begin_writing(handle: int, place: Span) -> None:
    """Ask Linux to write a part of a file to the disk now, instead of at the flush."""
    if sys.platform == "linux":
        with suppress(OSError):  # a file system may not take advice
            os.posix_fadvise(handle, place.start, place.end - place.start, os.POSIX_FADV_DONTNEED)


def put(handle: int, content: memoryview, start: int) -> None:
    """Write bytes to a file, from byte `start` on. Raises OSError."""
    while content:  # one call takes at most 2 GiB
        count = os.pwrite(handle, content, start)
        start = start + count
        content = content[count:]


def on_host(name: str, tensor: torch.Tensor, dtype: torch.dtype, finite: bool = True) -> memoryview:
    """Return the values of a tensor on any device as the bytes of `dtype` that a file has.

    If all must be `finite`, raises NumericsError for an infinity or NaN.
    """
    import torch

    flat = tensor.detach().to("cpu", dtype).contiguous().reshape(-1)
    # an infinity or NaN shows in the extremes: one pass, and no mask as large as the tensor
    checked = finite and dtype.is_floating_point and len(flat) > 0
    if checked and not all(end.isfinite() for end in flat.aminmax()):
        raise NumericsError(Problem(name, *_NOT_FINITE))
    return flat.view(torch.uint8).numpy().data


def spans_of(part: Part, kind: TensorType, start: int) -> list[Span]:
    """List the bytes of a file that hold a part of a tensor, in the order of the part's values.

    `kind` is the type of the whole tensor, which begins at byte `start`.
    """
    shape = part.value.shape
    strides = part.strides
    if strides is None or not part.value.numel():
        return [span(start, start + kind.size)] if part.value.numel() else []
    dims = [(1, 1)]  # sizes and strides, innermost first; those without a gap joined to one
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size > 1 and stride == dims[-1][0] * dims[-1][1]:
            dims[-1] = dims[-1][0] * size, dims[-1][1]
        elif size > 1:
            dims.append((size, stride))
    run, (count, step) = dims[0][0], (*dims[1:], (1, dims[0][0]))[0]
    length = (count - 1) * step + run
    each = kind.dtype.itemsize
    outer = product(*(range(0, size * stride, stride) for size, stride in reversed(dims[2:])))
    starts = [start + each * (part.offset + sum(at)) for at in outer]
    return [Span(at, at + each * length, each * run, each * step) for at in starts]


def read_header(path: Path) -> dict[str, tuple[str, tuple[int, ...], int]]:
    """Return dtype (`float32`), shape and size in bytes of each tensor of a file, without torch.

    They come in the order of their bytes, which have no gaps: the library checks that.
    Raises OSError, and ValueError for a file that is not whole or has an unknown dtype.
    """
    entries = {}
    try:
        with safe_open(path, framework="np") as file:
            for name in file.offset_keys():
                part = file.get_slice(name)
                dtype = part.get_dtype()
                shape = tuple(part.get_shape())
                entries[name] = _DTYPES[dtype], shape, math.prod(shape) * _ITEMSIZES[dtype]
    except (SafetensorError, KeyError) as error:
        raise ValueError(f"no whole file of tensors: {error!s:.100}") from error
    return entries


def read_places(path: Path) -> dict[str, tuple[TensorType, int]]:
    """Return the type of each tensor of a file, and the byte at which its values begin.

    Reads the header alone. Raises as `read_header` does.
    """
    import torch

    with path.open("rb") as file:
        end = 8 + int.from_bytes(file.read(8), "little")
    places = {}
    for name, (dtype, shape, size) in read_header(path).items():
        places[name] = TensorType(shape, getattr(torch, dtype)), end
        end += size
    return places


def header_of(types: Iterable[tuple[str, TensorType]]) -> bytes:
    """Return the first bytes of a file of these tensors, in this order: all before the values.

    Raises ConfigError for a dtype that the format does not have, ValueError for a repeated name.
    """
    # without metadata transformers refuses the file
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, kind in types:
        if name in entries:
            raise ValueError(f"two tensors called {name} for one file")
        if str(kind.dtype) not in _NAMES:
            expected = f"one of {', '.join(_NAMES)}"
            raise ConfigError(Problem(name, f"a tensor of {kind.dtype}", expected))
        start = end
        end = end + kind.size
        entries[name] = {
            "dtype": _NAMES[str(kind.dtype)],
            "shape": list(kind.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
