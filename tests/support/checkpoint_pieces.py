"""Training state of plain tensors, which a checkpoint sees as it sees an engine's."""

from __future__ import annotations

from pathlib import Path

import torch

from trainer.checkpoint import ModelFolder
from trainer.checkpoint.file_records import PARTS, FileRecord
from trainer.checkpoint.manifest import read_manifest
from trainer.checkpoint.parts_file import with_parts
from trainer.distributed.ranks import Ranks
from trainer.state import WEIGHT, Part, Reader, RunState, StateTensor

ALONE = Ranks()
DESCRIPTION = {"seed": 7, "config": {"trainer": {"steps": 9}}}
STATE = RunState(step=100, samples=3200, tokens=51_000, engine={"optimizer_step": 100.0})


class InMemory:
    """A whole tensor that is read as those of a checkpoint are."""

    def __init__(self, whole: torch.Tensor) -> None:
        self._whole = whole

    def fill(self, part: Part) -> None:
        part.value.detach().copy_(part.within(self._whole))


class Live:
    """Live state by (name, part), to be read and written."""

    def __init__(self, tensors: dict[tuple[str, str], torch.Tensor], ranks: Ranks = ALONE) -> None:
        self.tensors = tensors
        self._ranks = ranks

    def state_tensors(self) -> list[StateTensor]:
        return [self._piece(index, *key) for index, key in enumerate(self.tensors)]

    def blank(self) -> Live:
        """The same names and shapes, with other values."""
        return Live(
            {key: torch.full_like(tensor, 1) for key, tensor in self.tensors.items()}, self._ranks
        )

    def _piece(self, index: int, name: str, part: str) -> StateTensor:
        tensor = self.tensors[name, part]
        owner = index % self._ranks.world_size

        def parts() -> list[Part]:
            """As of a model that is sharded along its rows, with one copy of its scalars."""
            if not tensor.ndim:
                return [Part(tensor)] if owner == self._ranks.rank else []
            rows = tensor.tensor_split(self._ranks.world_size)[self._ranks.rank]
            return [Part(rows, rows.storage_offset(), rows.stride())]

        def write(stored: Reader) -> None:
            stored.fill(Part(tensor))

        return StateTensor(name, part, tuple(tensor.shape), tensor.dtype, owner, parts, write)


def live(ranks: Ranks = ALONE, seed: int = 0) -> Live:
    made = torch.Generator().manual_seed(seed)
    tensors: dict[tuple[str, str], torch.Tensor] = {}
    for name, shape in {"a.weight": (4, 3), "b.weight": (5,), "scale": (), "empty": (0, 2)}.items():
        for part in (WEIGHT, "exp_avg", "exp_avg_sq"):
            tensors[name, part] = torch.randn(shape, generator=made)
    tensors["c.buffer", WEIGHT] = torch.tensor([1, 2**40])
    return Live(tensors, ranks)


def same(one: Live, other: Live) -> bool:
    return one.tensors.keys() == other.tensors.keys() and all(
        torch.equal(tensor, other.tensors[key]) for key, tensor in one.tensors.items()
    )


def model_files(folder: Path) -> None:
    (folder / "config.json").write_text("{}\n")


MODEL_FOLDER = ModelFolder(model_files)


def files(folder: Path) -> list[str]:
    return sorted(
        path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()
    )


def records_of(path: Path) -> dict[str, FileRecord]:
    """The files of a checkpoint, with the parts that ranks listed."""
    records = read_manifest(path)
    if PARTS not in records:
        return records
    writers = {name: [0] * len(record.parts) for name, record in records.items()}
    return with_parts(path, records, writers)[0]
