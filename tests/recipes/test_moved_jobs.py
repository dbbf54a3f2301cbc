"""A job of TRL's, imported and trained: the losses and the weights are those of TRL's trainer."""

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

STEPS = 3
PAIRS = 4
"""The pairs of a step, which are all: so the order of samples changes nothing."""
JOBS: dict[str, dict[str, Any]] = {
    "trl-dpo": {"beta": 0.3, "learning_rate": 1e-2, "max_length": 12},
    "trl-dpo, ipo, an adapter": {
        "loss_type": ["ipo"], "learning_rate": 1e-2, "use_peft": True, "lora_r": 4,
        "lora_target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.3,
    },
    "trl-dpo, with sft": {
        "loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5],
        "per_device_train_batch_size": PAIRS, "gradient_accumulation_steps": 1,
    },
    "trl-cpo": {"cpo_alpha": 0.0, "loss_type": "simpo", "simpo_gamma": 1.0, "beta": 2.0},
    "trl-reward": {"center_rewards_coefficient": 0.01},
}  # fmt: skip
"""Arguments of TRL's scripts, by the name under which they are imported.

The cross-entropy of TRL is a mean of its micro-batch, which is therefore the whole step.
"""


def write_job(folder: Path, reward: bool) -> dict[str, Any]:
    """Write a model, its tokenizer and pairs, of which one is cut; return the common arguments."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaConfig

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, initializer_range=0.3, pad_token_id=3,
        eos_token_id=0, num_labels=1,
    )  # fmt: skip
    auto = AutoModelForSequenceClassification if reward else AutoModelForCausalLM
    auto.from_config(config).save_pretrained(folder / "model")
    tokenizer(pad_token="<system>").save_pretrained(folder / "model")
    rng = np.random.default_rng(1)

    def text(least: int, most: int) -> str:
        return " ".join(
            f"w{word}" for word in rng.integers(4, VOCABULARY, rng.integers(least, most))
        )

    rows = [
        {"prompt": text(1, 6), "chosen": f" {text(1, 9)}", "rejected": f" {text(1, 9)}"}
        for _ in range(PAIRS)
    ]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "model_name_or_path": str(folder / "model"),
        "dataset_name": str(folder / "pairs.jsonl"),
        "output_dir": str(folder / "runs" / "moved"),
        "bf16": False,
        "learning_rate": 1e-3,
        "num_train_epochs": STEPS,
        "per_device_train_batch_size": PAIRS // 2,
        "gradient_accumulation_steps": 2,
        "report_to": "none",
    }


def theirs(folder: Path, system: str, given: dict[str, Any]) -> tuple[list[float], dict[str, Any]]:
    """Train with TRL's trainer; return the loss of each step, and the trained tensors."""
    import trl
    from datasets import load_dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import ModelConfig, get_peft_config
    from trl.experimental.cpo import CPOConfig, CPOTrainer

    models = {key: value for key, value in given.items() if key in vars(ModelConfig())}
    own = {key: value for key, value in given.items() if key not in (*models, "dataset_name")}
    configs = {"trl-dpo": trl.DPOConfig, "trl-cpo": CPOConfig, "trl-reward": trl.RewardConfig}
    trainers = {"trl-dpo": trl.DPOTrainer, "trl-cpo": CPOTrainer, "trl-reward": trl.RewardTrainer}
    losses: list[float] = []

    kind: Any = trainers[system]

    class Listening(kind):  # type: ignore[misc]
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            losses.append(float(loss.detach()))
            return loss

    arguments = configs[system](**own, use_cpu=True, logging_steps=1, save_strategy="no")
    data = load_dataset("json", data_files=given["dataset_name"], split="train")
    model: Any = given["model_name_or_path"]
    words = AutoTokenizer.from_pretrained(model)
    peft = get_peft_config(ModelConfig(**models))
    if system == "trl-cpo":
        model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    trainer = Listening(
        model, args=arguments, train_dataset=data, processing_class=words, peft_config=peft
    )
    torch.manual_seed(0)
    for name, parameter in trainer.model.named_parameters():
        if "lora_A" in name:  # drawn anew by each trainer
            with torch.no_grad():
                parameter.copy_(torch.linspace(-0.3, 0.3, parameter.numel()).view_as(parameter))
    trainer.train()
    parts = given["gradient_accumulation_steps"]
    steps = [losses[first : first + parts] for first in range(0, len(losses), parts)]
    tensors = {name: value.detach() for name, value in trainer.model.named_parameters()}
    return [sum(step) / parts for step in steps], tensors


def imported(folder: Path, system: str, given: dict[str, Any]) -> list[float]:
    """Import the arguments, train, and return the loss of each step."""
    (folder / "theirs.json").write_text(json.dumps(given))
    target = folder / "ours.json"
    assert main(["--from", system, str(folder / "theirs.json"), "--output", str(target)], "x") == 0
    requested = json.loads(target.read_text())
    requested["trainer"] |= {"device": "cpu", "log": {"every": 1}}
    words = ("train_batch_size=4", "--processes", "1")
    result = command(folder, requested, "train", *words)
    assert result.returncode == 0, result.stdout + result.stderr
    text = (folder / "runs" / "moved" / "metrics.jsonl").read_text()
    rows = [json.loads(line) for line in text.splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


@pytest.mark.more
@pytest.mark.parametrize("name", [name for name in JOBS if "adapter" not in name])
def test_an_imported_job_trains_as_trl_does(name: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    system = name.partition(",")[0]
    given = write_job(tmp_path, system == "trl-reward") | JOBS[name]
    own = imported(tmp_path, system, given)
    expected, tensors = theirs(tmp_path, system, given)
    assert own == pytest.approx(expected, rel=2e-5, abs=2e-5)
    trained = load_file(tmp_path / "runs" / "moved" / "final" / "model.safetensors")
    moved = 0.0
    for key, value in tensors.items():
        assert float((trained[key] - value).abs().max()) <= 2e-5, key
        moved = max(moved, float(value.abs().max()))
    assert moved > 0


@pytest.mark.more
def test_the_first_loss_of_an_imported_adapter_is_trl_s(tmp_path: Path) -> None:
    """Each draws its adapter again, but an adapter begins as nothing, and disable_dropout turns off
    its dropout: so the first loss is the same, and the later ones are near it.
    """
    name = "trl-dpo, ipo, an adapter"
    given = write_job(tmp_path, False) | JOBS[name]
    own = imported(tmp_path, "trl-dpo", given)
    expected, _ = theirs(tmp_path, "trl-dpo", given)
    assert own[0] == pytest.approx(expected[0], rel=1e-6)
    assert own[1:] != own[:-1]
