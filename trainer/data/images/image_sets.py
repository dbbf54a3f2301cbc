"""Sources of labelled images: data sets by name, a folder with a folder for each class, tables with
a column.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock

from trainer.config import DataSection, ImagesSection
from trainer.data.formats import locate
from trainer.errors import DataError, Problem, first_line, listed

PATIENCE = 20.0
"""The seconds without progress after which a download fails."""


@dataclass(frozen=True)
class Labelled:
    """Images with their classes, by number."""

    classes: tuple[str, ...]
    labels: Sequence[int] | None
    """The class of each image; None if only reading the image tells it."""
    count: int
    load: Callable[[int], tuple[Any, Any]]
    """Returns the image (Pillow's, or a tensor [channels, height, width]) and its label; raises the
    reader's errors.
    """
    name: Callable[[int], str]
    """Names an image for the user: the file, or the table and the row."""


def open_set(
    path: str | list[str], data: DataSection, images: ImagesSection, cache: Path, train: bool
) -> Labelled:
    """Open what `trainer.data.path` names. Raises DataError if it does not exist or has no
    classes.
    """
    one = path if isinstance(path, str) else path[0]
    if one == "digits":
        return _digits()
    if one in TORCHVISION:
        return _torchvision(one, Path(images.root) if images.root else cache / "images", train)
    if (
        data.format == "auto"
        and (folder := Path(one)).is_dir()
        and not [*folder.rglob("*.parquet")]
    ):
        return _saved(folder, data, images) if (folder / "state.json").exists() else _folder(folder)
    return _table(path, data, images)


def _digits() -> Labelled:
    """Load scikit-learn's 1,797 handwritten digits, 8 x 8, with values from 0 to 16."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        seen, mend = "digits without the package scikit-learn", "pip install meshloom[digits]"
        raise DataError(
            Problem("trainer.data.path", seen, "a data set whose package is installed", mend)
        ) from None
    from PIL import Image

    found = load_digits()
    pixels = (found.images * 15).astype(np.uint8)
    labels = [int(label) for label in found.target]
    classes = tuple(str(name) for name in found.target_names)
    load = lambda index: (Image.fromarray(pixels[index]), labels[index])  # noqa: E731
    return Labelled(classes, labels, len(labels), load, lambda index: f"digits: image {index}")


TORCHVISION = {
    "mnist": "MNIST",
    "fashion_mnist": "FashionMNIST",
    "cifar10": "CIFAR10",
    "cifar100": "CIFAR100",
}
"""Name -> torchvision's class, for data sets that have a part for evaluation."""
SHAPES: dict[str, tuple[int, str, tuple[int, int]]] = {
    "digits": (10, "L", (8, 8)),
    "mnist": (10, "L", (28, 28)),
    "fashion_mnist": (10, "L", (28, 28)),
    "cifar10": (10, "RGB", (32, 32)),
    "cifar100": (100, "RGB", (32, 32)),
}
"""Name -> number of classes, mode and size of a data set's images."""
KNOWN = "digits, " + ", ".join(TORCHVISION) + ", a folder of classes, parquet files or a hub id"
"""The accepted values of `trainer.data.path`, as error messages list them."""


def has_own_evaluation(path: str | list[str]) -> bool:
    return path in list(TORCHVISION)


def _torchvision(name: str, root: Path, train: bool) -> Labelled:
    from torchvision import datasets

    kind = getattr(datasets, TORCHVISION[name])
    try:
        with _alone(root):
            try:
                found = kind(root, train=train, download=False)
            except RuntimeError:  # not there yet
                found = kind(root, train=train, download=True)
    except Exception as error:  # whatever a network, a server or a wrong file raises
        seen = f"no files of it, and none came by download: {first_line(error)}"
        mend = (
            f"Place them there (from {_sources(kind)}), or set trainer.images.root to where "
            "they are"
        )
        raise DataError(Problem(f"{name}: {root}", seen, _files(kind), mend)) from error
    labels = [int(label) for label in found.targets]
    where = f"{name}, {'training' if train else 'test'} part: image"
    return Labelled(
        tuple(found.classes),
        labels,
        len(found),
        found.__getitem__,
        lambda index: f"{where} {index}",
    )


@contextmanager
def _alone(root: Path) -> Any:
    """Look and download in one process at a time; a download without progress fails."""
    root.mkdir(parents=True, exist_ok=True)
    before = socket.getdefaulttimeout()
    with FileLock(root / ".lock"):
        socket.setdefaulttimeout(PATIENCE)
        try:
            yield
        finally:
            socket.setdefaulttimeout(before)


def _files(kind: Any) -> str:
    if hasattr(kind, "resources"):
        return f"{kind.__name__}/raw/ with " + ", ".join(name for name, _ in kind.resources)
    return f"{kind.filename}, or {kind.base_folder}/ with " + ", ".join(
        name for name, *_ in (*kind.train_list, *kind.test_list, [kind.meta["filename"]])
    )


def _sources(kind: Any) -> str:
    return kind.mirrors[0] if hasattr(kind, "mirrors") else kind.url  # type: ignore[no-any-return]


def _folder(folder: Path) -> Labelled:
    """Open a folder with a folder for each class, sorted, so that classes have the same numbers
    everywhere.
    """
    from PIL import Image
    from torchvision.datasets.folder import IMG_EXTENSIONS, make_dataset

    inside = sorted(
        path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")
    )
    parts = [
        path.name
        for path in inside
        if path.name.lower() in ("train", "val", "valid", "validation", "test")
    ]
    expected = "a folder for each class, with its images in it"
    if not inside:
        found = sum(path.suffix.lower() in IMG_EXTENSIONS for path in folder.iterdir())
        seen = f"a folder without classes: no folders in it, {found} images"
        raise DataError(
            Problem(
                str(folder), seen, expected, "Put each image into a folder named like its class"
            )
        )
    if len(parts) == len(inside):
        mend = f"Set trainer.data.path={folder / parts[0]}"
        mend += f" and trainer.data.evaluation_path={folder / parts[1]}" if len(parts) > 1 else ""
        raise DataError(
            Problem(str(folder), f"the parts of a data set: {', '.join(parts)}", expected, mend)
        )
    classes = tuple(path.name for path in inside)
    numbers = {name: label for label, name in enumerate(classes)}
    files = make_dataset(folder, numbers, IMG_EXTENSIONS, allow_empty=True)
    labels = [label for _, label in files]
    if empty := set(numbers.values()).difference(labels):
        endings = ", ".join(IMG_EXTENSIONS)
        raise DataError(
            Problem(str(inside[min(empty)]), "a class without images", f"files ending in {endings}")
        )
    load = lambda index: (Image.open(files[index][0]), labels[index])  # noqa: E731
    return Labelled(classes, labels, len(files), load, lambda index: files[index][0])


def _saved(folder: Path, data: DataSection, images: ImagesSection) -> Labelled:
    from datasets import load_from_disk

    return _rows(load_from_disk(str(folder)), str(folder), images)


def _table(path: str | list[str], data: DataSection, images: ImagesSection) -> Labelled:
    from datasets import load_dataset

    location = locate(path, data.format)
    try:
        if location.hub:
            rows = load_dataset(location.hub, data.name, split=data.split)
        else:
            files = [str(file) for file in location.files]
            rows = load_dataset(location.format, data_files=files, split="train")
    except Exception as error:  # datasets, pyarrow and huggingface_hub raise a dozen kinds
        seen = f"can't be opened: {first_line(error)}"
        raise DataError(
            Problem(str(location), seen, KNOWN, "Mend path, name or split in trainer.data")
        ) from error
    return _rows(rows, str(location), images)


def _rows(rows: Any, table: str, images: ImagesSection) -> Labelled:
    """Open a table of `datasets` with an image and a label in each row."""
    from datasets import Image

    for key in ("image_column", "label_column"):
        if (column := getattr(images, key)) not in rows.column_names:
            seen = f'no column "{column}"'
            expected = "one of " + ", ".join(f'"{name}"' for name in rows.column_names)
            raise DataError(Problem(table, seen, expected, f"Set trainer.images.{key}"))
    given = list(rows[images.label_column])
    names = getattr(rows.features[images.label_column], "names", None)
    strange = [index for index, label in enumerate(given) if not isinstance(label, int | str)]
    if strange or len({type(label) for label in given}) > 1:
        row = (
            strange[0]
            if strange
            else next(i for i, label in enumerate(given) if type(label) is not type(given[0]))
        )
        seen = f'column "{images.label_column}" holds {type(given[row]).__name__} {given[row]!r}'[
            :100
        ]
        raise DataError(
            Problem(f"{table}: row {row}", seen, "numbers from 0, or names, in every row")
        )
    if given and isinstance(given[0], str):
        names = sorted(set(given))
        number = {name: index for index, name in enumerate(names)}
        labels = [number[label] for label in given]
    else:
        labels = given
        names = names or [str(index) for index in range(max(labels, default=-1) + 1)]
    rows = rows.cast_column(images.image_column, Image())
    load = lambda index: (rows[index][images.image_column], labels[index])  # noqa: E731
    return Labelled(tuple(names), labels, len(labels), load, lambda index: f"{table}: row {index}")


def handed_in(data: Any, classes: int | None) -> Labelled:
    """Wrap an own data set of pairs (image, label). Raises DataError if the number of classes is
    unknown.
    """
    if not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        raise DataError(
            Problem("data", type(data).__name__, "an object with __len__ and __getitem__")
        )
    labels = getattr(data, "targets", None)
    labels = None if labels is None else [int(label) for label in labels]
    names = getattr(data, "classes", None)
    if names is None and classes is None and labels is None:
        seen, mend = "neither `classes` nor `targets`", "Set trainer.images.classes to their number"
        raise DataError(Problem("data", seen, "a data set that says what its classes are", mend))
    names = names or [str(index) for index in range(classes or max(labels or [0]) + 1)]
    own = tuple(str(name) for name in names)
    return Labelled(own, labels, len(data), data.__getitem__, lambda index: f"data: sample {index}")


def check_labels(found: Labelled) -> None:
    """Raise DataError if there are no images, or for a label that is not a class."""
    if not found.count:
        raise DataError(Problem("trainer.data.path", "no images", "at least one"))
    strange = [
        i for i, label in enumerate(found.labels or ()) if not 0 <= label < len(found.classes)
    ]
    if strange and found.labels is not None:
        seen = listed(
            [f"{found.name(index)} has label {found.labels[index]}" for index in strange], 3
        )
        raise DataError(Problem("trainer.data", seen, f"labels from 0 to {len(found.classes) - 1}"))
