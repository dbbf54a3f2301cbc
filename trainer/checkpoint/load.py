"""Reading a checkpoint into live state, after names, shapes and sizes were checked."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trainer.checkpoint import manifest
from trainer.checkpoint.manifest import ALL, HINT_OPTIMIZER, WEIGHTS_ALONE
from trainer.checkpoint.safetensors_stream import read_places
from trainer.checkpoint.slots import MODEL, OPTIMIZER, optimizer_name
from trainer.checkpoint.span_reader import PartReader, SavedTensor, SpanReader
from trainer.distributed.ranks import Ranks
from trainer.errors import ConfigError, DiskError, Problem, listed
from trainer.state import MASTER, STEP, WEIGHT, RunState, StateTensor

Stored = dict[tuple[str, str], SavedTensor]
"""Each tensor of a checkpoint, by (model or optimizer, name)."""


def load(
    path: Path, entries: Sequence[StateTensor], ranks: Ranks, weights_only: bool = False
) -> RunState:
    """Read the verified checkpoint at `path` into `entries`, and return its position. Collective.

    Tensors are read one at a time, and of each only this rank's shard. The optimizer then has the
    state that the checkpoint has, and no other. A float32 run reads the float32 masters of a 16-bit
    one as its weights, and a 16-bit run reads float32 weights as its masters. `weights_only` reads
    the model's files alone, and leaves the optimizer's state unchanged. Raises DiskError if a file
    is missing or cut off or optimizer state is missing, and ConfigError if names or shapes differ
    from those of `entries`: on every rank, before any value is replaced. Raises DiskError on this
    rank alone if a file can no longer be read after that.
    """
    below = WEIGHTS_ALONE if weights_only else ALL

    def check_files() -> tuple[Stored, RunState]:
        if problems := manifest.check_sizes(path, below):
            raise DiskError(*problems)
        description = manifest.read_description(path)
        stored = _stored(path, below)
        if below == ALL and (lost := _lost(entries, stored, description.get("stateless"))):
            actual = f"optimizer state is missing for {len(lost)} parameters ({listed(lost)})"
            raise DiskError(Problem(str(path), actual, "the state that was saved", HINT_OPTIMIZER))
        return stored, RunState(**description["position"])

    def check() -> None:
        if misfits := _misfits(path, wanted, stored):
            raise ConfigError(*misfits)

    stored, position = ranks.on_node_firsts(check_files)
    wanted = [entry for entry in entries if entry.key in (WEIGHT, MASTER) or not weights_only]
    if not weights_only:
        wanted = _kept(wanted, stored, position)
    ranks.on_each(check)
    with SpanReader(path) as files:
        for entry in wanted:
            entry.write(PartReader(files, stored[_location(entry, stored)]))
    return position


def _lost(
    entries: Sequence[StateTensor], stored: Stored, stateless: Sequence[str] | None
) -> list[str]:
    """List parameters that lack optimizer state, or a count of updates, that they had when saved.

    Old checkpoints do not say which parameters had none: `stateless` is None, and none is listed.
    """
    if stateless is None:
        return []
    keys: dict[str, set[str]] = {}
    for location, name in stored:
        if location == OPTIMIZER:
            keys.setdefault(name.rpartition(".")[0], set()).add(name.rpartition(".")[2])
    states = {name: keys_of - {WEIGHT, MASTER} for name, keys_of in keys.items()}
    counted = [
        keys_of - {STEP} for keys_of in states.values() if STEP in keys_of
    ]  # Muon counts none
    names = {entry.name for entry in entries if (MODEL, entry.name) in stored} - set(stateless)
    return sorted(n for n in names if not states.get(n) or states[n] in counted)


def _kept(entries: Sequence[StateTensor], stored: Stored, position: RunState) -> list[StateTensor]:
    """Return the state tensors to read, after the optimizer was given the checkpoint's state."""
    states: dict[str, dict[str, tuple[int, ...]]] = {}
    for (location, name), saved in stored.items():
        owner, _, key = name.rpartition(".")
        if location == OPTIMIZER and key not in (WEIGHT, MASTER):
            states.setdefault(owner, {})[key] = saved.type.shape
    # one parameter may lack state; if all do after a step of the optimizer, that is an error
    lost = dict[str, tuple[int, ...]]()
    if not states and position.engine.get("optimizer_step"):
        lost = {STEP: ()}
    own = {entry.name for entry in entries if entry.keep}
    kept = [entry for entry in entries if entry.key in (WEIGHT, MASTER) or entry.name not in own]
    for entry in list(kept):
        if entry.keep:
            kept += entry.keep(states.get(entry.name, lost))
    return kept


def _stored(path: Path, below: tuple[str, ...]) -> Stored:
    names = (name for name in manifest.read_manifest(path) if name.startswith(below))
    files = [name for name in names if name.endswith(".safetensors")]
    return {
        (file.partition("/")[0], name): SavedTensor(file, *place)
        for file in files
        for name, place in read_places(path / file).items()
    }


def _locations(entry: StateTensor) -> list[tuple[str, str]]:
    """List where a state tensor may be read from, the best place first."""
    exact = (OPTIMIZER, optimizer_name(entry))
    if entry.key not in (WEIGHT, MASTER):
        return [exact]
    masters = [(OPTIMIZER, f"{entry.name}.{key}") for key in (WEIGHT, MASTER)]
    # a 16-bit weight is read from the model's files, not rounded again
    keys = masters if entry.key == MASTER or entry.dtype.itemsize == 4 else [exact]
    return list(dict.fromkeys([exact, *keys, (MODEL, entry.name)]))


def _location(entry: StateTensor, stored: Stored) -> tuple[str, str]:
    locations = _locations(entry)
    return next((location for location in locations if location in stored), locations[-1])


def _misfits(path: Path, entries: Sequence[StateTensor], stored: Stored) -> list[Problem]:
    locations = {_location(entry, stored): entry for entry in entries}
    known = {location for entry in entries for location in _locations(entry)}
    known |= {(OPTIMIZER, f"{entry.name}.{MASTER}") for entry in entries}
    kinds = {
        "missing in the checkpoint": [
            f"{location}: {name}" for location, name in locations if (location, name) not in stored
        ],
        "not part of this run": [
            f"{location}: {name}" for location, name in stored if (location, name) not in known
        ],
        "of another shape": [
            f"{': '.join(location)} {list(stored[location].type.shape)}, here {list(entry.shape)}"
            for location, entry in locations.items()
            if location in stored and stored[location].type.shape != entry.shape
        ],
    }
    hint = "Resume with the model and the optimizer that it was saved with"
    if any(name.startswith(OPTIMIZER) for name in kinds["missing in the checkpoint"]):
        hint += ", or with --resume-weights-only"
    wrong = [(kind, names) for kind, names in kinds.items() if names]
    actual = [f"{len(names)} tensors {kind} ({listed(names)})" for kind, names in wrong]
    return [Problem(str(path), one, "the tensors of this run", hint) for one in actual]
