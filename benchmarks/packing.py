"""Tokens with a target per second: packed documents, padded ones, and Hugging Face's Trainer, on
the same ragged data.

    python benchmarks/packing.py [--rounds 3] [--steps 6] [--rows 8] [--sequence 512] [--median 90] [--sigma 0.9]

One process, float32, the same Llama, documents, rows a step and AdamW. Lengths are log-normal, cut
at the sequence length; the first token of a document is no target. Sequences are padded to the
longest of their step, by Trainer as by us. The three take turns, round by round, in a random order;
the first two steps of each turn are not timed.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from trainer.data.loader import Batching, BatchLoader
from trainer.data.order import SampleOrder
from trainer.data.text.cutting import Cut, write_part
from trainer.data.text.token_files import Encoded, PreparedSource
from trainer.distributed.ranks import ALONE
from trainer.engines import Job, Machine
from trainer.engines.torch import mesh
from trainer.layout import PIPELINE_SCHEDULES, Layout, Recompute
from trainer.models import huggingface
from trainer.models.language import model_config
from trainer.optim.lr_schedules import Update
from trainer.recipes.causal_lm.task import CausalLM
from trainer.supervise.world import environment_of, free_port
from trainer.tasks.task import IGNORED

CPU, WARM_UP, RATE, VOCABULARY = torch.device("cpu"), 2, 1e-3, 4096
MODEL = {
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 688,
}
MODEL |= {
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}


class Options:
    name_or_path, config, revision, trust_remote_code, attention = None, MODEL, None, False, None


def prepared(folder: Path, options: argparse.Namespace) -> dict[str, PreparedSource]:
    """The same documents, packed and padded."""
    rng = np.random.default_rng(0)
    lengths = rng.lognormal(np.log(options.median), options.sigma, 20_000)
    documents = [
        rng.integers(1, VOCABULARY, int(n) + 1) for n in np.clip(lengths, 4, options.sequence)
    ]
    encoded = [Encoded.from_token(tokens, 1) for tokens in documents]
    for name in ("pack", "pad"):
        write_part(folder / name, encoded, Cut(options.sequence, name))
    return {name: PreparedSource(folder / name) for name in ("pack", "pad")}


class Turn(NamedTuple):
    targets: int
    positions: int
    seconds: float
    processor: float
    """Seconds of the processor's time: what else the machine does counts less."""


def clocks() -> np.ndarray:
    return np.array([time.perf_counter(), time.process_time()])


class Ours:
    """The mesh engine and its loader."""

    def __init__(self, source: PreparedSource, options: argparse.Namespace) -> None:
        self._source, self._options, self._position = source, options, 0
        spec = huggingface.spec_of(model_config.read_config(Options), Options)
        sizes = {"pipeline": 1, "replicate": 1, "shard": 1, "tensor": 1}
        layout = Layout(
            **sizes, micro_batch=options.rows, accumulation=1, zero_stage=0,
            offload_optimizer="none", offload_param="none", precision="float32", recompute=Recompute("none"),
            schedule=PIPELINE_SCHEDULES["1F1B"],
        )  # fmt: skip
        optimizer = {"type": "AdamW", "params": {"lr": RATE, "weight_decay": 0.0}}
        deepspeed = {"optimizer": optimizer, "gradient_clipping": 1.0}
        self._task = CausalLM.of(spec).packing()
        self._engine = mesh.build(Job(layout, spec, self._task, deepspeed, 0, Machine(CPU, ALONE)))

    def turn(self, steps: int) -> Turn:
        rows, first = self._options.rows, self._position
        self._position += steps + WARM_UP
        span = {"steps": range(first, self._position), "position": first * rows}
        targets = positions = 0
        with BatchLoader(
            self._source, self._task.collate, Batching(rows), order=SampleOrder(0), **span
        ) as loader:
            for index, made in enumerate(loader):
                if index == WARM_UP:
                    started = clocks()
                self._engine.step(made.step, made.micro_batches, Update(RATE))
                if index >= WARM_UP:
                    targets += int((made.micro_batches[0]["targets"] != IGNORED).sum())
                    positions += made.micro_batches[0]["targets"].numel()
        return Turn(targets, positions, *(clocks() - started))


