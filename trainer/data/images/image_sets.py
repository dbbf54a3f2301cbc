"""Sources of labelled images: data sets by name, folders of classes, tables."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from filelock import FileLock

from trainer.config import DataSection, ImagesSection
from trainer.data.dataset import check_data_set
from trainer.data.sources.location import locate
from trainer.errors import DataError, Problem, listed, refused

if TYPE_CHECKING:
    from datasets import Dataset

Picture = Any
"""An image: Pillow's, or a tensor [channels, height, width]."""
PATIENCE = 20.0
"""The seconds without progress after which a download fails."""


@dataclass(frozen=True)
class Labelled:
    """Images with their classes, by number."""

    classes: tuple[str, ...]
    labels: Sequence[int] | None
    """The class of each image; None if only reading the image tells it."""
    count: int
    load: Callable[[int], tuple[Picture, Any]]
    """Returns the image (Pillow's, or a tensor [channels, height, width]) and its label."""
    name: Callable[[int], str]
    """Names an image for the user: the file, or the table and the row."""


def open_set(
    path: str | list[str], data: DataSection, images: ImagesSection, cache: Path, train: bool
) -> Labelled:
    """Open what `trainer.data.path` names. Raises DataError if it is missing or has no classes."""
    one = path if isinstance(path, str) else path[0]
    if one == "digits":
        return _digits()
    if one in TORCHVISION:
        return _torchvision(one, Path(images.root) if images.root else cache / "images", train)
    folder = Path(one)
    if data.format == "auto" and folder.is_dir() and not [*folder.rglob("*.parquet")]:
        if not (folder / "state.json").exists():
            return _folder(folder)
        from datasets import load_from_disk

        return _rows(load_from_disk(str(folder)), str(folder), images)
    return _table(path, data, images)


