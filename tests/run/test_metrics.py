"""A script's metrics: the same over any ranks and batches as over the whole data at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import trainer
from tests.support.command.own_module import OWN, build, config, loss
from tests.support.messages import raises
from trainer.errors import ConfigError
from trainer.recipes.images.task import ImageClassification
from trainer.tasks.supervised import Supervised
from trainer.tasks.task import IGNORED

HELD_OUT = [(torch.tensor([i / 7, -i / 5, 1.0, i % 3]), torch.tensor(i % 2)) for i in range(13)]


def precision(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of class 1: its number depends on the output, and no mean of batches' means is right."""
    chosen = output.argmax(1) == 1
    return (chosen & (target == 1)).sum(), chosen.sum()


def margin(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, int]:
    return (output[:, 1] - output[:, 0]).sum(), len(target)


def train(tmp_path: Path, processes: int, **settings: Any) -> dict[str, float]:
    job = config(tmp_path, 2, evaluation={"samples": 13}, mesh={"shard": -1}) | settings
    given = OWN | {"evaluation_data": HELD_OUT, "metrics": {"precision": precision, "mar": margin}}
    result = trainer.train(job, **given, processes=processes, fresh=True)
    model = trainer.open(result.folder / "final", build)
    assert isinstance(model, nn.Module)
    with torch.no_grad():
        output = model(torch.stack([sample for sample, _ in HELD_OUT]))
    target = torch.stack([label for _, label in HELD_OUT])
    [evaluation] = result.evaluations
    for name, metric in (("precision", precision), ("mar", margin)):
        total, number = metric(output, target)
        assert evaluation.metrics[name] == pytest.approx(float(total / number), rel=1e-6)
    text = (result.folder / "metrics.jsonl").read_text()
    assert f'"evaluation_precision": {evaluation.metrics["precision"]}' in text
    return evaluation.metrics


def test_over_the_ranks_as_in_one_process(tmp_path: Path) -> None:
    one = train(tmp_path, 1)
    # 13 samples, unevenly over two ranks: the last batches have blanks
    sharded = {"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 2}
    assert train(tmp_path, 2, **sharded) == pytest.approx(one, rel=1e-6)


@pytest.mark.more
@pytest.mark.parametrize(
    "settings", [{"pipeline": {"stages": 2}, "train_micro_batch_size_per_gpu": 4}]
)
def test_with_a_pipeline(tmp_path: Path, settings: dict[str, Any]) -> None:
    train(tmp_path, 2, **settings)


def test_an_unfit_metric_is_one_sentence() -> None:
    cases = {
        "count": (lambda output, target: target.sum(), "metrics: count: Tensor; expected .sum"),
        "fails": (lambda output, target: output.no, "metrics: fails: AttributeError: .*; expected"),
        "loss": (margin, 'metrics: saw "loss"; expected the name of no other value'),
        "a/number": (margin, 'metrics: saw "a/number"; expected the name of no other value'),
        "each": (
            lambda o, t: (o.sum(), t),
            "metrics: each: tuple of Tensor, Tensor; expected .sum",
        ),
        "none": (
            lambda o, t: (o.sum(), None),
            "metrics: none: tuple of Tensor, NoneType; expected",
        ),
        1: (margin, "metrics: saw dict; expected a dictionary of functions by name"),
    }

    def on_meta() -> nn.Module:
        with torch.device("meta"):
            return build()

    task: Any = Supervised(loss, on_meta)
    with raises(ConfigError, "metrics: saw list", "dictionary"):
        task.measuring([margin], HELD_OUT[:2])
    for name, (metric, sentence) in cases.items():
        with pytest.raises(ConfigError, match=f"^{sentence}"):
            task.measuring({name: metric}, HELD_OUT[:2])


def test_a_stand_in_counts_for_nothing_though_its_value_is_no_number() -> None:
    def on_meta() -> nn.Module:
        with torch.device("meta"):
            return build()

    def odd(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, int]:
        return output.sum() / (target.numel() - 1), 1

    task = Supervised(loss, on_meta).measuring({"odd": odd}, HELD_OUT[:2])
    measured = task.measured(build(), task.collate([task.blank(HELD_OUT[0])]))
    assert measured.tolist() == [0.0, 0.0, 0.0]


def test_of_images_that_can_be_read() -> None:
    def on_meta() -> nn.Module:
        with torch.device("meta"):
            return nn.Sequential(nn.Flatten(), nn.Linear(4, 3))

    torch.manual_seed(0)
    samples = [(torch.randn(1, 2, 2), label) for label in (0, IGNORED, 2)]
    task = ImageClassification(3, on_meta).measuring({"number": margin}, samples)
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    measured = task.measured(model, task.collate(samples)).detach()
    assert task.measures == ("accuracy", "number", "number/number") and measured[-1] == 2
    outputs = model(torch.stack([samples[0][0], samples[2][0]])).detach()
    assert float(measured[2]) == pytest.approx(float(margin(outputs, outputs)[0]), rel=1e-6)
