"""Label smoothing and NEFTune's noise: as published, in training alone, the same under every
engine.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from tests.support.layouts import DATA, HSDP, SPLIT, STAGES, STAGES_4, by_engine
from tests.support.messages import shows
from tests.support.pool import machine_here
from tests.support.training import (
    GPT2,
    LLAMA,
    Case,
    assert_same,
    resume_by_engine,
    spec_of,
    task_of,
    train_by_engine,
    train_plainly,
)
from trainer.config import load
from trainer.errors import ConfigError
from trainer.tasks.losses import chunks
from trainer.tasks.losses.cross_entropy import (
    LossOptions,
    linear_cross_entropy,
    logits_cross_entropy,
)
from trainer.tasks.supervised import Supervised

BOTH = {"label_smoothing": 0.2, "neftune_alpha": 5.0}
UNTIED = LLAMA | {"tie_word_embeddings": False}
LAYOUTS = {
    "ddp, gpt2, full": replace(DATA, zero_stage=0, model=GPT2, recompute="full", **BOTH),
    "zero2": replace(DATA, zero_stage=2, **BOTH),
    "zero3": replace(DATA, zero_stage=3, **BOTH),
    "zero3, gpt2": replace(DATA, zero_stage=3, model=GPT2, **BOTH),
    "zero3, a frozen table": replace(
        DATA, zero_stage=3, model=UNTIED, freeze=("*embed_tokens*",), **BOTH
    ),
    "pipeline": replace(STAGES, **BOTH),
    "tensor": replace(SPLIT, **BOTH),
    "hsdp": replace(HSDP, zero_stage=3, **BOTH),
    "pipeline x zero2, ZBVZeroBubble": replace(
        STAGES_4, zero_stage=2, schedule="ZBVZeroBubble", **BOTH
    ),
}
CASES = by_engine(LAYOUTS)


@pytest.mark.first("deepspeed-zero2", "mesh-zero3, gpt2", "mesh-pipeline")
@pytest.mark.parametrize("name", CASES)
def test_both_train_as_in_one_process(pools, name):
    case = CASES[name]
    reference = train_plainly(case)
    for outcome in pools[case.world_size].run(train_by_engine, case=case):
        assert_same(outcome, reference, 2e-6)


@pytest.mark.more
@pytest.mark.parametrize("name", ["deepspeed-zero2", "mesh-zero3, gpt2"])
def test_a_resumed_run_draws_the_same_noise(pools, tmp_path, name):
    case = CASES[name]
    for losses, _ in pools[2].run(resume_by_engine, before=case, after=case, folder=tmp_path):
        assert losses[0] == losses[1]


def certified(
    path: str,
    world_size: int,
    overrides: list[str],
    planted: bool = False,
    precision: str = "float32",
) -> tuple[bool, str]:
    """Runs on each rank of a pool. The fault: noise by the width of the padded sequences, as in TRL."""
    import contextlib

    from trainer.certify.certificate import certify, table
    from trainer.certify.tiny_run import tiny_run
    from trainer.recipes.causal_lm.embedding_noise import EmbeddingNoise

    def padded(self, lengths, ranks=None):
        self._lengths = lengths.max().expand_as(lengths)

    with (
        mock.patch.object(EmbeddingNoise, "start", padded) if planted else contextlib.nullcontext()
    ):
        certificate = certify(tiny_run(path, overrides, world_size, precision), machine_here())
    return certificate.passed, table(certificate)


@pytest.mark.more
@pytest.mark.parametrize(("engine", "stage"), [("mesh", 3), ("deepspeed", 2)])
def test_both_are_certified_and_a_fault_is_caught(pools, tmp_path, engine, stage):
    from tests.support.certify.certifying import config

    path = config(tmp_path, engine, stage, **BOTH)
    for passed, table in pools[2].run(certified, path=path, world_size=2, overrides=[]):
        assert passed, table
    if engine == "mesh":
        for passed, table in pools[2].run(
            certified, path=path, world_size=2, overrides=[], planted=True
        ):
            assert not passed
            shows(table.splitlines()[-1], "first differs", "step 0")


@pytest.mark.more
@pytest.mark.parametrize("override", ["trainer.data.documents=pack", "bf16.enabled=true"])
def test_both_are_certified_packed_and_in_low_precision(pools, tmp_path, override):
    from tests.support.certify.certifying import config

    path, precision = (
        config(tmp_path, "mesh", 2, **BOTH),
        "config" if "bf16" in override else "float32",
    )
    messages = {"path": path, "world_size": 2, "overrides": [override], "precision": precision}
    for passed, table in pools[2].run(certified, **messages):
        assert passed, table


# Without processes


@pytest.mark.parametrize("rows", [3, 1000])
def test_smoothed_labels_are_those_of_pytorch_in_chunks_and_whole(monkeypatch, rows):
    torch.manual_seed(0)
    hidden, weight, bias = (
        torch.randn(*size, dtype=torch.float64, requires_grad=True)
        for size in ((13, 8), (17, 8), (17,))
    )
    targets = torch.randint(17, (13,)).index_fill_(0, torch.tensor([0, 5]), -100)
    monkeypatch.setattr(chunks, "CHUNK_BYTES", rows * 17 * 8)
    logits = F.linear(hidden, weight, bias)
    expected = F.cross_entropy(
        logits, targets, reduction="sum", ignore_index=-100, label_smoothing=0.3
    )
    smoothed = LossOptions(smoothing=0.3)
    wanted = torch.autograd.grad(expected * 3, (hidden, weight, bias), retain_graph=True)
    for ours in (
        linear_cross_entropy(hidden, weight, bias, targets, smoothed),
        logits_cross_entropy(logits, targets, smoothed),
    ):
        torch.testing.assert_close(ours, expected)
        for mine, theirs in zip(
            torch.autograd.grad(ours * 3, (hidden, weight, bias), retain_graph=True),
            wanted,
            strict=True,
        ):
            torch.testing.assert_close(mine, theirs)


def test_a_routers_loss_stays_beside_smoothed_labels():
    """Of a model whose own forward makes the loss."""
    from trainer.probes.probe import tiny

    sizes = LLAMA | {"model_type": "mixtral", "num_local_experts": 4, "output_router_logits": True}
    _, model = tiny(spec_of({key: value for key, value in sizes.items() if "dropout" not in key}))
    spec = spec_of({key: value for key, value in sizes.items() if "dropout" not in key})
    task = task_of(spec)
    batch = task.collate([{"input_ids": [3, 4, 5], "targets": [4, 5, 6]}])
    logits = model.train()(**{"input_ids": batch["input_ids"]}).logits
    own = (
        model(
            input_ids=batch["input_ids"], labels=batch["targets"], shift_labels=batch["targets"]
        ).loss
        * 3
    )
    flat = logits.flatten(0, 1), batch["targets"].flatten()
    moved = F.cross_entropy(*flat, reduction="sum", label_smoothing=0.2) - F.cross_entropy(
        *flat, reduction="sum"
    )
    smooth = task.regularised(spec, 0.2, 0.0)
    result = smooth.loss_sum(smooth.prepare(model), batch)
    torch.testing.assert_close(result, own + moved, rtol=1e-5, atol=0)


def embedded(
    spec: Any, samples: list[dict], training: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the blocks are given, without noise and with it."""
    from trainer.probes.probe import drawn

    results = []
    for alpha in (0.0, 7.0):
        task = task_of(spec, Case(neftune_alpha=alpha))
        task = task.packing() if "documents" in samples[0] else task
        model = task.prepare(drawn(spec))
        model.get_input_embeddings().register_forward_hook(
            lambda *given: results.append(given[-1].detach())
        )
        torch.manual_seed(3)
        task.loss_sum(model.train(training), task.collate(samples))
    return results[0], results[1]


