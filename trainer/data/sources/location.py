"""Where the documents are: files here or at an address, a hub id, or the embedded corpus."""

from __future__ import annotations

import glob
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.data.sources.formats import (
    FORMATS,
    OFTEN,
    SUFFIXES,
    Report,
    Row,
    reader_of,
    short,
    suffix_of,
)
from trainer.errors import DataError, Problem, refused
from trainer.models.door import check_name, may_be_on_hub
from trainer.storage import parse_json, read_file

if TYPE_CHECKING:
    from trainer.config.sections.model_and_data import DataSection
    from trainer.config.sections.trainer import TrainerSection

_GLOB = frozenset("*?[")
WANTED = "a file, a folder, a glob or a hub id"
"""The accepted values of `trainer.data.path`, as error messages list them."""


@dataclass(frozen=True)
class Location:
    """The place of the documents: files of one format, a hub id, or else the embedded corpus."""

    format: str = ""
    files: tuple[Path, ...] = ()
    hub: str = ""

    def __str__(self) -> str:
        if not self.files:
            return self.hub or "the embedded corpus"
        more = f" and {len(self.files) - 1} more files" if len(self.files) > 1 else ""
        return f"{self.files[0]}{more}"


def locate(path: str | Sequence[str] | None, format: str = "auto") -> Location:
    """Find what `trainer.data.path` names: a file, folder, glob, list of these, hub id, or None.

    Raises DataError if nothing matches, or if the files are of an unknown format or of several.
    """
    if path is None:
        return Location()
    names = [path] if isinstance(path, str) else list(path)
    alone = format == "auto" and len(names) == 1
    if format == "hub" or (alone and may_be_data_on_hub(names[0]) and not _in_folder(names[0])):
        return Location(hub=names[0])
    files = tuple(dict.fromkeys(file for name in names for file in _matching(name, format)))
    if not files:
        raise DataError(Problem("trainer.data", "an empty list of paths", WANTED))
    formats = {file: format_of(file) if format == "auto" else format for file in files}
    if len(set(formats.values())) > 1:
        examples = {kind: file for file, kind in reversed(formats.items())}
        actual = " and ".join(f"{file} ({kind})" for kind, file in sorted(examples.items()))
        hint = "Name one with a glob such as *.jsonl"
        raise DataError(Problem(", ".join(names), actual, "files of one format", hint))
    return Location(formats[files[0]], files)


def check_paths(section: TrainerSection) -> None:
    """Check that the text files and models that the config names may exist; needs no torch.

    Raises DataError, ConfigError.
    """
    from trainer.config.own_keys import honoured  # `train --help` reads no config

    data = section.data
    reads_text = honoured("trainer.data.records", section.task)
    if not reads_text:
        return
    if (model := section.model.name_or_path) is not None:
        check_name(model, f"trainer.model.name_or_path: {model}")
    if data.path is None and not data.sources:
        return
    held_out = data.evaluation_path
    paths = held_out.values() if isinstance(held_out, dict) else [held_out]
    for source in data.sources:
        locate(source.path, source.format or data.format)
    for path in (data.path, *paths):
        locate(path, data.format)


def rows_of(
    where: Location, options: DataSection, columns: Sequence[str], progress: Report = lambda _: None
) -> Iterator[Row]:
    """Yield the rows in order, with at least those of the wanted columns that they have.

    Raises DataError at the first row that can't be read.
    """
    if where.hub:
        yield from _hub(where.hub, options, columns, progress)
    sizes = [file.stat().st_size if file.exists() else 0 for file in where.files]
    whole = max(sum(sizes), 1)
    before = 0

    def share_of_all(share: float) -> None:
        progress((before + share * size) / whole)

    for file, size in zip(where.files, sizes, strict=True):
        try:
            yield from reader_of(where.format).read(file, columns, share_of_all)
        except (OSError, EOFError) as error:
            actual = getattr(error, "strerror", None) or str(error)
            raise DataError(Problem(str(file), actual, "a file that can be read")) from error
        before += size


