"""Reading a checkpoint back into live state, after everything about it was found to fit."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from safetensors import safe_open

from trainer.checkpoint.manifest import ALL, WEIGHTS_ALONE, check_sizes, read_description, read_manifest
from trainer.checkpoint.plan import MODEL, OPTIMIZER, optimizer_name
from trainer.checkpoint.safetensors_stream import read_types
from trainer.errors import ConfigError, DiskError, Problem
from trainer.ranks import Ranks
from trainer.state import MASTER, WEIGHT, Piece, RunState

Stored = dict[tuple[str, str], tuple[str, tuple[int, ...]]]
"""File and shape of each tensor of a checkpoint, by (model or optimizer, name)."""

_NAMED = 5
"""How many names one message lists."""


def load(path: Path, pieces: Sequence[Piece], ranks: Ranks, weights_only: bool = False) -> RunState:
    """Write the checkpoint at `path`, which was verified, into `pieces`, and return its position. Collective.

    One tensor at a time. A float32 run takes the exact masters of a 16-bit one for its weights, and the other way
    round. `weights_only` reads the model's files alone, and leaves the optimizer's state as it is. Raises DiskError if
    a file is missing or cut, and ConfigError if names or shapes are not those of `pieces`: on every rank, before it
    writes.
    """
    below = WEIGHTS_ALONE if weights_only else ALL
    wanted = [piece for piece in pieces if piece.part in (WEIGHT, MASTER) or not weights_only]

    def check() -> Stored:
        if problems := check_sizes(path, below):
            raise DiskError(*problems)
        stored = _stored(path, below)
        if misfits := _misfits(path, wanted, stored):
            raise ConfigError(*misfits)
        return stored

    stored = ranks.on_first(check)
    with ExitStack() as files:
        opened: dict[str, Any] = {}
        for piece in wanted:
            home = _home(piece, stored)
            name, _ = stored[home]
            if name not in opened:
                opened[name] = files.enter_context(safe_open(path / name, framework="pt"))
            piece.write(opened[name].get_tensor(home[1]).to(piece.dtype))
    return RunState(**read_description(path)["position"])


def _stored(path: Path, below: tuple[str, ...]) -> Stored:
    files = [name for name in read_manifest(path) if name.endswith(".safetensors") and name.startswith(below)]
    return {
        (file.partition("/")[0], name): (file, kind.shape)
        for file in files
        for name, kind in read_types(path / file).items()
    }


def _homes(piece: Piece) -> list[tuple[str, str]]:
    """Where a piece may be read from, the best first."""
    exact = (OPTIMIZER, optimizer_name(piece))
    if piece.part not in (WEIGHT, MASTER):
        return [exact]
    masters = [(OPTIMIZER, f"{piece.name}.{part}") for part in (WEIGHT, MASTER)]
    # a 16-bit weight is the one in the model's files, not one that is rounded anew
    found = masters if piece.part == MASTER or piece.dtype.itemsize == 4 else [exact]
    return list(dict.fromkeys([exact, *found, (MODEL, piece.name)]))


def _home(piece: Piece, stored: Stored) -> tuple[str, str]:
    homes = _homes(piece)
    return next((home for home in homes if home in stored), homes[-1])


def _misfits(path: Path, pieces: Sequence[Piece], stored: Stored) -> list[Problem]:
    homes = {_home(piece, stored): piece for piece in pieces}
    known = {home for piece in pieces for home in _homes(piece)}
    known |= {(OPTIMIZER, f"{piece.name}.{MASTER}") for piece in pieces}
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
    if any(name.startswith(OPTIMIZER) for name in kinds["missing in the checkpoint"]):
        mend += ", or with --resume-weights-only"
    return [
        Problem(str(path), f"{len(names)} tensors {kind} ({_listed(names)})", "the tensors of this run", mend)
        for kind, names in kinds.items()
        if names
    ]


def _listed(names: Sequence[str]) -> str:
    return "; ".join(names[:_NAMED]) + ("; ..." if len(names) > _NAMED else "")
