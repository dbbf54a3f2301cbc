"""Samples a second of a classifier beside Hugging Face's Trainer, on CPU, in one run.

    python benchmarks/labels.py [--rounds 7] [--steps 12] [--batch 16] [--smoke]

Both train a BERT of 4 layers on the same ragged texts of 8 to 128 tokens, a third of which have 128 so that their
micro-batches are as wide, with clipping and fused AdamW:
  labels    the task `labels` on the engine mesh: its loader, its loop, its step
  Trainer   transformers.Trainer with DataCollatorWithPadding
The arms alternate, and each round builds both again. The first two steps of each are not timed.
Times are those of the processor, on one thread, so that what else runs on the machine moves them little.
Reported: medians, and the median of the ratios within a round.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
import torch.distributed as dist

from trainer.config.sections.model_and_data import ModelSection
from trainer.data.loader import Batching, BatchLoader, StepBatches
from trainer.data.order import SampleOrder
from trainer.distributed.ranks import ALONE
from trainer.engines import ENGINES, Job, Machine, Metrics
from trainer.layout import Layout, Recompute
from trainer.optim.lr_schedules import schedule_of
from trainer.recipes.labels.kinds import Single
from trainer.recipes.labels.model import labelled_config, spec_of, task_of
from trainer.run.loop import Hooks, LoopPlan, train
from trainer.state import RunState

CLASSES = 4
RATE = 1e-4
UNTIMED = 2


def config_of(small: bool) -> Any:
    from transformers import BertConfig

    width = 32 if small else 256
    return BertConfig(
        vocab_size=8192, hidden_size=width, intermediate_size=4 * width, num_hidden_layers=4, num_attention_heads=8,
        num_labels=CLASSES,
    )  # fmt: skip


def drawn(count: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    return [
        {
            "input_ids": rng.integers(1, 8192, 128 if number % 3 == 0 else rng.integers(8, 128)),
            "labels": int(rng.integers(CLASSES)),
        }
        for number in range(count)
    ]


def layout_of(micro_batch: int, accumulation: int = 1) -> Layout:
    sizes = {"pipeline": 1, "replicate": 1, "shard": 1, "tensor": 1}
    off = {"offload_optimizer": "none", "offload_param": "none"}
    return Layout(
        **sizes, micro_batch=micro_batch, accumulation=accumulation, zero_stage=0, **off, precision="float32",
        recompute=Recompute(),
    )  # type: ignore[arg-type]  # fmt: skip


def settings_of(layout: Layout) -> dict[str, Any]:
    parameters = {"lr": RATE, "weight_decay": 0.01, "torch_adam": True, "fused": True}
    return {
        "train_batch_size": layout.train_batch,
        "train_micro_batch_size_per_gpu": layout.micro_batch,
        "gradient_accumulation_steps": layout.accumulation,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 0},
        "optimizer": {"type": "AdamW", "params": parameters},
    }


def ours(rows: list[dict[str, Any]], options: argparse.Namespace) -> float:
    """Return the processor seconds of the timed steps."""
    config = config_of(options.smoke)
    kind = Single(CLASSES)
    labelled_config(config, kind, (), 0)
    spec = spec_of(config, ModelSection(), kind)
    task = task_of(spec, kind)
    layout = layout_of(options.batch)
    settings = settings_of(layout)
    machine = Machine(torch.device("cpu"), ALONE)
    engine = ENGINES["mesh"].build(Job(layout, spec, task, settings, 0, machine))
    times: list[float] = []

    class Timed(Hooks):
        def on_step(self, batches: StepBatches, metrics: Metrics) -> None:
            times.append(time.process_time())

    steps = options.steps + UNTIMED
    place = {"order": SampleOrder(0), "position": 0}
    loader = BatchLoader(rows, task.collate, Batching(options.batch), range(steps), **place)  # type: ignore[arg-type]
    plan = LoopPlan(steps, layout.train_batch, 10, None, None)
    with loader:
        train(engine, loader, schedule_of(settings), plan, Timed(), RunState())
    engine.close()
    return times[-1] - times[UNTIMED - 1]


def theirs(rows: list[dict[str, Any]], options: argparse.Namespace) -> float:
    from transformers import (
        AutoModelForSequenceClassification,
        DataCollatorWithPadding,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    from tests.support.labels import tokenizer_of

    times: list[float] = []

    class Timed(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            times.append(time.process_time())

    model = AutoModelForSequenceClassification.from_config(config_of(options.smoke))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, per_device_train_batch_size=options.batch, max_steps=options.steps + UNTIMED, use_cpu=True,
            learning_rate=RATE, weight_decay=0.01, max_grad_norm=1.0, optim="adamw_torch_fused", report_to=[],
            save_strategy="no", logging_steps=10, disable_tqdm=True, lr_scheduler_type="constant",
        )  # fmt: skip
        collate = DataCollatorWithPadding(tokenizer_of())
        given = [{**row, "input_ids": row["input_ids"].tolist()} for row in rows]
        more: dict[str, Any] = {"train_dataset": given, "data_collator": collate}
        Trainer(model, arguments, callbacks=[Timed()], **more).train()
    return times[-1] - times[UNTIMED - 1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rows = drawn(64 * options.batch)
    arms: dict[str, Callable[..., float]] = {"labels": ours, "Trainer": theirs}
    rates: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(options.rounds):
        order = list(arms) if number % 2 else list(arms)[::-1]
        for name in order:
            rates[name].append(options.steps * options.batch / arms[name](rows, options))
    for name, own in rates.items():
        ratios = [one / other for one, other in zip(own, rates["Trainer"], strict=True)]
        spread = f"{min(ratios):.3f} to {max(ratios):.3f}"
        rate = f"{statistics.median(own):8.1f} samples/s"
        print(f"{name:<8} {rate}  {statistics.median(ratios):.3f} of Trainer ({spread})")


if __name__ == "__main__":
    main()
