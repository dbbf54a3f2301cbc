"""How a rank reads its part of a checkpoint: as `trainer.checkpoint` does, and from a mapped file.

    python benchmarks/loads.py [--rounds 5] [--mib 1024] [--folder DISK] [--smoke]

A file has eight equal float32 matrices. A rank's rows or columns of each are read by `SpanReader`,
and by `safe_open`, which maps the file, into the same memory. Cold: the file is dropped from the
page cache before each arm, and `mincore` says that it is gone; warm: it was read whole. The arms of
a round come in turn, the next round in the other order. Ratios are of times, mapped / preadv, the
median of the rounds, on one thread. Disk: what the disk was read, as a multiple of the part, by
`/proc/self/io`. Columns are mapped by both.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from trainer.checkpoint.safetensors_stream import read_places
from trainer.checkpoint.span_reader import SavedTensor, SpanReader
from trainer.state import Part
from trainer.storage import flush

NAME = "loads.safetensors"
COLUMNS = 4096
COUNT = 8
Cut = Callable[[torch.Tensor], torch.Tensor]


def rows(of: int, *ranks: int) -> list[Cut]:
    return [partial(row, of=of, rank=rank) for rank in ranks]


def row(whole: torch.Tensor, of: int, rank: int) -> torch.Tensor:
    return whole.chunk(of)[rank]


def columns(of: int) -> list[Cut]:
    return [lambda whole: whole.chunk(of, 1)[of // 2]]


PARTS: dict[str, list[Cut]] = {
    "rows, 1 rank of 1,024": rows(1024, 500),
    "rows, 8 ranks in turn of 1,024 (a node)": rows(1024, *range(496, 504)),
    "rows, 1 rank of 16": rows(16, 5),
    "columns, 1 rank of 8": columns(8),
    "columns, 1 rank of 2": columns(2),
    "whole": [lambda whole: whole],
}


@dataclass(frozen=True)
class Sample:
    """What one arm took once."""

    seconds: float
    disk: int
    """Bytes that the disk was read."""


def mapped(folder: Path, cuts: Sequence[Cut], targets: Sequence[Sequence[torch.Tensor]]) -> None:
    for cut, of_rank in zip(cuts, targets, strict=True):
        with safe_open(folder / NAME, framework="pt") as file:
            for name, target in zip(file.keys(), of_rank, strict=True):
                target.copy_(cut(file.get_tensor(name)))


def by_preadv(folder: Path, cuts: Sequence[Cut], targets: Sequence[Sequence[torch.Tensor]]) -> None:
    for cut, of_rank in zip(cuts, targets, strict=True):
        with SpanReader(folder) as reader:
            places = sorted(read_places(folder / NAME).items())
            for (_, (kind, start)), target in zip(places, of_rank, strict=True):
                view = cut(torch.empty(kind.shape, device="meta"))
                part = Part(target, int(view.storage_offset()), view.stride())
                reader.fill(part, SavedTensor(NAME, kind, start))


def resident(path: Path) -> float:
    """Return the share of a file that is in the page cache."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as memory:
        content = np.frombuffer(memory, np.uint8)
        pages = np.zeros(-(-len(content) // mmap.PAGESIZE), np.uint8)
        address, size = ctypes.c_void_p(content.ctypes.data), ctypes.c_size_t(len(content))
        assert ctypes.CDLL(None).mincore(address, size, pages.ctypes.data_as(ctypes.c_void_p)) == 0
        del content
    return float((pages & 1).mean())


def prepare(path: Path, cold: bool) -> None:
    with path.open("rb", buffering=0) as file:
        if cold:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            assert resident(path) < 0.01, "another process has the file in the page cache"
        else:
            while file.read(1 << 24):
                pass


def sample(
    arm: Callable[..., None], folder: Path, cuts: Sequence[Cut], like: torch.Tensor, cold: bool
) -> tuple[Sample, list[list[torch.Tensor]]]:
    targets = [[torch.zeros(cut(like).shape) for _ in range(COUNT)] for cut in cuts]
    prepare(folder / NAME, cold)
    before, start = read_of_disk(), time.perf_counter()
    arm(folder, cuts, targets)
    return Sample(time.perf_counter() - start, read_of_disk() - before), targets


def read_of_disk() -> int:
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["read_bytes"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--folder", type=Path, default=Path())
    parser.add_argument("--smoke", action="store_true", help="a small file, one round")
    options = parser.parse_args()
    rounds, size = (1, 128) if options.smoke else (options.rounds, options.mib)
    torch.set_num_threads(1)
    length = size * 2**20 // (COUNT * COLUMNS * 4)
    like = torch.empty(length, COLUMNS, device="meta")
    print(
        "| part | page cache | preadv (s) | mapped (s) | mapped / preadv | disk: preadv, mapped |"
    )
    print("| --- | --- | ---: | ---: | ---: | ---: |")
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        save_file({f"t{at}": torch.randn(length, COLUMNS) for at in range(COUNT)}, folder / NAME)
        flush(folder / NAME)
        for title, cuts in PARTS.items():
            for cold in (True, False):
                pairs = [pair(folder, cuts, like, cold, at % 2 == 0) for at in range(rounds)]
                report(title, cold, pairs)


def pair(
    folder: Path, cuts: Sequence[Cut], like: torch.Tensor, cold: bool, own_first: bool
) -> tuple[Sample, Sample, int]:
    """Return a sample of each arm, and the bytes of the part; the values have to be the same."""
    arms = [by_preadv, mapped] if own_first else [mapped, by_preadv]
    taken = {arm: sample(arm, folder, cuts, like, cold) for arm in arms}
    own, values = taken[by_preadv]
    other, wanted = taken[mapped]
    size = 0
    for of_rank, expected in zip(values, wanted, strict=True):
        for value, same in zip(of_rank, expected, strict=True):
            assert torch.equal(value, same)
            size += value.nbytes
    return own, other, size


def report(title: str, cold: bool, pairs: Sequence[tuple[Sample, Sample, int]]) -> None:
    own = statistics.median(one.seconds for one, _, _ in pairs)
    other = statistics.median(one.seconds for _, one, _ in pairs)
    ratio = statistics.median(b.seconds / a.seconds for a, b, _ in pairs)
    shares = [
        statistics.median(two[index].disk / size for *two, size in pairs) for index in range(2)
    ]
    state = "cold" if cold else "warm"
    print(
        f"| {title} | {state} | {own:.4f} | {other:.4f} | {ratio:.2f} |"
        f" {shares[0]:.1f}, {shares[1]:.1f} |",
        flush=True,
    )


if __name__ == "__main__":
    main()
