"""The safetensors format, written one tensor at a time and hashed in the same pass.

Format: https://huggingface.co/docs/safetensors - the header's length as 8 little-endian bytes, the
header as JSON padded with spaces to a multiple of 8, then the tensors' bytes without gaps. The
library's own writer takes all tensors at once; here memory holds the largest one.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.errors import ConfigError, NumericsError, Problem
from trainer.storage import parse_json

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
}
"""The format's name of each dtype, by name: checkpoints are verified without torch."""
_DTYPES = {name: dtype.removeprefix("torch.") for dtype, name in _NAMES.items()}

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


@dataclass(frozen=True)
class FileRecord:
    """The size and hash of a finished file."""

    size: int
    """Bytes."""
    sha256: str


class TensorWriter:
    """A safetensors file that is being written. `types` are all its tensors, in the order of
    writing.

    Raises ConfigError for a dtype that the format does not have, and OSError.
    """

    def __init__(self, path: Path, types: Mapping[str, TensorType]) -> None:
        header = _header(types)
        self._waiting = list(types.items())[::-1]
        self._hash, self._hasher = hashlib.sha256(), ThreadPoolExecutor(1)
        self._size = 0
        self._file = path.open("wb", buffering=0)
        self._write(len(header).to_bytes(8, "little"))
        self._write(header)

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Write the next tensor, from any device; it is converted to its dtype in `types`.

        Raises NumericsError for a value that is not finite.
        """
        import torch

        expected, kind = self._waiting.pop()
        if (name, tuple(tensor.shape)) != (expected, kind.shape):
            came = f"{name} {tuple(tensor.shape)}"
            raise ValueError(f"{came} came where {expected} {kind.shape} was announced")
        flat = tensor.detach().to("cpu", kind.dtype).contiguous().reshape(-1)
        # an infinity or NaN shows in the extremes: one pass, and no mask as large as the tensor
        checked = kind.dtype.is_floating_point and len(flat) > 0
        if checked and not all(end.isfinite() for end in flat.aminmax()):
            raise NumericsError(Problem(name, *_NOT_FINITE))
        self._write(flat.view(torch.uint8).numpy().data)

    def finish(self) -> FileRecord:
        """Flush the file to the disk; return its size and hash."""
        if self._waiting:
            count = len(self._waiting)
            raise ValueError(f"{self._file.name}: {count} tensors were announced and not written")
        os.fsync(self._file.fileno())
        self._file.close()
        return FileRecord(self._size, self._hash.hexdigest())

    def abandon(self) -> None:
        """Close an unfinished file."""
        self._hasher.shutdown()
        self._file.close()

    def _write(self, content: bytes | memoryview) -> None:
        hashed = self._hasher.submit(self._hash.update, content)
        self._size += len(content)
        rest = memoryview(content)
        while rest:  # one call takes at most 2 GiB
            rest = rest[self._file.write(rest) :]
        hashed.result()


def read_header(path: Path) -> dict[str, tuple[str, tuple[int, ...], int]]:
    """Return dtype (`float32`), shape and size in bytes of each tensor of a file, read without
    torch.

    Raises OSError, and ValueError for a file that is not whole.
    """
    with path.open("rb") as file:
        length, there = int.from_bytes(file.read(8), "little"), path.stat().st_size
        if length > there:
            raise ValueError(f"a header of {length} bytes in a file of {there}")
        header = parse_json(file.read(length))
    try:
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        found = {name: _entry(**entry) for name, entry in entries.items()}
        places = sorted(entry["data_offsets"] for entry in entries.values())
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"no header of tensors ({error!r:.100})") from error
    if (data := sum(size for _, _, size in found.values())) != there - 8 - length:
        raise ValueError(f"tensors of {data} bytes in a file that holds {there - 8 - length}")
    end = 0
    for place in places:
        if place[0] != end:
            places_of = f"one begins at {place[0]}, the last ended at {end}"
            raise ValueError(f"tensors that overlap or leave a gap: {places_of}")
        end = place[1]
    return found


def _entry(
    dtype: str, shape: Sequence[int], data_offsets: Sequence[int]
) -> tuple[str, tuple[int, ...], int]:
    start, end = data_offsets
    kind = _DTYPES[dtype]
    if end - start != math.prod(shape) * _itemsize(dtype):
        raise ValueError(f"{end - start} bytes for {dtype} {list(shape)}")
    return kind, tuple(shape), end - start


def _itemsize(name: str) -> int:
    """Return the bytes of a value of the format's dtype."""
    return 1 if name == "BOOL" else int(name.lstrip("BFIU")) // 8


def read_types(path: Path) -> dict[str, TensorType]:
    """Return the types of a file's tensors, from its header. Raises as `read_header` does."""
    import torch

    return {
        name: TensorType(shape, getattr(torch, dtype))
        for name, (dtype, shape, _) in read_header(path).items()
    }


def _header(types: Mapping[str, TensorType]) -> bytes:
    # without metadata transformers refuses the file
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, kind in types.items():
        if str(kind.dtype) not in _NAMES:
            expected = f"one of {', '.join(_NAMES)}"
            raise ConfigError(Problem(name, f"a tensor of {kind.dtype}", expected))
        start, end = end, end + kind.size
        entries[name] = {
            "dtype": _NAMES[str(kind.dtype)],
            "shape": list(kind.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8)
