"""What a contrastive loss over a whole step costs beside one over each micro-batch, on CPU, in one run.

    python benchmarks/embeddings.py [--rounds 9] [--pairs 8] [--times 8] [--smoke]

Both run the same micro-batches of pairs through a BERT of 4 layers on the engine mesh, whole steps with AdamW:
  whole step      the task `embeddings`: each text among those of all micro-batches, by a second pass (GradCache)
  micro-batches   the same task, each text among those of its own micro-batch
The arms alternate in a random order. The first round is not timed.
Times are those of the processor, on one thread, so that what else runs on the machine moves them little.
Reported: medians, and the median of the ratios within a round.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.labels import config_of, layout_of, settings_of
from trainer.config.sections.embeddings import EmbeddingsSection
from trainer.config.sections.trainer import TrainerSection
from trainer.distributed.ranks import ALONE
from trainer.engines import ENGINES, Engine, Job, Machine
from trainer.optim.lr_schedules import Update
from trainer.recipes.embeddings.body import body_of
from trainer.recipes.embeddings.task import EmbeddingTask


class EachMicroBatch(EmbeddingTask):
    """The same task without a comparison of the whole step."""

    whole_step = None  # type: ignore[assignment]


def drawn(count: int) -> list[Any]:
    """Draw pairs of texts of 16 to 128 tokens."""
    rng = np.random.default_rng(0)
    return [
        {
            "tokens": [rng.integers(1, 8192, rng.integers(16, 128)) for _ in range(2)],
            "texts": np.array([2 * number, 2 * number + 1]),
            "real": True,
        }
        for number in range(count)
    ]


def engine_of(kind: type[EmbeddingTask], options: argparse.Namespace) -> tuple[Engine, Any]:
    config = config_of(options.smoke)
    spec = body_of(config, TrainerSection(task="embeddings"))
    task = kind.of(EmbeddingsSection(), 0, (0, 0), config.hidden_size)
    layout = layout_of(options.pairs, options.times)
    machine = Machine(torch.device("cpu"), ALONE)
    engine = ENGINES["mesh"].build(Job(layout, spec, task, settings_of(layout), 0, machine))
    samples = drawn(layout.train_batch)
    parts = [samples[at : at + options.pairs] for at in range(0, len(samples), options.pairs)]
    return engine, [task.collate(part) for part in parts]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--pairs", type=int, default=8, help="those of a micro-batch")
    parser.add_argument("--times", type=int, default=8, help="micro-batches of a step")
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    kinds = {"whole step": EmbeddingTask, "micro-batches": EachMicroBatch}
    arms = {name: engine_of(kind, options) for name, kind in kinds.items()}
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(options.rounds + 1):
        for name in random.sample(list(arms), len(arms)):
            engine, batches = arms[name]
            started = time.process_time()
            engine.step(number, batches, Update(1e-4))
            if number:  # the first round warms up
                seconds[name].append(time.process_time() - started)
    for name, own in seconds.items():
        ratios = [one / other for one, other in zip(own, seconds["micro-batches"], strict=True)]
        spread = f"{min(ratios):.3f} to {max(ratios):.3f}"
        took = f"{statistics.median(own):7.3f} s"
        print(f"{name:<14} {took}  {statistics.median(ratios):.3f} of micro-batches ({spread})")


if __name__ == "__main__":
    main()