def _digits() -> Labelled:
    """Load scikit-learn's 1,797 handwritten digits, 8 x 8, with values from 0 to 16."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        actual = "digits without the package scikit-learn"
        hint = "pip install meshloom[digits]"
        expected = "a data set whose package is installed"
        raise DataError(Problem("trainer.data.path", actual, expected, hint)) from None
    from PIL import Image

    digits = load_digits()
    pixels = (digits.images * 15).astype(np.uint8)
    labels = [int(label) for label in digits.target]
    classes = tuple(str(name) for name in digits.target_names)
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
PARTS = ("train", "val", "valid", "validation", "test")
"""Names of folders that are parts of a data set, not classes."""
KNOWN = "digits, " + ", ".join(TORCHVISION) + ", a folder of classes, parquet files or a hub id"
"""The accepted values of `trainer.data.path`, as error messages list them."""


def _torchvision(name: str, root: Path, train: bool) -> Labelled:
    from torchvision import datasets

    kind = getattr(datasets, TORCHVISION[name])
    start = "no files of it, and none came by download: "
    place = f"{name}: {root}"
    there = f"Place them there (from {_sources(kind)})"
    hint = f"{there}, or set trainer.images.root to where they are"
    expected = _files(kind)
    # whatever a network, a server or a wrong file raises
    with refused(place, expected, start=start, hint=hint, raises=DataError), _alone(root):
        try:
            dataset = kind(root, train=train, download=False)
        except RuntimeError:  # not there yet
            dataset = kind(root, train=train, download=True)
    labels = [int(label) for label in dataset.targets]
    where = f"{name}, {'training' if train else 'test'} part: image"
    named = lambda index: f"{where} {index}"  # noqa: E731
    return Labelled(tuple(dataset.classes), labels, len(dataset), dataset.__getitem__, named)


@contextmanager
def _alone(root: Path) -> Iterator[None]:
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
    names = [name for name, *_ in (*kind.train_list, *kind.test_list)]
    files = ", ".join([*names, kind.meta["filename"]])
    return f"{kind.filename}, or {kind.base_folder}/ with {files}"


def _sources(kind: Any) -> str:
    return kind.mirrors[0] if hasattr(kind, "mirrors") else kind.url  # type: ignore[no-any-return]


def _folder(folder: Path) -> Labelled:
    """Open a folder with a folder for each class; the classes are numbered in sorted order."""
    from PIL import Image
    from torchvision.datasets.folder import IMG_EXTENSIONS, make_dataset

    inside = [path for path in folder.iterdir() if path.is_dir()]
    classes = tuple(sorted(path.name for path in inside if not path.name.startswith(".")))
    parts = [name for name in classes if name.lower() in PARTS]
    expected = "a folder for each class, with its images in it"
    if not classes:
        images = sum(path.suffix.lower() in IMG_EXTENSIONS for path in folder.iterdir())
        actual = f"a folder without classes: no folders in it, {images} images"
        hint = "Put each image into a folder named like its class"
        raise DataError(Problem(str(folder), actual, expected, hint))
    if len(parts) == len(classes):
        actual = f"the parts of a data set: {', '.join(parts)}"
        hint = f"Set trainer.data.path={folder / parts[0]}"
        hint += f" and trainer.data.evaluation_path={folder / parts[1]}" if len(parts) > 1 else ""
        raise DataError(Problem(str(folder), actual, expected, hint))
    numbers = {name: label for label, name in enumerate(classes)}
    files = make_dataset(folder, numbers, IMG_EXTENSIONS, allow_empty=True)
    labels = [label for _, label in files]
    if empty := set(numbers.values()).difference(labels):
        place = folder / classes[min(empty)]
        endings = ", ".join(IMG_EXTENSIONS)
        expected = f"files ending in {endings}"
        raise DataError(Problem(str(place), "a class without images", expected))
    load = lambda index: (Image.open(files[index][0]), labels[index])  # noqa: E731
    return Labelled(classes, labels, len(files), load, lambda index: files[index][0])


def _table(path: str | list[str], data: DataSection, images: ImagesSection) -> Labelled:
    from datasets import load_dataset

    location = locate(path, data.format)
    start = "can't be opened: "
    hint = "Correct path, name or split in trainer.data"
    # datasets, pyarrow and huggingface_hub raise a dozen kinds
    with refused(str(location), KNOWN, start=start, hint=hint, raises=DataError):
        if location.hub:
            rows = load_dataset(location.hub, data.name, split=data.split)
        else:
            files = [str(file) for file in location.files]
            rows = load_dataset(location.format, data_files=files, split="train")
    return _rows(rows, str(location), images)


def _rows(rows: Dataset, table: str, images: ImagesSection) -> Labelled:
    """Open a table of `datasets` with an image and a label in each row."""
    from datasets import Image

    for key in ("image_column", "label_column"):
        if (column := getattr(images, key)) not in rows.column_names:
            actual = f'no column "{column}"'
            expected = "one of " + ", ".join(f'"{name}"' for name in rows.column_names)
            raise DataError(Problem(table, actual, expected, f"Set trainer.images.{key}"))
    given = list(rows[images.label_column])
    names = getattr(rows.features[images.label_column], "names", None)
    kind = str if given and isinstance(given[0], str) else int
    if strange := [index for index, label in enumerate(given) if not isinstance(label, kind)]:
        label = given[strange[0]]
        actual = f'column "{images.label_column}" holds {type(label).__name__} {label!r}'[:100]
        expected = "numbers from 0, or names, in every row"
        raise DataError(Problem(f"{table}: row {strange[0]}", actual, expected))
    if kind is str:
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
    """Wrap a user's data set of pairs (image, label). Raises DataError if it names no classes."""
    check_data_set("data", data)
    labels = getattr(data, "targets", None)
    labels = None if labels is None else [int(label) for label in labels]
    names = getattr(data, "classes", None)
    if names is None and classes is None and labels is None:
        actual = "neither `classes` nor `targets`"
        hint = "Set trainer.images.classes to their number"
        raise DataError(Problem("data", actual, "a data set that says what its classes are", hint))
    names = names or [str(index) for index in range(classes or max(labels or [0]) + 1)]
    own = tuple(str(name) for name in names)
    return Labelled(own, labels, len(data), data.__getitem__, lambda index: f"data: sample {index}")


def check_labels(samples: Labelled) -> None:
    """Raise DataError if there are no images, or for a label that is not a class."""
    if not samples.count:
        raise DataError(Problem("trainer.data.path", "no images", "at least one"))
    last = len(samples.classes) - 1
    strange = [(i, label) for i, label in enumerate(samples.labels or ()) if not 0 <= label <= last]
    if strange:
        actual = listed([f"{samples.name(index)} has label {label}" for index, label in strange], 3)
        raise DataError(Problem("trainer.data", actual, f"labels from 0 to {last}"))
