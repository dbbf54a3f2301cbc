"""The cost of a save: what the first of 1,024 ranks receives, and the size of the manifest."""

from __future__ import annotations

import pickle
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.fake_ranks import Counting
from trainer.checkpoint import ModelFolder, save, slots
from trainer.checkpoint.file_records import PARTS, span
from trainer.checkpoint.manifest import MANIFEST, read_manifest
from trainer.checkpoint.parts_file import read_line
from trainer.state import WEIGHT, Part, RunState, StateTensor

WORLD = 1024
ROW = 4


@dataclass(frozen=True)
class Saving(Counting):
    """The first rank of a save, whose other ranks write as many parts, and all that is left."""

    sizes: tuple[int, ...] = ()
    """Bytes of each file that the ranks write."""

    def gather(self, value: Any) -> list[Any]:
        self.received["lengths"] += (self.world_size - 1) * (8 + len(pickle.dumps(value)))
        return [value] * self.world_size

    def to_node_firsts(self, value: Any) -> list[Any]:
        self.received["reports"] += (self.world_size - 1) * (8 + len(pickle.dumps(value)))
        (place, digest), none = value.line, [0] * len(self.sizes)
        lines = [
            (span(rank * place.size, (rank + 1) * place.size), digest)
            for rank in range(self.world_size)
        ]
        left = [size - own for size, own in zip(self.sizes, value.sizes, strict=True)]
        written = [value.sizes, left, *[none] * (self.world_size - 2)]
        return [
            replace(value, sizes=sizes, line=line)
            for sizes, line in zip(written, lines, strict=True)
        ]


def state(layers: int) -> list[StateTensor]:
    """Weights and moments of so many layers of nine matrices, of which each rank has a row."""
    names = [
        f"model.layers.{layer}.matrix_{number}" for layer in range(layers) for number in range(9)
    ]
    row = torch.ones(1, ROW)
    return [
        StateTensor(
            name, key, (WORLD, ROW), torch.float32, index * WORLD // len(names),
            lambda: [Part(row, 0, (ROW, 1))], lambda _: None,
        )
        for index, name in enumerate(names)
        for key in (WEIGHT, "exp_avg", "exp_avg_sq")
    ]  # fmt: skip


def saved(folder: Path, layers: int) -> tuple[Saving, Path, float]:
    """Save as the first rank; return what it received, the checkpoint, and seconds of its CPU."""
    entries = state(layers)
    planned = slots.plan(entries, slots.PLAIN, resumable=True)
    ranks = Saving(0, WORLD, sizes=tuple(planned[name].size for name in sorted(planned)))
    start = time.process_time()
    path = save(folder, RunState(step=1, samples=1), entries, {}, ModelFolder(), ranks)
    return ranks, path, time.process_time() - start


@pytest.mark.parametrize("layers", [4, 126])
def test_the_first_rank_learns_as_much_whatever_the_model(tmp_path: Path, layers: int) -> None:
    """Llama 405B has 126 layers: 3.5 million parts, of which each rank lists 3,402."""
    ranks, path, seconds = saved(tmp_path, layers)
    own = (path / MANIFEST).stat().st_size
    print(f"{layers} layers: {seconds:.2f} s, {own:,} bytes of manifest, {dict(ranks.received)}")
    assert own < WORLD * 256
    assert ranks.received["reports"] < WORLD * 2048
    assert ranks.received["lengths"] < WORLD * 64
    records = read_manifest(path)
    assert len(records[PARTS].parts) == WORLD
    listed = read_line(path, records[PARTS].parts[0], records)  # this rank's, and no other's
    assert sum(map(len, listed.values())) == layers * 9 * 3