class Theirs:
    """transformers.Trainer on the padded samples."""

    def __init__(self, source: PreparedSource, options: argparse.Namespace, folder: Path) -> None:
        self._source, self._options, self._folder, self._turns = source, options, folder, 0
        torch.manual_seed(0)
        self._model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**MODEL))
        self._counts: list[tuple[int, int]] = []

    def turn(self, steps: int) -> Turn:
        times: list[np.ndarray] = []

        class Watch(TrainerCallback):
            def on_step_end(self, *_: Any, **__: Any) -> None:
                times.append(clocks())

        self._counts.clear()
        self._turns += 1
        arguments = TrainingArguments(
            str(self._folder), per_device_train_batch_size=self._options.rows, max_steps=steps + WARM_UP,
            learning_rate=RATE, seed=self._turns, use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True,
            logging_strategy="no", remove_unused_columns=False, max_grad_norm=1.0,
        )  # fmt: skip
        Trainer(
            model=self._model, args=arguments, train_dataset=self._source, data_collator=self._collate,
            callbacks=[Watch()],
        ).train()  # fmt: skip
        counts = self._counts[WARM_UP : steps + WARM_UP]
        return Turn(*np.sum(counts, axis=0), *(times[-1] - times[WARM_UP - 1]))

    def _collate(self, samples: list[Any]) -> dict[str, torch.Tensor]:
        """As its own collator: padded to the longest; labels are the tokens, which the model itself
        shifts.
        """
        rows = [
            torch.tensor(np.append(sample["input_ids"], sample["targets"][-1]))
            for sample in samples
        ]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        lengths = torch.tensor([len(row) for row in rows])[:, None]
        mask = torch.arange(ids.shape[1])[None] < lengths
        self._counts.append((int(lengths.sum()) - len(rows), ids.numel()))
        return {
            "input_ids": ids,
            "attention_mask": mask.long(),
            "labels": ids.masked_fill(~mask, IGNORED),
        }


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, default in (
        ("rounds", 3),
        ("steps", 6),
        ("rows", 8),
        ("sequence", 512),
        ("median", 90),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--sigma", type=float, default=0.9)
    options = parser.parse_args()
    environment = environment_of(0, 1, free_port())
    os.environ |= environment
    torch.distributed.init_process_group("gloo")
    for name in environment:  # Trainer would take it for a launcher
        del os.environ[name]
    with tempfile.TemporaryDirectory() as folder:
        sources = prepared(Path(folder), options)
        arms: dict[str, Any] = {
            "packed": Ours(sources["pack"], options),
            "padded": Ours(sources["pad"], options),
            "Trainer, padded": Theirs(sources["pad"], options, Path(folder)),
        }
        turns: dict[str, list[Turn]] = {name: [] for name in arms}
        order = random.Random(0)
        for _ in range(options.rounds):
            for name in order.sample(list(arms), len(arms)):
                turns[name].append(arms[name].turn(options.steps))
    report(turns, sources["pack"].summary.describe())


def report(turns: dict[str, list[Turn]], described: str) -> None:
    print(f"data: {described}; load {os.getloadavg()[0]:.0f} on {os.cpu_count()} cores")
    print(
        "| | targets/s, each round | targets of positions | to padded | to Trainer | the same by "
        "processor time |"
    )
    print("| --- | --- | ---: | ---: | ---: | ---: |")

    def ratio(ours: str, theirs: str, clock: str) -> str:
        pairs = zip(turns[ours], turns[theirs], strict=True)
        found = [a.targets / getattr(a, clock) / (b.targets / getattr(b, clock)) for a, b in pairs]
        return f"{statistics.median(found):.2f}"

    for name, found in turns.items():
        rounds = ", ".join(f"{turn.targets / turn.seconds:,.0f}" for turn in found)
        fill = sum(turn.targets for turn in found) / sum(turn.positions for turn in found)
        others = ("padded", "Trainer, padded")
        wall, processor = (
            [ratio(name, other, clock) for other in others] for clock in ("seconds", "processor")
        )
        print(f"| {name} | {rounds} | {fill:.0%} | {' | '.join(wall)} | {', '.join(processor)} |")


if __name__ == "__main__":
    main()
