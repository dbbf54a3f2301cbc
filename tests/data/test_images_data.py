"""Labelled images: every format that is read, augmentations that follow from seed, epoch and
sample, and bad input.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock
from urllib.error import URLError

import numpy as np
import pytest
import torch
from PIL import Image

from tests.support.messages import raises, shows
from tests.support.picture_files import pixels, write_cifar, write_folder, write_idx, write_parquet
from trainer.config.validate import validate
from trainer.data.images.image_samples import ImageData, open_images
from trainer.data.loader import Batching, BatchLoader, evaluation_batches
from trainer.data.order import SampleOrder
from trainer.distributed.ranks import ALONE
from trainer.errors import DataError
from trainer.recipes.images.task import ImageClassification
from trainer.tasks.supervised import Blank
from trainer.tasks.task import IGNORED


def opened(folder: Path, path: Any, own: Any = None, data: Any = None, **images: Any) -> ImageData:
    given = {
        "task": "image_classification",
        "data": {"path": path, **(data or {})},
        "images": images,
    }
    section, problems = validate(given)
    assert problems == []
    return open_images(section.data, section.images, 3, folder, ALONE, own)


def refusal(*arguments: Any, **options: Any) -> str:
    with pytest.raises(DataError) as caught:
        opened(*arguments, **options)
    return str(caught.value)


# What is read


@pytest.mark.parametrize(("name", "kind"), [("mnist", "MNIST"), ("fashion_mnist", "FashionMNIST")])
def test_idx_files(tmp_path, name, kind):
    write_idx(tmp_path, kind)
    result = opened(tmp_path, name, root=str(tmp_path))
    image, label = result.train[3]
    raw, _ = pixels(40, 28, 28)
    mean, std = result.images.mean[0], result.images.std[0]
    assert (len(result.train), len(result.evaluation), label, result.images.mode) == (
        40,
        40,
        3,
        "L",
    )
    expected = (torch.from_numpy(raw[3]) / 255 - mean) / std
    torch.testing.assert_close(image, expected[None])
    assert abs(mean - raw.mean() / 255) < 1e-4 and abs(std - (raw / 255).std()) < 1e-4


@pytest.mark.parametrize(("name", "kind"), [("cifar10", "CIFAR10"), ("cifar100", "CIFAR100")])
def test_cifar_files(tmp_path, name, kind):
    from torchvision import datasets

    sums = write_cifar(tmp_path, getattr(datasets, kind))
    with mock.patch.multiple(getattr(datasets, kind), **sums):
        result = opened(tmp_path, name, root=str(tmp_path), normalize="none")
    raw, labels = pixels(20, 32, 32, 3, classes=int(name.removeprefix("cifar")))
    image, label = result.train[4]
    assert len(result.images.classes) == int(name.removeprefix("cifar")) and label == labels[4]
    torch.testing.assert_close(image, torch.from_numpy(raw[4]).permute(2, 0, 1) / 255)


def test_a_folder_of_classes_and_one_to_evaluate_on(tmp_path):
    train, kept = write_folder(tmp_path / "a", 12), write_folder(tmp_path / "b", 6)
    result = opened(tmp_path, str(train), data={"evaluation_path": str(kept)}, normalize="imagenet")
    assert result.images.classes == ("ant", "bee", "cat") and result.images.size == (10, 8)
    assert (len(result.train), len(result.evaluation)) == (12, 6)
    assert [result.train[i][1] for i in range(12)] == [0] * 4 + [1] * 4 + [2] * 4
    shows(result.describe(), "12 colour images", "10 x 8, 3", "classes, 6 held")


@pytest.mark.parametrize("labels", [[0, 1, 2, 1], ["x", "y", "x", "z"]], ids=["numbers", "names"])
def test_a_table_with_an_image_column(tmp_path, labels, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    result = opened(
        tmp_path,
        str(write_parquet(tmp_path / "rows.parquet", labels)),
        data={"evaluation_fraction": 0},
    )
    assert len(result.images.classes) == 3 and result.evaluation is None
    assert [result.train[i][1] for i in range(4)] == (
        [0, 1, 2, 1] if labels[0] == 0 else [0, 1, 0, 2]
    )


def test_the_digits_are_there_offline(tmp_path):
    pytest.importorskip("sklearn")
    result = opened(tmp_path, "digits", data={"evaluation_fraction": 0.2})
    assert len(result.train) + len(result.evaluation) == 1797 and result.images.size == (8, 8)


def test_an_own_data_set(tmp_path):
    own = [(torch.full((3, 4, 4), index / 10), index % 2) for index in range(10)]
    result = opened(tmp_path, None, own=(own, own[:4]), classes=2, normalize="none")
    assert len(result.evaluation) == 4
    torch.testing.assert_close(result.train[5][0], torch.full((3, 4, 4), 0.5))


def test_sizes_are_brought_to_one(tmp_path):
    write_folder(tmp_path, 6, size=(10, 8))
    Image.fromarray(np.zeros((20, 40, 3), np.uint8)).save(tmp_path / "ant" / "wide.png")
    result = opened(tmp_path, str(tmp_path), size=[6, 5])
    assert {tuple(result.train[i][0].shape) for i in range(len(result.train))} == {(3, 6, 5)}


# Augmentations

VARIED = {
    "crop_padding": 2,
    "flip": 0.5,
    "rotate": 20,
    "trivial": True,
    "colour": 0.3,
    "erase": 0.5,
}


def test_what_is_random_follows_from_seed_epoch_and_sample(tmp_path):
    result = opened(tmp_path, str(write_folder(tmp_path / "a")), augment=VARIED)
    state = torch.get_rng_state()
    first = result.train.in_epoch(3, 0)[0]
    torch.rand(7)  # nothing that others draw matters
    assert torch.equal(first, result.train.in_epoch(3, 0)[0])
    assert not torch.equal(first, result.train.in_epoch(3, 1)[0])
    plain = result.train[3][0]
    assert torch.equal(plain, result.train[3][0]) and not torch.equal(plain, first)
    torch.set_rng_state(state)
    result.train.in_epoch(5, 2)
    assert torch.equal(torch.get_rng_state(), state)  # nor is anything of theirs used up
    other = opened(tmp_path, str(tmp_path / "a"), augment={"crop_scale": [0.3, 1]}, size=6)
    assert other.train.in_epoch(0, 0)[0].shape == (3, 6, 6)


def steps(found: ImageData, ranks: int, workers: int) -> list[torch.Tensor]:
    """The global batches of three steps, put together from those of all ranks."""
    task = ImageClassification(3, lambda: torch.nn.Flatten(), ())
    shares = []
    for rank in range(ranks):
        batching = Batching(8 // ranks, 1, ranks, rank, workers=workers)
        with BatchLoader(
            found.train, task.collate, batching, range(3), order=SampleOrder(3), position=0
        ) as loader:
            shares.append([batch.micro_batches[0]["input"] for batch in loader])
    return [torch.cat(parts) for parts in zip(*shares, strict=True)]


def test_the_same_batches_with_any_number_of_ranks_and_workers(tmp_path):
    """Twelve images and steps of eight: the second lies across the end of an epoch."""
    result = opened(
        tmp_path, str(write_folder(tmp_path)), augment=VARIED, data={"evaluation_fraction": 0}
    )
    expected = steps(result, 1, 0)
    for ranks, workers in ((2, 0), (1, 2), (2, 1)):
        for ours, theirs in zip(steps(result, ranks, workers), expected, strict=True):
            assert torch.equal(ours, theirs)


def test_evaluation_is_the_same_with_workers_and_counts_each_image_once(tmp_path):
    result = opened(
        tmp_path, str(write_folder(tmp_path)), augment=VARIED, data={"evaluation_fraction": 0}
    )
    task = ImageClassification(3, lambda: torch.nn.Flatten(), ())

    def batches(workers: int) -> list[dict[str, torch.Tensor]]:
        return list(
            evaluation_batches(
                result.train, task.collate, task.blank, Batching(4, workers=workers), 11
            )
        )

    for ours, theirs in zip(batches(2), batches(0), strict=True):
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    assert sum(int(batch["count"]) for batch in batches(0)) == 11


# Accuracy


def test_accuracy_counts_what_is_right():
    task = ImageClassification(7, lambda: torch.nn.Flatten(), ())
    logits = torch.eye(7)[torch.tensor([0, 1, 2, 3, 4])]
    logits[3] = torch.tensor([7.0, 6, 5, 4, 3, 2, 1])  # the fourth highest
    logits[4] = torch.tensor([7.0, 6, 5, 4, 1, 2, 3])  # the last
    batch = task.collate([(row, label) for row, label in zip(logits, [0, 1, 5, 3, 4], strict=True)])
    loss, first, five = task.measured(torch.nn.Flatten(), batch).tolist()
    assert (first, five) == (2.0, 3.0)
    assert loss == pytest.approx(float(task.loss_sum(torch.nn.Flatten(), batch)))
    constant = task.collate([(torch.zeros(7), 0)] * 3)
    assert task.measured(torch.nn.Flatten(), constant)[1] == 0  # a tie is not right
    skipped = task.collate([(torch.zeros(7), IGNORED), (torch.eye(7)[1], 1)])
    assert int(skipped["count"]) == 1 and task.measured(torch.nn.Flatten(), skipped)[1] == 1
    assert int(task.collate([Blank((torch.zeros(7), 1))])["count"]) == 0


# Bad input


def test_files_that_are_not_there_and_do_not_come(tmp_path):
    from torchvision import datasets

    with mock.patch.object(datasets.FashionMNIST, "download", side_effect=URLError("no route")):
        message = refusal(tmp_path, "fashion_mnist", root=str(tmp_path / "here"))
    assert "FashionMNIST/raw/ with train-images-idx3-ubyte.gz" in message and "no route" in message
    assert str(tmp_path / "here") in message and "trainer.images.root" in message
    with mock.patch.object(datasets.CIFAR10, "download", side_effect=URLError("no route")):
        message = refusal(tmp_path, "cifar10", root=str(tmp_path / "here"))
    shows(message, "cifar-10-python.tar.gz", "cifar-10-batches-py/", "data_batch_1")


def test_folders_that_have_no_classes(tmp_path):
    (tmp_path / "loose").mkdir()
    Image.new("RGB", (4, 4)).save(tmp_path / "loose" / "a.png")
    shows(refusal(tmp_path, str(tmp_path / "loose")), "folders", "1 images")
    write_folder(tmp_path / "parts" / "train"), write_folder(tmp_path / "parts" / "val")
    message = refusal(tmp_path, str(tmp_path / "parts"))
    assert (
        f"trainer.data.path={tmp_path}/parts/train and "
        f"trainer.data.evaluation_path={tmp_path}/parts/val"
    ) in message
    write_folder(tmp_path / "gap")
    (tmp_path / "gap" / "dog").mkdir()
    shows(refusal(tmp_path, str(tmp_path / "gap")), "gap/dog", "class without")


def test_a_corrupt_image_is_named_or_skipped(tmp_path, capfd):
    write_folder(tmp_path)
    broken = tmp_path / "bee" / "004.png"
    broken.write_bytes(broken.read_bytes()[:60])
    assert f"{broken}: can't be read" in refusal(tmp_path, str(tmp_path))
    result = opened(tmp_path, str(tmp_path), corrupt="skip", data={"evaluation_fraction": 0})
    index = result.train.labelled.name
    place = next(i for i in range(12) if index(i) == str(broken))
    image, label = result.train[place]
    assert (
        label == IGNORED and float(image.abs().max()) == 0 and str(broken) in capfd.readouterr().err
    )


def test_a_workers_error_is_its_own(tmp_path):
    write_folder(tmp_path, 99)
    result = opened(tmp_path, str(tmp_path), data={"evaluation_fraction": 0})
    for path in (tmp_path / "bee").glob("*.png"):
        path.write_bytes(b"nothing")
    with pytest.raises(DataError, match=r"bee/\d+.png: can't be read"):
        steps(result, 1, 1)


@pytest.mark.parametrize(
    ("change", "options", "keys"),
    [
        (
            lambda f: Image.new("RGB", (9, 9)).save(f / "ant" / "x.png"),
            {},
            ("9 x 9", "10 x 8"),
        ),
        (
            lambda f: Image.new("I;16", (8, 10)).save(f / "ant" / "x.png"),
            {},
            ("more than 8 bits",),
        ),
        (
            lambda f: None,
            {"mean": [0.5], "std": [0.5]},
            ("1 and 1 numbers", "expected 3"),
        ),
    ],
    ids=["size", "16 bits", "channels"],
)
def test_images_that_do_not_fit(tmp_path, change, options, keys):
    write_folder(tmp_path)
    change(tmp_path)
    shows(refusal(tmp_path, str(tmp_path), **options), *keys)


def test_labels_that_are_no_classes(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    rows = str(write_parquet(tmp_path / "rows.parquet", [0, -1, 2, 1]))
    shows(refusal(tmp_path, rows), "1 has", "-1", "labels", "0 to 2")
    assert 'no column "kind"' in refusal(tmp_path, rows, label_column="kind")
    own = [(torch.zeros(3, 4, 4), 5)]
    result = opened(tmp_path, None, own=(own * 8, None), classes=2, normalize="none")
    with raises(DataError, "label 5", "number", "0 to 1"):
        result.train[0]
    train, kept = write_folder(tmp_path / "a"), write_folder(tmp_path / "b")
    (kept / "cat").rename(kept / "cow")
    message = refusal(tmp_path, str(train), data={"evaluation_path": str(kept)})
    shows(message, "3 classes", "cow")


@pytest.mark.parametrize(
    ("section", "keys"),
    [
        (
            {"task": "causal_lm", "images": {"size": 8}},
            ("trainer.images: saw keys", 'expected the task "image_class'),
        ),
        (
            {"data": {"text_column": "x"}},
            ('trainer.data.text_column: saw "x"', 'expected the task "causal_lm"'),
        ),
        (
            {"images": {"mean": [0.5]}},
            ("trainer.images: saw mean [0.5], std null", "expected both or none"),
        ),
        (
            {"images": {"augment": {"crop_padding": 2, "crop_scale": [0.1, 1]}}},
            ("expected at most one",),
        ),
        (
            {"images": {"augment": {"crop_scale": [0.5, 0.1]}}},
            ("two numbers above 0", "at most 1"),
        ),
        (
            {"images": {"size": [8, 8, 8]}},
            ("trainer.images.size: saw [8, 8, 8]", "expected a height and a width"),
        ),
        ({"images": {"augment": {"flipp": 0.5}}}, ('Did you mean "flip"?',)),
        ({"data": {"format": "csv"}}, ('expected "auto", "parquet" or "hub" of images',)),
    ],
)
def test_keys_that_do_not_fit(section, keys):
    _, problems = validate({"task": "image_classification"} | section)
    shows("\n".join(map(str, problems)), *keys)


def test_own_images_that_change_at_random_are_the_same_data_and_it_is_said(tmp_path):
    class Noisy:
        classes, targets = ("a", "b"), [0, 1] * 20

        def __len__(self) -> int:
            return 40

        def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
            return torch.rand(3, 8, 8), self.targets[index]

    result, again = (opened(tmp_path, None, own=(Noisy(), None)) for _ in range(2))
    assert result.fingerprint == again.fingerprint and result.description() == again.description()
    shows(result.lines()[-1], "reading to reading")
