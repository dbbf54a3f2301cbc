"""Losses, margins and every gradient against TRL's trainers, over three steps.

TRL takes all pairs of a step as one micro-batch, since some of its losses are means over one; here
they are divided unequally.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.support.command.language_model import tokenizer
from tests.support.training import VOCABULARY as TOKENS
from trainer.config.sections.pair_losses import PairsSection
from trainer.models.spec import LanguageModel, OutputHead
from trainer.recipes.pairs.losses import LOSSES
from trainer.recipes.pairs.task import FIGURES, PairsTask
from trainer.tasks.task import IGNORED, Batch

RATE = 0.1
"""The length of each step."""
PARTS = (2, 2, 1)
"""The pairs of each micro-batch."""
Step = Callable[[nn.Module], tuple[float, dict[str, float]]]
"""Computes gradients; returns the loss, and rewards."""


def llama() -> nn.Module:
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=TOKENS, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, initializer_range=0.3, pad_token_id=0,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config)  # type: ignore[no-any-return]


def rows(prompt: int) -> list[dict[str, str]]:
    """Draw pairs whose prompts have at most so many words."""
    rng = np.random.default_rng(1)

    def text(least: int, most: int) -> str:
        return " ".join(f"w{word}" for word in rng.integers(4, TOKENS, rng.integers(least, most)))

    return [
        {"prompt": text(1, prompt + 1), "chosen": " " + text(1, 7), "rejected": " " + text(1, 9)}
        for _ in range(sum(PARTS))
    ]


def sample(inputs: list[int], first: int) -> dict[str, np.ndarray]:
    """Return a sequence whose tokens from the `first` on are scored."""
    tokens = np.array(inputs)
    targets = np.where(np.arange(1, len(tokens)) >= first, tokens[1:], IGNORED)
    return {"input_ids": tokens[:-1], "targets": targets}


def ours(model: nn.Module, keys: PairsSection, pairs: list[dict[str, Any]]) -> Step:
    language = LanguageModel(head=OutputHead(plain=True))
    task = PairsTask(language).comparing(keys)
    task.prepare(model)
    batches: list[Batch] = []
    starts = np.cumsum((0, *PARTS))
    for start, end in zip(starts[:-1], starts[1:], strict=True):
        batches.append(task.collate(pairs[start:end]))
    if LOSSES[keys.loss].has_reference:
        for batch in batches:
            with torch.no_grad():
                losses = task._token_losses(model.eval(), batch)
                known = task.pairs_of(losses, batch)
            batch["reference"] = torch.stack([known.chosen, known.rejected], 1)

    def step(model: nn.Module) -> tuple[float, dict[str, float]]:
        model.train()
        task.started(batches, lambda counts: counts)
        total = 0.0
        for batch in batches:
            loss = task.loss_sum(model, batch) / sum(PARTS)
            loss.backward()
            total += float(loss.detach())
        figures = task.take_figures()
        assert figures is not None
        means = (figures[:-1] / figures[-1]).tolist()
        return total, dict(zip(FIGURES, means, strict=True))

    return step


def theirs_of_dpo(folder: Path, keys: PairsSection) -> tuple[Any, Step, list[dict[str, Any]]]:
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    llama().save_pretrained(folder / "model")
    words = tokenizer(pad_token="<system>")
    kinds, weights = [keys.loss], [1.0]
    if keys.sft_weight:
        kinds.append("sft")
        weights.append(keys.sft_weight)
    arguments = DPOConfig(
        output_dir=str(folder / "out"), loss_type=kinds, loss_weights=weights, beta=keys.beta,
        label_smoothing=keys.label_smoothing, bf16=False, use_cpu=True, report_to=[],
        per_device_train_batch_size=sum(PARTS), gradient_checkpointing=False, max_length=None,
    )  # fmt: skip
    trainer = DPOTrainer(
        str(folder / "model"), args=arguments, train_dataset=Dataset.from_list(rows(5)),
        processing_class=words,
    )  # fmt: skip
    known = list(trainer.train_dataset)
    inputs = trainer.data_collator(known)

    def step(model: nn.Module) -> tuple[float, dict[str, float]]:
        model.train()
        loss = trainer.compute_loss(model, inputs)
        loss.backward()
        metrics = {name: value[-1] for name, value in trainer._metrics["train"].items()}
        return float(loss.detach()), metrics

    pairs = [
        {
            side: sample(row["prompt_ids"] + row[f"{side}_ids"], len(row["prompt_ids"]))
            for side in ("chosen", "rejected")
        }
        | {"margin": 0.0}
        for row in known
    ]
    return trainer.model, step, pairs


def theirs_without_reference(
    folder: Path, keys: PairsSection
) -> tuple[Any, Step, list[dict[str, Any]]]:
    from datasets import Dataset
    from trl.experimental.cpo import CPOConfig, CPOTrainer
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    common: dict[str, Any] = {
        "output_dir": str(folder / "out"), "beta": keys.beta, "bf16": False, "use_cpu": True,
        "report_to": [], "per_device_train_batch_size": sum(PARTS), "max_length": 64,
        "gradient_checkpointing": False, "remove_unused_columns": False,
    }  # fmt: skip
    weight = LOSSES[keys.loss].sft_weight if keys.sft_weight is None else keys.sft_weight
    arguments: Any
    if keys.loss == "orpo":
        kind, arguments = ORPOTrainer, ORPOConfig(**common)
    else:
        loss = "simpo" if keys.loss == "simpo" else "sigmoid"
        more = {"label_smoothing": keys.label_smoothing, "simpo_gamma": keys.gamma}
        kind, arguments = CPOTrainer, CPOConfig(**common, loss_type=loss, cpo_alpha=weight, **more)
    # of ORPO's prompts, a token is learned unless it is the first
    data = Dataset.from_list(rows(1 if keys.loss == "orpo" else 5))
    words = tokenizer(pad_token="<system>")
    trainer = kind(llama(), args=arguments, train_dataset=data, processing_class=words)
    known = list(trainer.train_dataset)
    inputs = trainer.data_collator(known)

    def step(model: nn.Module) -> tuple[float, dict[str, float]]:
        model.train()
        loss, metrics = trainer.get_batch_loss_metrics(model, inputs, train_eval="train")
        loss.backward()
        return float(loss.detach()), {name: float(value) for name, value in metrics.items()}

    def side_of(row: dict[str, Any], side: str) -> dict[str, np.ndarray]:
        first = next(n for n, label in enumerate(row[f"{side}_labels"]) if label != IGNORED)
        return sample(row[f"{side}_input_ids"], first)

    pairs = [
        {side: side_of(row, side) for side in ("chosen", "rejected")} | {"margin": 0.0}
        for row in known
    ]
    return trainer.model, step, pairs


CASES: dict[str, dict[str, Any]] = {
    **{name: {"loss": name} for name in ("sigmoid", "hinge", "ipo", "apo_zero", "apo_down")},
    **{name: {"loss": name} for name in ("nca_pair", "bco_pair", "sppo_hard", "sigmoid_norm")},
    **{name: {"loss": name, "label_smoothing": 0.1} for name in ("robust", "exo_pair")},
    "sigmoid and sft": {"loss": "sigmoid", "sft_weight": 0.7, "beta": 0.3},
    "simpo": {"loss": "simpo", "beta": 2.0, "gamma": 1.0},
    "simpo, smoothed": {"loss": "simpo", "beta": 2.0, "label_smoothing": 0.2, "sft_weight": 0.0},
    "cpo": {"loss": "cpo"},
    "cpo, smoothed": {"loss": "cpo", "label_smoothing": 0.2, "sft_weight": 0.5},
    "orpo": {"loss": "orpo", "beta": 0.2},
}


@pytest.mark.first("sigmoid")
@pytest.mark.parametrize("name", CASES)
def test_three_steps_are_trl_s(name: str, tmp_path: Path) -> None:
    keys = PairsSection(**CASES[name])
    build = theirs_of_dpo if LOSSES[keys.loss].has_reference else theirs_without_reference
    reference, their_step, pairs = build(tmp_path, keys)
    model = llama()
    model.load_state_dict(copy.deepcopy(reference.state_dict()))
    own_step = ours(model, keys, pairs)
    for _ in range(3):
        loss, figures = own_step(model)
        expected, metrics = their_step(reference)
        assert loss == pytest.approx(expected, rel=1e-6, abs=1e-6)
        compared = ["rewards/margins", "rewards/accuracies", "rewards/chosen"]
        if keys.loss not in ("simpo", "orpo"):  # which log means of an answer's tokens
            compared.append("logps/chosen")
        for figure in compared:
            assert figures[figure] == pytest.approx(metrics[figure], rel=2e-6, abs=2e-6)
        theirs = dict(reference.named_parameters())
        gradients = [one.grad for one in theirs.values() if one.grad is not None]
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        largest = max(float(gradient.abs().max()) for gradient in gradients)
        for parameter_name, parameter in model.named_parameters():
            gradient, wanted = parameter.grad, theirs[parameter_name].grad
            assert gradient is not None
            assert wanted is not None
            assert float((gradient - wanted).abs().max()) <= 1e-6 * max(largest, 1.0), (
                parameter_name
            )
            with torch.no_grad():
                theirs[parameter_name] -= RATE * wanted / norm
                parameter.copy_(theirs[parameter_name])
        model.zero_grad()
        reference.zero_grad()


def made_up(count: int) -> list[dict[str, Any]]:
    return [
        {side: sample(list(range(4, 12 + n)), 5) for side in ("chosen", "rejected")}
        | {"margin": 0.0, "reference": np.zeros(2)}
        for n in range(count)
    ]


def test_the_head_computes_scored_tokens_alone() -> None:
    model = llama()
    task = PairsTask(LanguageModel(head=OutputHead(plain=True))).comparing(PairsSection())
    task.prepare(model)
    actual = []
    model.get_output_embeddings().register_forward_pre_hook(  # type: ignore[operator]
        lambda _, inputs: actual.append(inputs[0].shape[0])
    )
    pairs = made_up(2)
    task.loss_sum(model, task.collate(pairs)).backward()
    scored = sum(
        int((pair[side]["targets"] != IGNORED).sum())
        for pair in pairs
        for side in ("chosen", "rejected")
    )
    assert actual == [scored]


def test_a_micro_batch_of_blanks_has_gradients_of_zero() -> None:
    model = llama()
    task = PairsTask(LanguageModel(head=OutputHead(plain=True))).comparing(PairsSection())
    task.prepare(model)
    batch = task.collate([task.blank(pair) for pair in made_up(2)])
    loss = task.loss_sum(model, batch)
    loss.backward()
    assert float(loss.detach()) == 0
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert not parameter.grad.any(), name
