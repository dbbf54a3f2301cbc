"""The file of each tensor: a pure function of the state tensors, the same on every rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from trainer.checkpoint.safetensors_stream import TensorType, header_of
from trainer.state import CARRIED, MASTER, WEIGHT, FileTensor, StateTensor

if TYPE_CHECKING:
    import torch

MODEL = "model"
OPTIMIZER = "optimizer"
"""The folders, and the first word of the names of the safetensors files in them."""
MOST_FILES = 64
"""The most files of the model, and of the optimizer: a rank may open and flush each of them."""


@dataclass(frozen=True)
class ModelForm:
    """The form in which a checkpoint is written."""

    dtype: torch.dtype | None = None
    """The dtype of floating-point weights in files, unless one has a `file_dtype`; None: own."""
    stem: str = MODEL
    """The beginning of the files' names."""
    one_file: bool = False
    hash: str = "sha256"
    """The hash of the tensors' files: sha256 or blake3."""

    @property
    def joined(self) -> bool:
        """True if all weights are in one file: readers of files with another `stem` need that."""
        return self.one_file or self.stem != MODEL


PLAIN = ModelForm()


@dataclass(frozen=True)
class Slot:
    """The place of one state tensor in a file."""

    entry: StateTensor
    name: str
    type: TensorType
    start: int
    """The byte of the file at which its values begin."""

    @property
    def tensors(self) -> dict[str, TensorType]:
        """The tensors that a reader of the file sees, in order.

        Raises ValueError if the pieces of the state tensor are not all of its values.
        """
        pieces = self.entry.pieces or (FileTensor(self.name, self.type.shape),)
        count = sum(math.prod(piece.shape) for piece in pieces)
        if count != math.prod(self.type.shape):
            raise ValueError(f"{self.name}: its pieces in the file have {count} values")
        return {piece.name: TensorType(piece.shape, self.type.dtype) for piece in pieces}


@dataclass(frozen=True)
class FilePlan:
    """A file with its tensors, in order."""

    owner: int
    """The rank that writes the header."""
    header: bytes
    slots: Sequence[Slot]

    @property
    def size(self) -> int:
        """Bytes."""
        return len(self.header) + sum(slot.type.size for slot in self.slots)


OF_MODEL = (WEIGHT, CARRIED)
"""The keys of the state tensors in a model's files."""
SavePlan = dict[str, FilePlan]
"""The files by their path below the checkpoint."""


def optimizer_name(entry: StateTensor) -> str:
    """Return a state tensor's name in `optimizer/`. It is unique, since keys have no dot."""
    return f"{entry.name}.{entry.key}"


def stateless(entries: Sequence[StateTensor]) -> list[str]:
    """List the tensors without optimizer state: buffers, and what had no gradient yet."""
    learned = {entry.name for entry in entries if entry.key not in (WEIGHT, MASTER)}
    return sorted({entry.name for entry in entries} - learned)


def plan(entries: Sequence[StateTensor], form: ModelForm, resumable: bool) -> SavePlan:
    """Assign weights to the model's files, and all other state to the optimizer's.

    The model and the optimizer have one file per owner of their tensors each, up to `MOST_FILES`;
    a `joined` model has one. If `resumable`, each has a folder, and a weight that `form` changes
    goes to both, since resuming must be exact, bit for bit. Raises ConfigError for a dtype that
    safetensors does not have, and ValueError if two tensors of a file have one name.
    """
    locations: list[tuple[StateTensor, str, TensorType]] = []
    for entry in entries:
        exact = TensorType(entry.shape, entry.dtype)
        stored = exact
        if entry.key == WEIGHT and form.dtype and entry.dtype.is_floating_point:
            stored = TensorType(entry.shape, entry.file_dtype or form.dtype)
        if entry.key in OF_MODEL:
            locations.append((entry, MODEL, stored))
        if entry.key not in OF_MODEL or (resumable and stored != exact):
            locations.append((entry, OPTIMIZER, exact))
    model_stem = f"{MODEL}/{form.stem}" if resumable else form.stem
    stems = {MODEL: model_stem, OPTIMIZER: f"{OPTIMIZER}/{OPTIMIZER}"}
    plan: SavePlan = {}
    for kind, stem in stems.items():
        members = [(entry, stored) for entry, place, stored in locations if place == kind]
        owners = sorted({entry.owner for entry, _ in members})
        count = 1 if kind == MODEL and form.joined else min(len(owners), MOST_FILES)
        files = [owners.index(entry.owner) * count // len(owners) for entry, _ in members]
        for number in range(count if members else 0):
            end = "" if count == 1 else f"-{number + 1:05d}-of-{count:05d}"
            own = [member for member, file in zip(members, files, strict=True) if file == number]
            plan[f"{stem}{end}.safetensors"] = _file(own, kind)
    return plan


def _file(members: Sequence[tuple[StateTensor, TensorType]], kind: str) -> FilePlan:
    slots = []
    end = 0
    for entry, stored in members:
        name = entry.name if kind == MODEL else optimizer_name(entry)
        slots.append(Slot(entry, name, stored, end))
        end += stored.size
    header = header_of([one for slot in slots for one in slot.tensors.items()])
    begun = [replace(slot, start=slot.start + len(header)) for slot in slots]
    return FilePlan(members[0][0].owner, header, begun)


def indexes(planned: SavePlan) -> dict[str, dict[str, object]]:
    """Return an index in Hugging Face's format for each set of several files: content by path."""
    sets: dict[str, list[tuple[str, Slot]]] = {}
    for file, one in planned.items():
        if "-of-" in file:
            members = sets.setdefault(file.partition("-0")[0], [])
            members += [(file.rpartition("/")[2], slot) for slot in one.slots]
    return {
        f"{stem}.safetensors.index.json": {
            "metadata": {"total_size": sum(slot.type.size for _, slot in members)},
            "weight_map": {name: file for file, slot in members for name in slot.tensors},
        }
        for stem, members in sets.items()
    }
