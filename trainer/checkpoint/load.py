"""Reading a checkpoint back into live state, after everything about it was found to fit."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from safetensors import safe_open

from trainer.checkpoint.manifest import read_manifest, verify
from trainer.checkpoint.plan import MODEL, OPTIMIZER, optimizer_name
from trainer.checkpoint.safetensors_stream import read_types
from trainer.checkpoint.save import DESCRIPTION
from trainer.errors import ConfigError, DiskError, Problem
from trainer.ranks import Ranks
from trainer.state import WEIGHT, Piece, RunState

Stored = dict[tuple[str, str], tuple[str, tuple[int, ...]]]
"""File and shape of each tensor of a checkpoint, by (model or optimizer, name)."""

_NAMED = 5
"""How many names one message lists."""


def read_description(path: Path) -> dict[str, Any]:
    """What `save` was told of the run, and its `position`. Raises DiskError."""
    try:
        return json.loads((path / DESCRIPTION).read_bytes())
    except (OSError, ValueError) as error:
        raise DiskError(Problem(str(path / DESCRIPTION), str(error), "the description that was saved")) from error


def load(path: Path, pieces: Sequence[Piece], ranks: Ranks) -> RunState:
    """Write the checkpoint at `path` into `pieces`, one tensor at a time, and return its position. Collective.

    Raises DiskError if the checkpoint does not verify, and ConfigError if names or shapes are not those of `pieces`:
    on every rank, before anything is written.
    """

    def check() -> Stored:
        if problems := verify(path):
            raise DiskError(*problems)
        stored = _stored(path)
        if misfits := _misfits(path, pieces, stored):
            raise ConfigError(*misfits)
        return stored

    stored = ranks.on_first(check)
    with ExitStack() as files:
        opened: dict[str, Any] = {}
        for piece in pieces:
            home = _home(piece, stored)
            name, _ = stored[home]
            if name not in opened:
                opened[name] = files.enter_context(safe_open(path / name, framework="pt"))
            piece.write(opened[name].get_tensor(home[1]).to(piece.dtype))
    return RunState(**read_description(path)["position"])


def _stored(path: Path) -> Stored:
    files = [name for name in read_manifest(path) if name.endswith(".safetensors")]
    return {
        (file.partition("/")[0], name): (file, kind.shape)
        for file in files
        for name, kind in read_types(path / file).items()
    }


def _home(piece: Piece, stored: Stored) -> tuple[str, str]:
    """Where a piece is read from: for a weight that was narrowed in the model's files, from its exact copy."""
    exact = (OPTIMIZER, optimizer_name(piece))
    return exact if piece.part != WEIGHT or exact in stored else (MODEL, piece.name)


def _misfits(path: Path, pieces: Sequence[Piece], stored: Stored) -> list[Problem]:
    homes = {_home(piece, stored): piece for piece in pieces}
    known = homes.keys() | {(MODEL, piece.name) for piece in pieces if piece.part == WEIGHT}
    kinds = {
        "missing in the checkpoint": [f"{home}: {name}" for home, name in homes if (home, name) not in stored],
        "not part of this run": [f"{home}: {name}" for home, name in stored if (home, name) not in known],
        "of another shape": [
            f"{home[0]}: {home[1]} {list(stored[home][1])}, here {list(piece.shape)}"
            for home, piece in homes.items()
            if home in stored and stored[home][1] != piece.shape
        ],
    }
    mend = "Resume with the model and the optimizer that it was saved with"
    return [
        Problem(str(path), f"{len(names)} tensors {kind} ({_listed(names)})", "the tensors of this run", mend)
        for kind, names in kinds.items()
        if names
    ]


def _listed(names: Sequence[str]) -> str:
    return "; ".join(names[:_NAMED]) + ("; ..." if len(names) > _NAMED else "")
