"""The file of each tensor: a pure function of the state tensors, the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainer.checkpoint.safetensors_stream import TensorType
from trainer.state import MASTER, WEIGHT, StateTensor

if TYPE_CHECKING:
    import torch

MODEL, OPTIMIZER = "model", "optimizer"
"""The folders, and the first word of the names of the safetensors files in them."""


@dataclass(frozen=True)
class ModelForm:
    """The form in which a model's weights are written."""

    dtype: torch.dtype | None = None
    """That of the files; None: the weights' own."""
    stem: str = MODEL
    """The beginning of the files' names."""
    one_file: bool = False

    @property
    def joined(self) -> bool:
        """True for one file: the readers of files with a name of their own need that."""
        return self.one_file or self.stem != MODEL


PLAIN = ModelForm()


@dataclass(frozen=True)
class Slot:
    """One tensor in one file."""

    file: str
    """The path below the checkpoint."""
    name: str
    type: TensorType
    owner: int


SavePlan = dict[tuple[str, str], list[Slot]]
"""The slots of each state tensor, by (name, key)."""


def optimizer_name(entry: StateTensor) -> str:
    """Return a state tensor's name in `optimizer/`, its own since keys have no dot."""
    return f"{entry.name}.{entry.key}"


def stateless(entries: Sequence[StateTensor]) -> list[str]:
    """List the tensors without optimizer state: buffers, and what had no gradient yet."""
    learned = {entry.name for entry in entries if entry.key not in (WEIGHT, MASTER)}
    return sorted({entry.name for entry in entries} - learned)


def plan(entries: Sequence[StateTensor], form: ModelForm, resumable: bool) -> SavePlan:
    """Assign weights to the model's files and all else to the optimizer's, a file for each owner.

    If `resumable`, the model has a folder of its own, and a weight that `form` narrows goes to
    both, since resuming must be exact, bit for bit.
    """
    locations: list[tuple[StateTensor, str, TensorType]] = []
    for entry in entries:
        exact = TensorType(entry.shape, entry.dtype)
        stored = exact
        if entry.key == WEIGHT:
            if form.dtype and entry.dtype.is_floating_point:
                stored = TensorType(entry.shape, form.dtype)
            locations.append((entry, MODEL, stored))
        if entry.key != WEIGHT or (resumable and stored != exact):
            locations.append((entry, OPTIMIZER, exact))
    stems = {MODEL: model_stem(form, resumable), OPTIMIZER: f"{OPTIMIZER}/{OPTIMIZER}"}
    files = {
        kind: _file_names(stem, {entry.owner for entry, place, _ in locations if place == kind})
        for kind, stem in stems.items()
    }
    found: SavePlan = {}
    for entry, location, kind in locations:
        name = entry.name if location == MODEL else optimizer_name(entry)
        slot = Slot(files[location][entry.owner], name, kind, entry.owner)
        found.setdefault((entry.name, entry.key), []).append(slot)
    return found


def model_stem(form: ModelForm, resumable: bool) -> str:
    """Return how the paths of the model's files begin."""
    return f"{MODEL}/{form.stem}" if resumable else form.stem


def indexes(slots: Sequence[Slot]) -> dict[str, dict[str, object]]:
    """Return path and content of an index for each set of several files (Hugging Face's)."""
    sets: dict[str, list[Slot]] = {}
    for slot in slots:
        if "-of-" in slot.file:
            sets.setdefault(slot.file.partition("-0")[0], []).append(slot)
    return {
        f"{stem}.safetensors.index.json": {
            "metadata": {"total_size": sum(slot.type.size for slot in members)},
            "weight_map": {slot.name: slot.file.rpartition("/")[2] for slot in members},
        }
        for stem, members in sets.items()
    }


def _file_names(stem: str, owners: set[int]) -> dict[int, str]:
    if len(owners) == 1:
        return dict.fromkeys(owners, f"{stem}.safetensors")
    count = len(owners)
    return {
        owner: f"{stem}-{number:05d}-of-{count:05d}.safetensors"
        for number, owner in enumerate(sorted(owners), start=1)
    }
