"""Which tensor goes into which file: a pure function of the pieces, the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainer.checkpoint.safetensors_stream import TensorType
from trainer.state import WEIGHT, Piece

if TYPE_CHECKING:
    import torch

MODEL, OPTIMIZER = "model", "optimizer"
"""The folders, and the first word of the safetensors files in them."""


@dataclass(frozen=True)
class Slot:
    """One tensor of one file."""

    file: str
    """Path below the checkpoint."""
    name: str
    type: TensorType
    owner: int


Plan = dict[tuple[str, str], list[Slot]]
"""The slots of each piece, by (name, part)."""


def optimizer_name(piece: Piece) -> str:
    """A piece's name in `optimizer/`. A part has no dot, so two pieces never share a name."""
    return f"{piece.name}.{piece.part}"


def plan(pieces: Sequence[Piece], weight_dtype: torch.dtype | None, resumable: bool) -> Plan:
    """Weights go to the model's files, everything else to the optimizer's; each rank that owns some has one file.

    If it is to be `resumable`, the model has a folder of its own, and a weight that `weight_dtype` narrows goes to
    both: resuming is to be exact, bit for bit.
    """
    homes: list[tuple[Piece, str, TensorType]] = []
    for piece in pieces:
        exact = TensorType(piece.shape, piece.dtype)
        stored = exact
        if piece.part == WEIGHT:
            if weight_dtype and piece.dtype.is_floating_point:
                stored = TensorType(piece.shape, weight_dtype)
            homes.append((piece, MODEL, stored))
        if piece.part != WEIGHT or (resumable and stored != exact):
            homes.append((piece, OPTIMIZER, exact))
    folders = {MODEL: f"{MODEL}/" if resumable else "", OPTIMIZER: f"{OPTIMIZER}/"}
    files = {
        stem: _file_names(folder + stem, {piece.owner for piece, home, _ in homes if home == stem})
        for stem, folder in folders.items()
    }
    found: Plan = {}
    for piece, home, kind in homes:
        name = piece.name if home == MODEL else optimizer_name(piece)
        slot = Slot(files[home][piece.owner], name, kind, piece.owner)
        found.setdefault((piece.name, piece.part), []).append(slot)
    return found


def indexes(slots: Sequence[Slot]) -> dict[str, dict[str, object]]:
    """Path and content of an index for each set of several files, as Hugging Face writes them."""
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
        owner: f"{stem}-{number:05d}-of-{count:05d}.safetensors" for number, owner in enumerate(sorted(owners), start=1)
    }
