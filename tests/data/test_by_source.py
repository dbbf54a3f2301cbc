"""`trainer.log.by_source`: the training loss of each source of a mixture."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tests.support.commands import write_job
from tests.support.layouts import DATA, SPLIT, STAGES_4, TIED, by_engine
from tests.support.training import LLAMA, Case, samples, spec_in, task_of
from trainer.config import load
from trainer.errors import ConfigError
from trainer.models.materialise import materialise

DRY = {key: value for key, value in LLAMA.items() if "dropout" not in key}
LAYOUTS = {
    "zero3": replace(DATA, zero_stage=3, model=DRY),
    "tensor": replace(SPLIT, model=TIED),
    "pipeline x zero2": replace(STAGES_4, zero_stage=2, model=DRY | {"num_hidden_layers": 4}),
}
CASES = by_engine(LAYOUTS)


def source_of(index: int) -> int:
    return index % 3 % 2


def watched(case: Case) -> list[list[float]]:
    """[losses, targets] of the first step, by source, on each rank of a pool. Smoothed labels count
    as they are.
    """
    from unittest import mock

    import torch.distributed as dist

    from tests.support.training import build, collated, data_rank_of, device_here, shares
    from trainer.optim.lr_schedules import Update

    tagged = [{**sample, "source": source_of(index)} for index, sample in enumerate(samples(0))]
    task = task_of(spec_in(case), case).watching(2)
    with (
        mock.patch("tests.support.training.task_of", lambda *_: task),
        mock.patch("tests.support.training.samples", lambda _: tagged),
    ):
        engine = build(case, dist.get_rank())
        batches = [
            collated(task, share) for share in shares(case, 0, data_rank_of(case, dist.get_rank()))
        ]
    metrics = engine.step(0, batches, Update(1e-2))
    engine.evaluate(batches)  # does not count
    result = task.by_source.take(metrics.group, device_here())
    assert float(result[0].sum()) == pytest.approx(
        float(metrics.loss() * metrics.targets), rel=1e-6
    )
    assert not task.by_source.take(None, device_here()).any()
    engine.close()
    return result.tolist()


@pytest.mark.first("mesh-zero3")
@pytest.mark.parametrize("name", CASES)
def test_it_is_that_of_one_process(pools, name):
    case = CASES[name]
    spec = spec_in(case)
    model = spec.build()
    materialise(model, spec, seed=5)
    expected = torch.zeros(2, 2)
    for index, sample in enumerate(samples(0)):
        logits = model(input_ids=torch.tensor(sample["input_ids"])[None].long()).logits[0]
        targets = torch.tensor(sample["targets"])
        loss = F.cross_entropy(logits, targets, reduction="sum", ignore_index=-100)
        expected[:, source_of(index)] += torch.stack([loss.detach(), (targets != -100).sum()])
    for result in pools[case.world_size].run(watched, case=case):
        torch.testing.assert_close(torch.tensor(result), expected, rtol=1e-5, atol=0)


@pytest.mark.more
def test_a_run_logs_it(pools, tmp_path: Path):
    from tests.support.models.lora import train_here

    path = write_job(tmp_path, engine="mesh", log={"every": 2, "by_source": True})
    config = json.loads(path.read_text())
    text = config["trainer"]["data"].pop("path")
    (tmp_path / "other.jsonl").write_text(json.dumps({"text": "x " * 400}) + "\n")
    labels = [
        {"path": text, "label": "code"},
        {"path": str(tmp_path / "other.jsonl"), "label": "x", "epochs": 9},
    ]
    config["trainer"]["data"] |= {"sources": labels, "evaluation_fraction": 0.0}
    path.write_text(json.dumps(config))
    assert not isinstance(pools[2].run(train_here, path=path)[0], str)
    lines = [
        json.loads(line)
        for line in (tmp_path / "runs" / "job" / "metrics.jsonl").read_text().splitlines()
    ]
    logged = [line for line in lines if "loss" in line]
    assert len(logged) == 2 and all({"loss/code", "loss/x"} <= line.keys() for line in logged)


def test_it_needs_several_sources():
    with pytest.raises(ConfigError, match="trainer.log.by_source"):
        load({}, ["trainer.log.by_source=true"])
