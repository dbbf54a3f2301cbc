"""Writing a checkpoint: in a folder of its own, flushed, agreed, manifest last, one rename."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import safe_open

from trainer.checkpoint import faults
from trainer.checkpoint.directory import DELETING, point_at, set_aside, step_name, sweep
from trainer.checkpoint.folders import PARTIAL, spread
from trainer.checkpoint.manifest import DESCRIPTION, hash_file, write_manifest
from trainer.checkpoint.safetensors_stream import FileRecord, TensorWriter, read_types
from trainer.checkpoint.slots import (
    MODEL,
    PLAIN,
    ModelForm,
    SavePlan,
    Slot,
    indexes,
    model_stem,
    plan,
    stateless,
)
from trainer.distributed.ranks import Ranks
from trainer.errors import DiskError, Problem
from trainer.state import WEIGHT, RunState, StateTensor
from trainer.storage import disk_errors, ensure_writable, rename_folder, to_json

if TYPE_CHECKING:
    import torch

WriteModelFiles = Callable[[Path], object]
"""Writes the config, tokenizer and generation config into a folder; called on rank 0."""


def save(
    folder: Path,
    state: RunState,
    entries: Sequence[StateTensor],
    description: Mapping[str, Any],
    write_model_files: WriteModelFiles,
    ranks: Ranks,
    form: ModelForm = PLAIN,
) -> Path:
    """Publish the checkpoint of `state.step` in `folder`, complete on each machine; return its
    path. Collective.

    `description` is the content of `trainer.json` besides the position. Weights that `form` narrows
    are kept exactly with the optimizer's state. Raises DiskError on every rank, with nothing
    published, if it can't be written or the step is there already.
    """
    final = folder / step_name(state.step)
    partial = final.with_name(final.name + PARTIAL)
    planned = plan(entries, form, resumable=True)

    @disk_errors(folder)
    def prepare() -> None:
        if final.exists():
            hint = "Resume from it, or choose another run name"
            expected = "a step that was not saved before"
            raise DiskError(Problem(str(final), "already published", expected, hint))
        sweep(folder)
        _make(partial, planned)

    @disk_errors(partial)
    def publish(records: Mapping[str, FileRecord], text: bytes) -> None:
        (partial / DESCRIPTION).write_bytes(text)
        _seal(partial, planned, _joined(partial, form, True, records))
        faults.at("rename")
        rename_folder(partial, final)
        faults.at("latest")
        point_at(final)

    faults.at("before")
    with _removed_on_error(partial, ranks):
        record = {"stateless": stateless(entries), "position": asdict(state)}
        text = ranks.on_first(lambda: to_json({**description, **record}))
        ranks.on_keepers(prepare)
        records = _write_shards(partial, planned, entries, ranks)
        _write_others(partial, partial / MODEL, write_model_files, records, ranks)
        ranks.on_keepers(lambda: publish(records, text))
    return final


def export(
    folder: Path,
    entries: Sequence[StateTensor],
    write_model_files: WriteModelFiles,
    ranks: Ranks,
    form: ModelForm = PLAIN,
) -> Path:
    """Write the weights alone as a Hugging Face model folder. Collective.

    An older folder is replaced only by a complete one. Raises DiskError on every rank.
    """
    partial = folder.with_name(folder.name + PARTIAL)
    weights = [entry for entry in entries if entry.key == WEIGHT]
    planned = plan(weights, form, resumable=False)

    @disk_errors(partial)
    def prepare() -> None:
        shutil.rmtree(partial, ignore_errors=True)
        _make(partial, planned)

    @disk_errors(partial)
    def publish(records: Mapping[str, FileRecord]) -> None:
        _seal(partial, planned, _joined(partial, form, False, records))
        if folder.exists():
            set_aside(folder)
        rename_folder(partial, folder)
        shutil.rmtree(folder.with_name(folder.name + DELETING), ignore_errors=True)

    with _removed_on_error(partial, ranks):
        ranks.on_keepers(prepare)
        records = _write_shards(partial, planned, weights, ranks)
        _write_others(partial, partial, write_model_files, records, ranks)
        ranks.on_keepers(lambda: publish(records))
    return folder


def _make(partial: Path, planned: SavePlan) -> None:
    """Make an empty folder on a disk that has room for its future content."""
    ensure_writable(partial.parent, _size(_slots(planned)))
    partial.mkdir()
    for folder in {(partial / slot.file).parent for slot in _slots(planned)}:
        folder.mkdir(exist_ok=True)


def _write_shards(
    partial: Path, planned: SavePlan, entries: Sequence[StateTensor], ranks: Ranks
) -> dict[str, FileRecord]:
    """Write the tensors that each rank owns; return the records of all files. Collective."""
    mine = [slot for slot in _slots(planned) if slot.owner == ranks.rank]
    shards = _Shards(partial, mine)

    def write_one(entry: StateTensor, tensor: torch.Tensor) -> None:
        shards.write(planned[entry.name, entry.key], tensor)

    @disk_errors(partial, _size(mine))
    def write() -> dict[str, FileRecord]:
        try:
            read_all(entries, write_one)
            return shards.finish()
        finally:
            shards.abandon()

    written = ranks.on_each(write)
    writers = {name: rank for rank, records in enumerate(written) for name in records}
    found = {name: written[rank][name] for name, rank in writers.items()}
    spread(partial, found, writers, ranks)
    return found


class _Shards:
    """The files that this rank writes, each opened when its first tensor comes.

    A thread writes one tensor while the next is gathered: no more than two are whole.
    """

    def __init__(self, folder: Path, slots: Sequence[Slot]) -> None:
        self._folder, self._slots = folder, slots
        self._writers: dict[str, TensorWriter] = {}
        self._thread = ThreadPoolExecutor(1)
        self._last: Future[None] | None = None

    def write(self, slots: Sequence[Slot], tensor: torch.Tensor) -> None:
        """Begin to write a tensor. Waits for the one before, and raises its error."""
        self._wait()
        self._last = self._thread.submit(self._write, slots, tensor)

    def _wait(self) -> None:
        last, self._last = self._last, None
        if last is not None:
            last.result()

    def _write(self, slots: Sequence[Slot], tensor: torch.Tensor) -> None:
        for slot in slots:
            if slot.file not in self._writers:
                types = {other.name: other.type for other in self._slots if other.file == slot.file}
                self._writers[slot.file] = TensorWriter(self._folder / slot.file, types)
            faults.at("shard")
            self._writers[slot.file].write(slot.name, tensor)

    def finish(self) -> dict[str, FileRecord]:
        self._wait()
        if missing := {slot.file for slot in self._slots} - set(self._writers):
            names = ", ".join(sorted(missing))
            raise ValueError(f"no state tensor of {names} was read on its owner")
        faults.at("flush")
        return {name: writer.finish() for name, writer in self._writers.items()}

    def abandon(self) -> None:
        self._thread.shutdown()
        for writer in self._writers.values():
            writer.abandon()


def read_all(
    entries: Sequence[StateTensor], write: Callable[[StateTensor, torch.Tensor], None]
) -> None:
    """Read every state tensor, and write it at once; a failure is raised at the end.

    Reading is collective: a rank that stopped because its disk is full would make the others hang.
    """
    failure: Exception | None = None
    for entry in entries:
        try:
            tensor = entry.read()
            if tensor is not None and failure is None:
                write(entry, tensor)
        except Exception as error:
            failure = failure or error
    if failure is not None:
        raise failure


def _joined(
    partial: Path, form: ModelForm, resumable: bool, records: Mapping[str, FileRecord]
) -> dict[str, FileRecord]:
    """Join the model's files into one, if that is their form; return the records of all files."""
    stem = model_stem(form, resumable)
    parts = sorted(name for name in records if name.startswith(f"{stem}-"))
    if not parts or not form.joined:
        return dict(records)
    types = {name: kind for part in parts for name, kind in read_types(partial / part).items()}
    whole = f"{stem}.safetensors"
    writer = TensorWriter(partial / whole, types)
    for part in parts:
        with safe_open(partial / part, "pt") as file:
            for name in read_types(partial / part):
                writer.write(name, file.get_tensor(name))
        (partial / part).unlink()
    others = {name: record for name, record in records.items() if name not in parts}
    return others | {whole: writer.finish()}


