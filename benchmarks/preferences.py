"""What a micro-batch of pairs costs beside fine-tuning on the same tokens, and beside TRL's DPOTrainer, on CPU.

    python benchmarks/preferences.py [--rounds 12] [--pairs 4] [--smoke]

Arms, all with the same model, values and ragged pairs, forward and backward, interleaved in a random order:
  pairs          the task `pairs`, with the reference as a column
  fine-tuning    the task `causal_lm` on the same sequences, with the same targets
  TRL            DPOTrainer with precompute_ref_log_probs, which has the same column
  TRL, as usual  DPOTrainer as it is by default: its reference runs in each step
and without gradients, in evaluation mode:
  column         the reference's log-probabilities of the pairs
  evaluation     an evaluation of the task `causal_lm` on the same sequences
Reported: seconds of the processor, on one thread, which other programs on the machine change little; and the median of
paired ratios within a round.
"""

from __future__ import annotations

import argparse
import random
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

from trainer.config.sections.pair_losses import PairsSection
from trainer.models.spec import LanguageModel, OutputHead
from trainer.recipes.causal_lm.task import CausalLM
from trainer.recipes.pairs.task import PairsTask
from trainer.tasks.task import IGNORED

Arm = Callable[[], None]


def model_of(small: bool) -> Any:
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    width = 32 if small else 256
    config = LlamaConfig(
        vocab_size=8192, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4, pad_token_id=0,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config)


def drawn(pairs: int) -> list[dict[str, list[int]]]:
    """Draw prompts of 16 to 64 tokens, and answers of 16 to 192."""
    rng = np.random.default_rng(0)

    def tokens(least: int, most: int) -> list[int]:
        return [int(token) for token in rng.integers(1, 8192, rng.integers(least, most))]

    return [
        {
            "prompt_ids": tokens(16, 64),
            "chosen_ids": tokens(16, 192),
            "rejected_ids": tokens(16, 192),
        }
        for _ in range(pairs)
    ]


def sample(row: dict[str, list[int]], side: str) -> dict[str, np.ndarray]:
    tokens = np.array(row["prompt_ids"] + row[f"{side}_ids"])
    scored = np.arange(1, len(tokens)) >= len(row["prompt_ids"])
    return {"input_ids": tokens[:-1], "targets": np.where(scored, tokens[1:], IGNORED)}


def ours(rows: list[dict[str, list[int]]], small: bool) -> dict[str, Arm]:
    language = LanguageModel(head=OutputHead(plain=True))
    models = [model_of(small), model_of(small)]
    task = PairsTask(language).comparing(PairsSection())
    plain = CausalLM(language)
    for model, one in zip(models, (task, plain), strict=True):
        one.prepare(model.train())
    sides = ("chosen", "rejected")
    reference = np.full(2, -1000.0)
    pairs = [
        {side: sample(row, side) for side in sides} | {"margin": 0.0, "reference": reference}
        for row in rows
    ]
    batch = task.collate(pairs)
    documents = plain.collate([pair[side] for side in sides for pair in pairs])

    def of_pairs() -> None:
        (task.loss_sum(models[0], batch) / len(rows)).backward()

    def of_documents() -> None:
        (plain.loss_sum(models[1], documents) / plain.targets(documents)).backward()

    def evaluated(task: CausalLM, model: Any, batch: Any) -> None:
        model.eval()
        with torch.no_grad():
            task.measured(model, batch)
        model.train()

    def of_column() -> None:
        with task.measuring_columns(len(rows)):
            evaluated(task, models[0], batch | {"places": torch.arange(len(rows))})

    return {
        "pairs": of_pairs,
        "fine-tuning": of_documents,
        "column": of_column,
        "evaluation": lambda: evaluated(plain, models[1], documents),
    }


def theirs(rows: list[dict[str, list[int]]], folder: Path, small: bool, column: bool) -> Arm:
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    from tests.support.command.language_model import tokenizer

    model_of(small).save_pretrained(folder)
    arguments = DPOConfig(
        output_dir=str(folder / "out"), bf16=False, use_cpu=True, report_to=[], max_length=None,
        gradient_checkpointing=False, precompute_ref_log_probs=column, per_device_train_batch_size=len(rows),
        precompute_ref_batch_size=len(rows),
    )  # fmt: skip
    text = Dataset.from_list([{"prompt": "w4", "chosen": " w5", "rejected": " w6"}] * len(rows))
    words = tokenizer(pad_token="<system>")
    trainer = DPOTrainer(str(folder), args=arguments, train_dataset=text, processing_class=words)
    trainer.model.train()
    known = {"ref_chosen_logps": -1000.0, "ref_rejected_logps": -1000.0} if column else {}
    inputs = trainer.data_collator([row | known for row in rows])
    return lambda: trainer.compute_loss(trainer.model, inputs).backward()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    rounds = 1 if options.smoke else options.rounds
    torch.set_num_threads(1)
    rows = drawn(options.pairs)
    with tempfile.TemporaryDirectory() as folder:
        arms = ours(rows, options.smoke)
        for name, column in (("TRL", True), ("TRL, as usual", False)):
            arms[name] = theirs(rows, Path(folder) / name.replace(", ", "-"), options.smoke, column)
        seconds: dict[str, list[float]] = {name: [] for name in arms}
        for number in range(rounds + 1):
            for name in random.sample(list(arms), len(arms)):
                started = time.process_time()
                arms[name]()
                if number or options.smoke:  # the first round warms up
                    seconds[name].append(time.process_time() - started)
    against = dict.fromkeys(arms, "pairs") | {"column": "evaluation", "evaluation": "evaluation"}
    for name, own in seconds.items():
        other = against[name]
        ratios = [one / two for one, two in zip(own, seconds[other], strict=True)]
        rate = options.pairs / statistics.median(own)
        median = statistics.median(ratios)
        print(
            f"{name:<14} {statistics.median(own):7.3f} s  {rate:6.1f} pairs/s  {median:.3f} of {other}"
        )


if __name__ == "__main__":
    main()
