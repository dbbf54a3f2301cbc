"""Writing a checkpoint: to an unfinished folder, flushed, its manifest last, then renamed."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from trainer.checkpoint import faults, parts_file, slots
from trainer.checkpoint import safetensors_stream as stream
from trainer.checkpoint.directory import DELETING, LATEST, set_aside, step_name, sweep
from trainer.checkpoint.file_records import FileRecord, Hashed, Records, Span, span
from trainer.checkpoint.folders import PARTIAL, removed_on_error, spread
from trainer.checkpoint.manifest import DESCRIPTION, hash_file, write_manifest
from trainer.checkpoint.safetensors_stream import SharedFile
from trainer.checkpoint.slots import MODEL, PLAIN, FilePlan, ModelForm, SavePlan
from trainer.distributed.ranks import Ranks
from trainer.errors import DiskError, Problem
from trainer.state import CARRIED, RunState, StateTensor
from trainer.storage import disk_errors, ensure_writable, rename_folder, replace_file, to_json

WriteModelFiles = Callable[[Path], object]
"""Writes the config, tokenizer and generation config into a folder; called on rank 0."""


@dataclass(frozen=True)
class ModelFolder:
    """How a model's folder is written: its files without tensors, and the form of the others."""

    write_files: WriteModelFiles = lambda folder: None
    form: ModelForm = PLAIN


def save(
    folder: Path,
    state: RunState,
    entries: Sequence[StateTensor],
    description: Mapping[str, object],
    model: ModelFolder,
    ranks: Ranks,
) -> Path:
    """Publish the checkpoint of `state.step`, complete on each machine, in `folder`. Collective.

    Returns its path. `description` is the content of `trainer.json` besides the position. Weights
    that the model's form narrows are kept exactly with the optimizer's state. Raises DiskError on
    every rank if the step is there already or a folder can't be written: that folder then lacks
    the checkpoint, unless only the file `latest` failed. Raises NumericsError for a value that is
    not finite.
    """
    final = folder / step_name(state.step)
    partial = final.with_name(final.name + PARTIAL)
    planned = slots.plan(entries, model.form, resumable=True)

    @disk_errors(folder)
    def prepare() -> None:
        if final.exists():
            hint = "Resume from it, or choose another run name"
            expected = "a step that was not saved before"
            raise DiskError(Problem(str(final), "already published", expected, hint))
        sweep(folder)
        _make(partial, planned)

    @disk_errors(partial)
    def publish(records: Records, text: bytes) -> None:
        (partial / DESCRIPTION).write_bytes(text)
        _seal(partial, planned, records)
        faults.at("rename")
        rename_folder(partial, final)
        faults.at("latest")
        replace_file(folder / LATEST, f"{final.name}\n".encode())

    faults.at("before")
    with removed_on_error(partial, ranks.rank == ranks.node_first):
        record = {"stateless": slots.stateless(entries), "position": asdict(state)}
        text = ranks.on_first(lambda: to_json({**description, **record}))
        ranks.on_node_firsts(prepare)
        records = _write_parts(partial, planned, ranks, model.form.hash)
        _write_others(partial, partial / MODEL, model.write_files, records, ranks)
        ranks.on_node_firsts(lambda: publish(records, text))
    return final


def export(
    folder: Path,
    entries: Sequence[StateTensor],
    model: ModelFolder,
    ranks: Ranks,
) -> Path:
    """Write the weights alone as a Hugging Face model folder. Collective.

    An older folder is replaced only by a complete one. Raises DiskError on every rank, and
    NumericsError for a value that is not finite.
    """
    partial = folder.with_name(folder.name + PARTIAL)
    weights = [entry for entry in entries if entry.key in slots.OF_MODEL]
    planned = slots.plan(weights, model.form, resumable=False)

    @disk_errors(partial)
    def prepare() -> None:
        shutil.rmtree(partial, ignore_errors=True)
        _make(partial, planned)

    @disk_errors(partial)
    def publish(records: Records) -> None:
        _seal(partial, planned, records)
        if folder.exists():
            set_aside(folder)
        rename_folder(partial, folder)
        shutil.rmtree(folder.with_name(folder.name + DELETING), ignore_errors=True)

    with removed_on_error(partial, ranks.rank == ranks.node_first):
        ranks.on_node_firsts(prepare)
        records = _write_parts(partial, planned, ranks, model.form.hash)
        _write_others(partial, partial, model.write_files, records, ranks)
        ranks.on_node_firsts(lambda: publish(records))
    return folder


