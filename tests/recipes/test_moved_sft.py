"""A fine-tuning of the Trainer's or of TRL's, imported and trained: the losses and the weights are
those of theirs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.command.language_model import tokenizer
from tests.support.plugins import command
from tests.support.training import VOCABULARY
from trainer.command.import_config import main

ROWS = 4
"""The rows of a step, which are all: so the order of samples changes nothing."""
ARGUMENTS: dict[str, Any] = {
    "bf16": False,
    "learning_rate": 1e-2,
    "weight_decay": 0.1,
    "max_grad_norm": 0.5,
    "lr_scheduler_type": "cosine",
    "num_train_epochs": 3,
    "per_device_train_batch_size": ROWS // 2,
    "gradient_accumulation_steps": 2,
    "report_to": "none",
}


def write_job(folder: Path) -> dict[str, Any]:
    """Write a model, its tokenizer and rows of unequal lengths; return the arguments."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, initializer_range=0.3, pad_token_id=3,
        eos_token_id=0,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")
    tokenizer(pad_token="<system>").save_pretrained(folder / "model")
    rng = np.random.default_rng(1)

    def text(most: int) -> str:
        return " ".join(f"w{word}" for word in rng.integers(4, VOCABULARY, rng.integers(2, most)))

    rows = [{"prompt": text(6), "completion": f" {text(9)}"} for _ in range(ROWS)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "ds.json").write_text(
        json.dumps(
            {
                "train_batch_size": "auto",
                "gradient_clipping": "auto",
                "zero_optimization": {"stage": 2},
            }
        )
    )
    return ARGUMENTS | {"output_dir": str(folder / "runs" / "moved")}


def losses_of(trainer: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train; return the loss that each step logs, and the trained tensors."""
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    return losses, {name: value.detach() for name, value in trainer.model.named_parameters()}


def by_trl(folder: Path, given: dict[str, Any]) -> tuple[list[float], dict[str, torch.Tensor]]:
    import trl
    from datasets import load_dataset

    arguments = trl.SFTConfig(
        **given, max_length=32, use_cpu=True, logging_steps=1, save_strategy="no"
    )
    data = load_dataset("json", data_files=str(folder / "rows.jsonl"), split="train")
    return losses_of(trl.SFTTrainer(str(folder / "model"), args=arguments, train_dataset=data))


def by_trainer(folder: Path, given: dict[str, Any]) -> tuple[list[float], dict[str, torch.Tensor]]:
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        DataCollatorForSeq2Seq,
        Trainer,
        TrainingArguments,
    )

    words = AutoTokenizer.from_pretrained(folder / "model")
    rows = []
    for line in (folder / "rows.jsonl").read_text().splitlines():
        row = json.loads(line)
        prompt, answer = (
            words(row[key], add_special_tokens=False).input_ids for key in ("prompt", "completion")
        )
        answer = [*answer, words.eos_token_id]
        rows.append({"input_ids": prompt + answer, "labels": [-100] * len(prompt) + answer})
    arguments = TrainingArguments(**given, use_cpu=True, logging_steps=1, save_strategy="no")
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    collate = DataCollatorForSeq2Seq(words, label_pad_token_id=-100)
    return losses_of(Trainer(model, arguments, data_collator=collate, train_dataset=rows))


def imported(folder: Path, given: dict[str, Any]) -> list[float]:
    """Import the arguments, train, and return the loss of each step."""
    more = {
        "model_name_or_path": str(folder / "model"),
        "dataset_name": str(folder / "rows.jsonl"),
        "max_length": 32,
        "deepspeed": str(folder / "ds.json"),
    }
    (folder / "theirs.json").write_text(json.dumps(given | more))
    target = folder / "ours.json"
    words = ["--from", "trainer", str(folder / "theirs.json"), "--output", str(target)]
    assert main(words, "x") == 0
    config = json.loads(target.read_text())
    config["trainer"] |= {"device": "cpu", "log": {"every": 1}}
    result = command(folder, config, "train", "--processes", "1")
    assert result.returncode == 0, result.stdout + result.stderr
    text = (folder / "runs" / "moved" / "metrics.jsonl").read_text()
    return [row["loss"] for row in map(json.loads, text.splitlines()) if "loss" in row]


@pytest.mark.more
@pytest.mark.parametrize("theirs", [by_trainer, by_trl], ids=["Trainer", "TRL"])
def test_an_imported_fine_tuning_trains_as_theirs(theirs: Any, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    given = write_job(tmp_path)
    own = imported(tmp_path, given)
    expected, tensors = theirs(tmp_path, given)
    assert own == pytest.approx(expected, rel=2e-5, abs=2e-5)
    trained = load_file(tmp_path / "runs" / "moved" / "final" / "model.safetensors")
    initial = load_file(tmp_path / "model" / "model.safetensors")
    for key, value in tensors.items():
        assert float((trained[key] - value).abs().max()) <= 2e-5, key
    assert any(float((trained[key] - initial[key]).abs().max()) > 1e-2 for key in tensors)
