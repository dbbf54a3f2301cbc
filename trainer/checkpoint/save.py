"""Writing a checkpoint: beside, flushed, agreed by all ranks, manifest last, one rename."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.checkpoint import faults
from trainer.checkpoint.disk import disk_errors, ensure_writable, rename_folder, to_json
from trainer.checkpoint.manifest import DESCRIPTION, write_manifest
from trainer.checkpoint.plan import MODEL, Plan, Slot, indexes, plan
from trainer.checkpoint.safetensors_stream import FileRecord, TensorWriter
from trainer.checkpoint.shelf import DELETING, PARTIAL, point_at, set_aside, step_name, sweep
from trainer.errors import DiskError, Problem
from trainer.ranks import Ranks
from trainer.state import WEIGHT, Piece, RunState

if TYPE_CHECKING:
    import torch

WriteModelFiles = Callable[[Path], object]
"""Writes the config, tokenizer and generation config into a folder; called on rank 0."""


def save(
    folder: Path,
    state: RunState,
    pieces: Sequence[Piece],
    description: Mapping[str, Any],
    write_model_files: WriteModelFiles,
    ranks: Ranks,
    weight_dtype: torch.dtype | None = None,
) -> Path:
    """Publish the checkpoint of `state.step` in `folder`, which all ranks share; returns its path. Collective.

    `description` is what `trainer.json` holds beside the position. `weight_dtype` is that of the model's files
    (None: as the weights are); the exact weights are then kept with the optimizer's state.
    Raises DiskError on every rank, with nothing published, if it can't be written or that step is there already.
    """
    final = folder / step_name(state.step)
    partial = final.with_name(final.name + PARTIAL)
    places = plan(pieces, weight_dtype, resumable=True)

    @disk_errors(folder)
    def prepare() -> bytes:
        _refuse_published(final)
        sweep(folder)
        text = to_json({**description, "position": asdict(state)})
        _make(partial, places)
        return text

    @disk_errors(partial)
    def publish(records: Mapping[str, FileRecord], text: bytes) -> None:
        (partial / DESCRIPTION).write_bytes(text)
        _seal(partial, partial / MODEL, places, records, write_model_files)
        faults.at("rename")
        rename_folder(partial, final)
        faults.at("latest")
        point_at(final)

    faults.at("before")
    with _removed_on_error(partial, ranks):
        text = ranks.on_first(prepare)
        records = _write_shards(partial, places, pieces, ranks)
        ranks.on_first(lambda: publish(records, text))
    return final


def export(
    folder: Path,
    pieces: Sequence[Piece],
    write_model_files: WriteModelFiles,
    ranks: Ranks,
    weight_dtype: torch.dtype | None = None,
) -> Path:
    """Write the weights alone as a Hugging Face model folder. Collective.

    An older one is replaced only by a whole one. Raises DiskError on every rank.
    """
    partial = folder.with_name(folder.name + PARTIAL)
    weights = [piece for piece in pieces if piece.part == WEIGHT]
    places = plan(weights, weight_dtype, resumable=False)

    @disk_errors(partial)
    def prepare() -> None:
        shutil.rmtree(partial, ignore_errors=True)
        _make(partial, places)

    @disk_errors(partial)
    def publish(records: Mapping[str, FileRecord]) -> None:
        _seal(partial, partial, places, records, write_model_files)
        if folder.exists():
            set_aside(folder)
        rename_folder(partial, folder)
        shutil.rmtree(folder.with_name(folder.name + DELETING), ignore_errors=True)

    with _removed_on_error(partial, ranks):
        ranks.on_first(prepare)
        records = _write_shards(partial, places, weights, ranks)
        ranks.on_first(lambda: publish(records))
    return folder


def _refuse_published(final: Path) -> None:
    if final.exists():
        mend = "Resume from it, or choose another run name"
        raise DiskError(Problem(str(final), "already published", "a step that was not saved before", mend))


def _make(partial: Path, places: Plan) -> None:
    """An empty folder on a disk that has room for what will be in it."""
    ensure_writable(partial.parent, _size(_slots(places)))
    partial.mkdir()
    for folder in {(partial / slot.file).parent for slot in _slots(places)}:
        folder.mkdir(exist_ok=True)


def _write_shards(partial: Path, places: Plan, pieces: Sequence[Piece], ranks: Ranks) -> dict[str, FileRecord]:
    """Every rank writes what it owns; returns the records of all files, on every rank."""
    mine = [slot for slot in _slots(places) if slot.owner == ranks.rank]
    shards = _Shards(partial, mine)

    @disk_errors(partial, _size(mine))
    def write() -> dict[str, FileRecord]:
        try:
            read_all(pieces, lambda piece, tensor: shards.write(places[piece.name, piece.part], tensor))
            return shards.finish()
        finally:
            shards.abandon()

    return {name: record for records in ranks.on_each(write) for name, record in records.items()}


class _Shards:
    """The files that this rank writes, each opened when its first tensor comes.

    One tensor is written, by a thread, while the next is gathered: no more than two are whole.
    """

    def __init__(self, folder: Path, slots: Sequence[Slot]) -> None:
        self._folder = folder
        self._slots = slots
        self._writers: dict[str, TensorWriter] = {}
        self._thread = ThreadPoolExecutor(1)
        self._last: Future[None] | None = None

    def write(self, slots: Sequence[Slot], tensor: torch.Tensor) -> None:
        """Begin to write a tensor. Waits for the one before, and raises what that one raised."""
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
            raise ValueError(f"no piece of {', '.join(sorted(missing))} was read on its owner")
        faults.at("flush")
        return {name: writer.finish() for name, writer in self._writers.items()}

    def abandon(self) -> None:
        self._thread.shutdown()
        for writer in self._writers.values():
            writer.abandon()


def read_all(pieces: Sequence[Piece], write: Callable[[Piece, torch.Tensor], None]) -> None:
    """Read every piece, and write it where it came. Goes on reading after a failure, which is raised at the end.

    Reading is collective: a rank that stopped because its disk is full would leave the others waiting for ever.
    """
    failure: Exception | None = None
    for piece in pieces:
        try:
            tensor = piece.read()
            if tensor is not None and failure is None:
                write(piece, tensor)
        except Exception as error:
            failure = failure or error
    if failure is not None:
        raise failure


def _seal(
    partial: Path, model: Path, places: Plan, records: Mapping[str, FileRecord], write_model_files: WriteModelFiles
) -> None:
    """Write what is not a tensor; the manifest comes last."""
    write_model_files(model)
    for name, index in indexes(_slots(places)).items():
        (partial / name).write_bytes(to_json(index))
    faults.at("manifest")
    write_manifest(partial, records)


@contextmanager
def _removed_on_error(partial: Path, ranks: Ranks) -> Iterator[None]:
    """Leave no partial folder behind when the ranks agree that they failed."""
    try:
        yield
    except Exception:
        if ranks.first:
            shutil.rmtree(partial, ignore_errors=True)
        raise


def _slots(places: Plan) -> list[Slot]:
    return [slot for slots in places.values() for slot in slots]


def _size(slots: Iterable[Slot]) -> int:
    return sum(slot.type.size for slot in slots)
