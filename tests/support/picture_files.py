"""Labelled images in the formats of the loaders: IDX, CIFAR's pickles, PNGs, parquet."""

from __future__ import annotations

import hashlib
import io
import pickle
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image


def pixels(count: int, *shape: int, classes: int = 10) -> tuple[np.ndarray, list[int]]:
    """Return images with a bright row or column for each class, in noise; and the classes."""
    rng = np.random.default_rng(0)
    result = rng.integers(0, 60, (count, *shape), dtype=np.uint8)
    labels = [index % classes for index in range(count)]
    for image, label in zip(result, labels, strict=True):
        image[label % shape[0]] = 255
    return result, labels


def write_idx(root: Path, kind: str, count: int = 40) -> None:
    """Write files like MNIST's, unpacked: a magic number, sizes, bytes."""
    folder = root / kind / "raw"
    folder.mkdir(parents=True)
    for part in ("train", "t10k"):
        images, labels = pixels(count, 28, 28)
        head = struct.pack(">IIII", 0x803, count, 28, 28)
        (folder / f"{part}-images-idx3-ubyte").write_bytes(head + images.tobytes())
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(
            struct.pack(">II", 0x801, count) + bytes(labels)
        )


def write_fashion_mnist(root: Path, count: int = 1000) -> None:
    """Write images of which every third has another label, so that none is learned whole."""
    write_idx(root, "FashionMNIST", count)
    for file in (root / "FashionMNIST" / "raw").glob("*labels*"):
        content = bytearray(file.read_bytes())
        for index in range(8, len(content), 3):
            content[index] = (7 * index) % 10
        file.write_bytes(content)


def write_cifar(root: Path, kind: Any, count: int = 20) -> dict[str, Any]:
    """Write CIFAR10 or CIFAR100; return the class's attributes with these files' checksums."""
    folder = root / kind.base_folder
    folder.mkdir(parents=True)
    key = "labels" if kind.__name__ == "CIFAR10" else "fine_labels"
    classes = 10 if key == "labels" else 100

    def write(name: str, content: Any) -> str:
        (folder / name).write_bytes(pickle.dumps(content))
        return hashlib.md5((folder / name).read_bytes()).hexdigest()

    sums: dict[str, Any] = {}
    for part in ("train_list", "test_list"):
        sums[part] = []
        for name, _ in getattr(kind, part):
            images, labels = pixels(count, 32, 32, 3, classes=classes)
            data = images.transpose(0, 3, 1, 2).reshape(count, -1)
            sums[part].append([name, write(name, {"data": data, key: labels})])
    names = [f"class {index}" for index in range(classes)]
    sums["meta"] = kind.meta | {"md5": write(kind.meta["filename"], {kind.meta["key"]: names})}
    return sums


def write_folder(
    root: Path, count: int = 12, size: tuple[int, int] = (10, 8), mode: str = "RGB"
) -> Path:
    """Write a folder of PNGs for each of three classes; `size` is height and width."""
    images, _ = pixels(count, *size, 3)
    for index, image in enumerate(images):
        folder = root / ("ant", "bee", "cat")[index % 3]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).convert(mode).save(folder / f"{index:03}.png")
    return root


def write_parquet(path: Path, labels: list[Any], size: tuple[int, int] = (8, 8)) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    images, _ = pixels(len(labels), *size, 3)
    rows = []
    for image in images:
        file = io.BytesIO()
        Image.fromarray(image).save(file, "PNG")
        rows.append({"bytes": file.getvalue(), "path": None})
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    pq.write_table(pa.table({"image": pa.array(rows, kind), "label": labels}), path)
    return path


if __name__ == "__main__":
    write_fashion_mnist(Path(sys.argv[1]))
