"""Image training against a bare PyTorch loop with the same model and loader, and the loader against
PyTorch's own.

    python benchmarks/images.py                 # both, about three minutes on two cores
    python benchmarks/images.py --smoke         # that it runs

Steps of both loops are interleaved in blocks in one process, so that what else the machine does
hits both; each ratio is the median over blocks, and A/A compares the bare loop with itself. The
loader is compared with `torch.utils.data.DataLoader` over the same files, with as many workers and
torchvision's transforms as they are.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader

from trainer.config.validate import validate
from trainer.data.images.image_samples import ImageData, open_images
from trainer.data.loader import Batching, BatchLoader
from trainer.data.order import SampleOrder
from trainer.distributed.ranks import ALONE, Ranks
from trainer.engines import Job, Machine
from trainer.engines.torch import mesh
from trainer.layout import PIPELINE_SCHEDULES, Layout, Recompute
from trainer.models.classifiers import Classifier
from trainer.optim.lr_schedules import Update
from trainer.recipes.images.classifier import spec_of
from trainer.recipes.images.task import ImageClassification
from trainer.supervise.world import environment_of, free_port

CPU = torch.device("cpu")
WIDTH = {"num_heads": 3, "hidden_dim": 192, "mlp_dim": 768}
VIT = Classifier("VisionTransformer", {"patch_size": 8, "num_layers": 6, **WIDTH})
AUGMENT = {"crop_scale": [0.3, 1.0], "flip": 0.5}


def pictures(folder: Path, count: int, side: int) -> Path:
    rng = np.random.default_rng(0)
    for index in range(count):
        place = folder / f"class-{index % 10}"
        place.mkdir(parents=True, exist_ok=True)
        small = rng.integers(0, 256, (side // 8, side // 8, 3), dtype=np.uint8)
        Image.fromarray(small).resize((side, side), Image.Resampling.BICUBIC).save(
            place / f"{index}.jpg"
        )
    return folder


def opened(folder: Path, size: int, augment: dict[str, Any]) -> tuple[Any, ImageData]:
    images = {"size": size, "augment": augment, "normalize": "imagenet"}
    given = {
        "task": "image_classification",
        "images": images,
        "data": {"path": str(folder), "evaluation_fraction": 0},
    }
    section, problems = validate(given)
    assert not problems
    return section, open_images(section.data, section.images, 0, folder, ALONE)


def loader_of(
    data: ImageData, task: ImageClassification, batch: int, steps: int, workers: int
) -> BatchLoader:
    return BatchLoader(
        data.train,
        task.collate,
        Batching(batch, workers=workers),
        range(steps),
        order=SampleOrder(0),
        position=0,
    )


def seconds(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def step_time(
    folder: Path, named: Classifier, size: int, batch: int, blocks: int, block: int
) -> Iterator[str]:
    """Three loops in turn, each with the loader of this project: the engine, and twice the bare
    one.
    """
    section, data = opened(folder, size, {"flip": 0.5})
    spec = spec_of(section, data.images, named)
    classifier = named.completed(data.images)
    task = ImageClassification(len(data.images.classes), spec.build, spec.blocks)
    sizes: Any = dict.fromkeys(("pipeline", "replicate", "shard", "tensor", "accumulation"), 1)
    layout = Layout(
        **sizes,
        micro_batch=batch,
        zero_stage=0,
        offload_optimizer="none",
        offload_param="none",
        precision="float32",
        recompute=Recompute(),
        schedule=PIPELINE_SCHEDULES["1F1B"],
    )
    config = {
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.0}},
        "gradient_clipping": 0.0,
    }
    engine = mesh.build(Job(layout, spec, task, config, 0, Machine(CPU, Ranks())))
    steps = blocks * block + 1
    with ExitStack() as stack:
        loaders = [stack.enter_context(loader_of(data, task, batch, steps, 0)) for _ in range(3)]
        loops = [
            by_engine(engine, loaders[0]),
            bare(classifier, loaders[1]),
            bare(classifier, loaders[2]),
        ]
        for loop in loops:
            next(loop)  # a first step makes what is made once
        times: list[list[float]] = [[], [], []]
        for index in range(blocks):
            for which in np.random.default_rng(index).permutation(3):
                times[which].append(seconds(lambda: [next(loops[which]) for _ in range(block)]))  # noqa: B023
    bare_time = statistics.median(times[1]) / block
    ratio, same = (
        statistics.median(a / b for a, b in zip(times[i], times[1], strict=True)) for i in (0, 2)
    )
    model = f"{named.name}, {spec.parameters / 1e6:.1f} M, {size} x {size}, batch {batch}"
    yield f"| {model} | {bare_time * 1e3:.1f} ms | {ratio:.3f} | {same:.3f} |"


def by_engine(engine: Any, loader: BatchLoader) -> Iterator[None]:
    for batches in loader:
        engine.step(batches.step, batches.micro_batches, Update(1e-3))
        yield


def bare(classifier: Classifier, loader: BatchLoader) -> Iterator[None]:
    """With the optimizer that the engine makes of the config: PyTorch's fused one."""
    model = classifier.build().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0, fused=True)
    for batches in loader:
        [batch] = batches.micro_batches
        nn.functional.cross_entropy(model(batch["input"]), batch["target"]).backward()
        torch.nn.utils.get_total_norm(
            [p.grad for p in model.parameters() if p.grad is not None]
        )  # ours logs it
        optimizer.step()
        optimizer.zero_grad()
        yield