def _hub(
    name: str, options: DataSection, columns: Sequence[str], progress: Report
) -> Iterator[Row]:
    from datasets import load_dataset

    try:
        rows = load_dataset(name, options.name, split=options.split)
    except Exception as error:  # datasets and huggingface_hub raise a dozen kinds
        answer = short(str(error) or type(error).__name__)
        actual = f"no such file or folder, and the hub says: {answer}"
        hint = "Correct path, name or split in trainer.data"
        raise DataError(Problem(name, actual, WANTED, hint)) from error
    wanted = [column for column in columns if column in rows.column_names] or rows.column_names
    for number, row in enumerate(rows.select_columns(wanted)):
        if number % OFTEN == 0:
            progress(number / len(rows))
        yield Row(f"{name}: row {number}", row)


def may_be_data_on_hub(name: str) -> bool:
    """Return True if a name is that of no file here, and may be that of data on the Hub."""
    return may_be_on_hub(name) and suffix_of(name) not in SUFFIXES


def _in_folder(name: str) -> bool:
    """Return True if a name begins with that of a folder here, as "texts/a" does."""
    return "/" in name and Path(name).parent.is_dir()


def _matching(name: str, format: str) -> list[Path]:
    path = Path(name).expanduser()
    if path.is_file():
        return [path]
    if "://" in name:  # before it is copied: of a folder one file alone, for its format
        from trainer.data.sources.remote import listing_of

        there = listing_of(name)
        files = list(map(Path, there.files))
        known = [file for file in files if suffix_of(file.name) in SUFFIXES]
        return (known or files)[:1] if there.folder else files
    if path.is_dir() and (saved := _saved_by_datasets(path)):
        return saved
    if path.is_dir():
        suffixes = tuple(SUFFIXES) if format == "auto" else reader_of(format).suffixes
        shown = [file for file in sorted(path.rglob("*")) if file.is_file() and _shown(file, path)]
        # `format: text` takes every file of a folder, whatever its name
        matching = [file for file in shown if format == "text" or suffix_of(file.name) in suffixes]
        actual = "a folder without data files"
        expected = "a file ending in " + ", ".join(suffixes)
    else:
        matches = map(Path, glob.glob(str(path), recursive=True))
        matching = sorted(file for file in matches if file.is_file())
        actual = "matches no file" if _GLOB & set(name) else "no such file or folder"
        expected = WANTED
    if not matching:
        hint = "Correct the path in trainer.data"
        if may_be_data_on_hub(name):
            hint += ", or set trainer.data.format=hub"
        raise DataError(Problem(name, actual, expected, hint))
    return matching


def _shown(file: Path, folder: Path) -> bool:
    return not any(part.startswith((".", "_")) for part in file.relative_to(folder).parts)


def _saved_by_datasets(folder: Path) -> list[Path]:
    """List the files of a folder that `Dataset.save_to_disk` wrote; empty for any other folder."""
    parts = folder / "dataset_dict.json"
    if parts.is_file() and (splits := _listed(parts, lambda content: content["splits"])):
        actual = f"a folder of the parts {', '.join(splits)}"
        hint = f"Name one of them, such as {folder / splits[0]}"
        raise DataError(Problem(str(folder), actual, "one part", hint))
    state = folder / "state.json"
    if not state.is_file() or not any(folder.glob("*.arrow")):
        return []
    names = _listed(state, lambda content: [part["filename"] for part in content["_data_files"]])
    return [folder / name for name in names]


def _listed(path: Path, names_in: Callable[[Any], Iterable[str]]) -> list[str]:
    """Read the names that a JSON file of `datasets` lists. Raises DataError if it is damaged."""
    expected = "what Dataset.save_to_disk writes"
    hint = "Save the data set again, or name its files in trainer.data.path"
    kinds = (OSError, ValueError, LookupError, TypeError)
    with refused(str(path), expected, *kinds, named=True, hint=hint, raises=DataError):
        names = list(names_in(parse_json(read_file(path))))
        if odd := [name for name in names if not isinstance(name, str) or Path(name).name != name]:
            raise ValueError(f"{odd[0]!r} in place of a name in this folder")
    return names


def format_of(file: Path) -> str:
    suffix = suffix_of(file.name)
    if suffix not in SUFFIXES:
        hint = f"Set trainer.data.format to one of {', '.join(FORMATS)}"
        actual = f'a file ending in "{suffix}"' if suffix else "a file without an ending"
        raise DataError(Problem(str(file), actual, "one of " + ", ".join(SUFFIXES), hint))
    return SUFFIXES[suffix]
