"""The losses of labels and rewards are those of transformers' own heads, and of TRL.

The oracle is one batch in one process: transformers' Trainer multiplies the gradients of these heads
by accumulation and ranks.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from tests.support.labels import BODIES
from trainer.config.sections.model_and_data import ModelSection
from trainer.models.materialise import on_host
from trainer.recipes.labels.kinds import KINDS, LabelKind, Reward
from trainer.recipes.labels.model import labelled_config, made_up, spec_of, task_of

LENGTHS = (11, 4, 9, 1, 7, 2)
COUNTS = {"single": 3, "multi": 4, "regression": 2, "tokens": 5, "reward": 1}


def kind_of(name: str) -> LabelKind:
    return Reward(1, centring=0.05) if name == "reward" else KINDS[name](COUNTS[name])


def model_of(body: str, kind: LabelKind) -> Any:
    """Return a spec, and a model with values, whose padding is 0."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(**BODIES[body])
    labelled_config(config, kind, (), 0)
    spec = spec_of(config, ModelSection(), kind)
    return spec, on_host(spec).eval()


def gradients(model: Any) -> dict[str, torch.Tensor]:
    results = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return results


def assert_equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        scale = float(value.abs().max()) or 1.0
        assert float((ours[name] - value).abs().max()) <= 5e-6 * scale + 1e-9, name


@pytest.mark.parametrize("name", ["single", "multi", "regression", "tokens"])
@pytest.mark.parametrize("body", ["llama", "bert", "modernbert", "deberta-v2"])
def test_loss_and_gradients_are_those_of_the_model_s_own_head(body: str, name: str) -> None:
    """Over micro-batches, each as a sum, against one batch whose mean transformers takes."""
    kind = kind_of(name)
    spec, model = model_of(body, kind)
    task = task_of(spec, kind)
    samples = made_up(kind, LENGTHS, 61)
    whole = task.collate(samples)
    count = int(task.targets(whole))
    inputs = {key: whole[key] for key in ("input_ids", "attention_mask", "labels")}
    own = model(**inputs).loss
    own.backward()
    theirs = gradients(model)
    total = 0.0
    for part in (samples[:1], samples[1:4], samples[4:]):
        loss = task.loss_sum(model, task.collate(part)) / count
        loss.backward()
        total += float(loss.detach())
    assert total == pytest.approx(float(own.detach()), rel=2e-6)
    assert_equal(gradients(model), theirs)


@pytest.mark.parametrize("body", ["llama", "bert"])
def test_rewards_are_trained_as_by_trl(body: str) -> None:
    """Margins and the centring term on, TRL's batch as one: its loss is a mean of a batch."""
    from types import SimpleNamespace

    from trl import RewardTrainer

    kind = kind_of("reward")
    spec, model = model_of(body, kind)
    task = task_of(spec, kind)
    samples = made_up(kind, LENGTHS, 61)
    whole = task.collate(samples)
    order = [*range(0, 2 * len(samples), 2), *range(1, 2 * len(samples), 2)]
    inputs = {name: whole[name][order] for name in ("input_ids", "attention_mask")}
    stub = SimpleNamespace(
        model=model,
        args=SimpleNamespace(center_rewards_coefficient=0.05),
        accelerator=SimpleNamespace(gather=lambda x: x, gather_for_metrics=lambda x: x),
        _metrics={"eval": {name: [] for name in TRL_METRICS}},
        _total_train_tokens=0,
    )
    # a body without a cache takes no such argument, which TRL gives to every model
    takes = "use_cache" in model.forward.__code__.co_varnames or task._options
    call = model if takes else lambda use_cache=None, **rest: model(**rest)
    own = RewardTrainer.compute_loss(stub, call, inputs | {"margin": whole["margins"]})
    own.backward()
    theirs = gradients(model)
    total = 0.0
    for part in (samples[:2], samples[2:3], samples[3:]):
        loss = task.loss_sum(model, task.collate(part)) / len(samples)
        loss.backward()
        total += float(loss.detach())
    assert total == pytest.approx(float(own.detach()), rel=2e-6)
    assert_equal(gradients(model), theirs)
    measured = task.measuring().measured(model, whole)[1:] / len(samples)
    figures = kind.figures(dict(zip(kind.measures, measured.tolist(), strict=True)))
    metrics = stub._metrics["eval"]
    assert figures["accuracy"] == pytest.approx(metrics["accuracy"][0])
    assert figures["margin"] == pytest.approx(metrics["margin"][0], abs=1e-6)


TRL_METRICS = ("min_reward", "mean_reward", "max_reward", "accuracy", "margin", "num_tokens")


@pytest.mark.parametrize("body", ["llama", "qwen3", "bert", "modernbert", "deberta-v2"])
def test_the_score_of_a_sequence_is_that_of_it_alone(body: str) -> None:
    spec, model = model_of(body, kind_of("single"))
    task = task_of(spec, kind_of("single"))
    samples = made_up(task.kind, LENGTHS, 61)
    with torch.no_grad():
        padded = task.logits(model, task.collate(samples))
        alone = torch.cat([task.logits(model, task.collate([sample])) for sample in samples])
    assert float((padded - alone).abs().max()) < 1e-5


@pytest.mark.parametrize("body", ["llama", "qwen3"])
def test_padding_on_the_left_gives_the_same_scores(body: str) -> None:
    """Of a causal model; the head of a bidirectional one is on the first token."""
    spec, model = model_of(body, kind_of("single"))
    task = task_of(spec, kind_of("single"))
    padded = task.collate(made_up(task.kind, LENGTHS, 61))
    left = {key: padded[key].clone() for key in ("input_ids", "attention_mask")}
    for row, length in enumerate(LENGTHS):
        for value in left.values():
            value[row] = value[row].roll(value.shape[1] - length)
    places = (left["attention_mask"].cumsum(1) - 1).clamp_min(0)
    with torch.no_grad():
        right = task.logits(model, padded)
        moved = model(**left, position_ids=places, use_cache=False).logits
    assert float((moved - right).abs().max()) < 1e-5


def test_label_smoothing_is_pytorch_s() -> None:
    kind = kind_of("tokens")
    spec, model = model_of("llama", kind)
    task = task_of(spec, kind).regularised(spec, 0.2, 0.0)
    batch = task.collate(made_up(kind, LENGTHS, 61))
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    expected = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum", label_smoothing=0.2
    )
    trained = copy.deepcopy(model)
    for module in trained.modules():
        module.training = module is trained  # smoothed in training, without dropout
    loss = task.loss_sum(trained, batch).detach()
    assert float(loss) == pytest.approx(float(expected.detach()), rel=1e-6)


def test_blank_samples_count_for_nothing() -> None:
    for name in COUNTS:
        kind = kind_of(name)
        spec, model = model_of("llama", kind)
        task = task_of(spec, kind).measuring()
        samples = made_up(kind, LENGTHS[:3], 61)
        filled = [*samples, *(task.blank(sample) for sample in samples[:2])]
        with torch.no_grad():
            plain = task.measured(model, task.collate(samples))
            more = task.measured(model, task.collate(filled))
        assert torch.allclose(plain, more, rtol=1e-5, atol=1e-5), name
        blank = task.collate([task.blank(samples[0])])
        assert int(task.targets(blank)) == 0
        assert bool(task.loss_sum(model, blank).detach().isfinite())