def loader_rate(
    folder: Path, size: int, batch: int, workers: int, batches: int, rounds: int
) -> Iterator[str]:
    """Images a second through each loader, start included, in turn."""
    from torchvision.datasets import ImageFolder
    from torchvision.transforms import v2

    _, data = opened(folder, size, AUGMENT)
    task = ImageClassification(len(data.images.classes), lambda: nn.Flatten(), ())
    normal = v2.Normalize(data.images.mean, data.images.std)
    steps = [
        v2.RandomResizedCrop(size, scale=(0.3, 1.0), antialias=True),
        v2.RandomHorizontalFlip(0.5),
    ]
    plain = v2.Compose([v2.PILToTensor(), *steps, v2.ToDtype(torch.float32, scale=True), normal])
    theirs = ImageFolder(str(folder), plain)
    rates: dict[str, list[float]] = {"ours": [], "theirs": []}

    def take_ours() -> None:
        with loader_of(data, task, batch, batches, workers) as loader:
            assert sum(len(item.micro_batches[0]["target"]) for item in loader) == batch * batches

    def take_theirs() -> None:
        loader: DataLoader[Any] = DataLoader(theirs, batch, shuffle=True, num_workers=workers)
        taken = 0
        while taken < batch * batches:
            for _, target in loader:
                taken += len(target)
                if taken >= batch * batches:
                    break

    for index in range(rounds):
        order = [("ours", take_ours), ("theirs", take_theirs)]
        for name, take in order if index % 2 else order[::-1]:
            rates[name].append(batch * batches / seconds(take))
    ratio = statistics.median(a / b for a, b in zip(rates["ours"], rates["theirs"], strict=True))
    ours, others = (statistics.median(rates[name]) for name in ("ours", "theirs"))
    yield f"| {workers} | {ours:,.0f} | {others:,.0f} | {ratio:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", type=int, default=15)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--smoke", action="store_true", help="that it runs: few and small images, no figure"
    )
    options = parser.parse_args()
    blocks, rounds, count, pixels = (
        (2, 1, 16, 64) if options.smoke else (options.blocks, options.rounds, 256, 256)
    )
    torch.set_num_threads(1)
    os.environ.update(environment_of(0, 1, free_port()))
    with tempfile.TemporaryDirectory() as place:
        folder = pictures(Path(place), count, pixels)
        print("| model | bare step | engine / bare | A/A |\n| --- | --- | --- | --- |")
        for named, size, batch in ((Classifier("resnet18"), 64, 16), (VIT, 64, 16))[
            : 1 if options.smoke else 2
        ]:
            for line in step_time(
                folder,
                named,
                size,
                2 if options.smoke else batch,
                blocks,
                1 if options.smoke else 3,
            ):
                print(line, flush=True)
        print("\n| workers | images/s | DataLoader | ratio |\n| --- | --- | --- | --- |")
        for workers in (1, 2):
            for line in loader_rate(
                folder, 128, *((4, workers, 2) if options.smoke else (32, workers, 16)), rounds
            ):
                print(line, flush=True)


if __name__ == "__main__":
    main()