def _write_others(
    partial: Path,
    model: Path,
    write: WriteModelFiles,
    records: Mapping[str, FileRecord],
    ranks: Ranks,
) -> None:
    """Write the model's files without tensors, on rank 0: libraries of other ranks may differ."""

    @disk_errors(partial)
    def written() -> dict[str, FileRecord]:
        write(model)
        if len(set(ranks.keepers)) < 2:
            return {}
        paths = [path for path in model.rglob("*") if path.is_file()]
        names = {path.relative_to(partial).as_posix(): path for path in paths}
        return {name: hash_file(path) for name, path in names.items() if name not in records}

    others = ranks.on_first(written)
    spread(partial, others, dict.fromkeys(others, 0), ranks)


def _seal(partial: Path, planned: SavePlan, records: Mapping[str, FileRecord]) -> None:
    """Write the indexes, and the manifest last."""
    for name, index in indexes([slot for slot in _slots(planned) if slot.file in records]).items():
        (partial / name).write_bytes(to_json(index))
    faults.at("manifest")
    write_manifest(partial, records)


@contextmanager
def _removed_on_error(partial: Path, ranks: Ranks) -> Iterator[None]:
    """Leave no partial folder behind when the ranks agree that they failed."""
    try:
        yield
    except Exception:
        if ranks.rank == ranks.keeper:
            shutil.rmtree(partial, ignore_errors=True)
        raise


def _slots(planned: SavePlan) -> list[Slot]:
    return [slot for slots in planned.values() for slot in slots]


def _size(slots: Iterable[Slot]) -> int:
    return sum(slot.type.size for slot in slots)