SPEC = {key: value for key, value in LLAMA.items() if "dropout" not in key}
ROW = {"input_ids": [5, 6, 7, 8, 9, 10], "targets": [6, 7, 8, 9, 10, 11]}


def test_the_noise_is_the_published_one_by_the_tokens_of_each_document():
    short = {key: value[:2] for key, value in ROW.items()}
    plain, noisy = embedded(spec_of(SPEC), [ROW, short])
    torch.manual_seed(3)
    draws = torch.rand(plain.shape) * 2 - 1
    for row, length in enumerate((6, 2)):  # the second is padded
        torch.testing.assert_close(noisy[row], plain[row] + draws[row] * 7 / (length * 32) ** 0.5)
    plain, packed = embedded(spec_of(SPEC), [ROW | {"documents": [4, 2]}])
    bounds = torch.tensor([7 / (n * 32) ** 0.5 for n in (4, 4, 4, 4, 2, 2)])[:, None]
    torch.manual_seed(3)
    torch.testing.assert_close(packed[0], plain[0] + (torch.rand(plain.shape)[0] * 2 - 1) * bounds)


def test_an_evaluation_has_neither():
    plain, noisy = embedded(spec_of(SPEC), [ROW], training=False)
    assert torch.equal(plain, noisy)
    from trainer.probes.probe import drawn

    spec, losses = spec_of(SPEC), []
    for case in (Case(), Case(**BOTH)):
        task = task_of(spec, case)
        with torch.no_grad():
            losses.append(task.measured(task.prepare(drawn(spec)).eval(), task.collate([ROW])))
    assert torch.equal(*losses)


def test_images_have_smoothed_labels_in_training_alone():
    from trainer.recipes.images.task import ImageClassification

    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 3))
    task = ImageClassification(3, lambda: deepcopy(model).to("meta"), ()).regularised(
        spec_of(SPEC), 0.2, 0.0
    )
    batch = task.collate([(torch.ones(1, 2, 2), 1), (torch.zeros(1, 2, 2), 2)])
    logits = model(batch["input"])
    for training, smoothing in ((True, 0.2), (False, 0.0)):
        expected = F.cross_entropy(
            logits, batch["target"], reduction="sum", label_smoothing=smoothing
        )
        torch.testing.assert_close(task.loss_sum(model.train(training), batch), expected)
    torch.testing.assert_close(task.measured(model, batch)[0], expected)


def test_what_has_no_such_thing_is_an_error():
    own = Supervised(lambda output, target: (output.sum(), 1), lambda: torch.nn.Linear(2, 2))
    for key, value in BOTH.items():
        section = load({}, [f"trainer.{key}={value}"]).trainer
        with pytest.raises(ConfigError, match=f"trainer.{key}"):
            own.regularised(spec_of(SPEC), section.label_smoothing, section.neftune_alpha)