def _make(partial: Path, planned: SavePlan) -> None:
    """Make a folder of files of the right size, on a disk that has room for their content."""
    ensure_writable(partial.parent, sum(one.size for one in planned.values()))
    partial.mkdir()
    for name, one in planned.items():
        (partial / name).parent.mkdir(exist_ok=True)
        with (partial / name).open("wb") as file:
            file.truncate(one.size)


def _write_parts(
    partial: Path, planned: SavePlan, ranks: Ranks, kind: str
) -> dict[str, FileRecord]:
    """Write each rank's parts; return the files' records on nodes' first ranks. Collective.

    Ranks begin with different files, since a file system does the writes to one file in turn.
    """
    names = sorted(planned)
    first = ranks.rank * len(names) // ranks.world_size

    @disk_errors(partial, sum(one.size for one in planned.values()))
    def write() -> dict[str, list[Hashed]]:
        files: dict[str, SharedFile] = {}
        try:
            with ThreadPoolExecutor(2) as threads:
                for name in (*names[first:], *names[:first]):
                    files[name] = SharedFile(partial / name, threads, kind)
                    _fill(files[name], planned[name], ranks.rank, threads)
            faults.at("flush")
            return {name: files[name].finish() for name in names}
        finally:
            for file in files.values():
                file.close()

    sizes = {name: planned[name].size for name in names}
    records, writers = parts_file.record(partial, sizes, ranks.on_own(write), ranks)
    spread(partial, records, writers, ranks)
    return records


def _fill(file: SharedFile, planned: FilePlan, rank: int, threads: ThreadPoolExecutor) -> None:
    """Write this rank's parts of a file: one is written while the next is copied to the host."""

    def write(spans: Sequence[Span], content: bytes | memoryview) -> None:
        rest = memoryview(content)
        for place in spans:
            faults.at("shard")
            file.write(place, rest[: place.size])
            rest = rest[place.size :]

    beginning = [span(0, len(planned.header))] if rank == planned.owner else []
    last = threads.submit(write, beginning, planned.header)
    for slot in planned.slots:
        for part in slot.entry.parts():
            came = tuple(part.value.shape)
            kind = slot.type
            if part.strides is None and came != kind.shape:
                raise ValueError(f"{slot.name} has shape {came}, but {kind.shape} was planned")
            finite = slot.entry.key != CARRIED
            content = stream.on_host(slot.name, part.value, kind.dtype, finite)
            last.result()
            last = threads.submit(write, stream.spans_of(part, kind, slot.start), content)
    last.result()


def _write_others(
    partial: Path, model: Path, write: WriteModelFiles, records: Records, ranks: Ranks
) -> None:
    """Write the model's files without tensors, on rank 0: other machines' libraries may differ."""

    @disk_errors(partial)
    def written() -> dict[str, FileRecord]:
        write(model)
        if len(set(ranks.node_firsts)) < 2:
            return {}
        paths = [path for path in model.rglob("*") if path.is_file()]
        names = {path.relative_to(partial).as_posix(): path for path in paths}
        return {name: hash_file(path) for name, path in names.items() if name not in records}

    others = ranks.on_first(written)
    spread(partial, others, dict.fromkeys(others, [0]), ranks)


def _seal(partial: Path, planned: SavePlan, records: Records) -> None:
    """Write the indexes, and the manifest last."""
    for name, index in slots.indexes(planned).items():
        (partial / name).write_bytes(to_json(index))
    faults.at("manifest")
    write_manifest(partial, records)
