"""The certificate of image classifiers: small ones of their kind pass under every engine; what is
wrong is caught.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.support.certify.faults import gradients, updates
from tests.support.messages import shows
from tests.support.pool import machine_here
from trainer.certify.tiny_run import tiny_run
from trainer.errors import ConfigError

PIPELINE = ["pipeline.stages=2", "trainer.engine=mesh"]
CASES: dict[str, tuple[str, int, list[str]]] = {
    "vit, deepspeed ZeRO-3": ("vit_b_16", 2, ["zero_optimization.stage=3"]),
    "vit, mesh pipeline x ZeRO-2": ("vit_b_16", 2, [*PIPELINE, "zero_optimization.stage=2"]),
    "vit, accelerate DDP": ("vit_b_16", 2, ["trainer.engine=accelerate"]),
    "vit, accelerate FSDP": (
        "vit_b_16",
        2,
        ["trainer.engine=accelerate", "zero_optimization.stage=3"],
    ),
    "vit, mesh HSDP": (
        "vit_b_16",
        4,
        ["trainer.engine=mesh", "zero_optimization.stage=3", "trainer.mesh.shard=2"],
    ),
    "vit, deepspeed pipeline": ("vit_b_16", 2, ["pipeline.stages=2", "trainer.engine=deepspeed"]),
    "resnet50, deepspeed ZeRO-2": ("resnet50", 2, ["zero_optimization.stage=2"]),
    "resnet50, accelerate FSDP": (
        "resnet50",
        2,
        ["trainer.engine=accelerate", "zero_optimization.stage=3"],
    ),
    "resnet18, mesh pipeline": ("resnet18", 2, PIPELINE),
}


def config(folder: Path, model: str) -> str:
    content = {
        "train_batch_size": 64,
        "gradient_clipping": 0.1,
        "gradient_accumulation_steps": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.1}},
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_num_steps": 5, "warmup_max_lr": "auto"},
        },
        "trainer": {
            "task": "image_classification",
            "model": {
                "name_or_path": model,
                "config": {"dropout": 0.1} if model.startswith("vit") else None,
            },
            "data": {"path": "digits"},
        },
    }
    path = folder / "config.json"
    path.write_text(json.dumps(content))
    return str(path)


def other_labels(engine: str) -> Any:
    """One rank's images have the class after their own."""
    import torch.distributed as dist

    from trainer.recipes.images.task import ImageClassification

    real = ImageClassification.collate

    def collate(self, samples):
        batch = real(self, samples)
        return batch | {"target": (batch["target"] + dist.get_rank()) % 10}

    return mock.patch.object(ImageClassification, "collate", collate)


def certified(
    path: str,
    world_size: int,
    overrides: Sequence[str],
    fault: Callable[[str], Any] | None = None,
    precision: str = "float32",
) -> tuple[bool, str, str]:
    """Runs on each rank: whether it passed, the first check that failed, and the table."""

    from trainer.certify.certificate import certify, table

    small = tiny_run(path, list(overrides), world_size, precision)
    with contextlib.ExitStack() as stack:
        if fault:
            stack.enter_context(fault(small.config.trainer.engine))
        certificate = certify(small, machine_here())
    first = certificate.first_failure
    return certificate.passed, first.check if first else "", table(certificate)


@pytest.mark.more
@pytest.mark.parametrize("case", CASES)
def test_an_image_classifier_passes(pools, tmp_path, case):
    model, size, overrides = CASES[case]
    for passed, _, table in pools[size].run(
        certified, path=config(tmp_path, model), world_size=size, overrides=overrides
    ):
        assert passed, table
        shows(table, "a small one")


@pytest.mark.more
@pytest.mark.parametrize(
    ("case", "fault"),
    [
        ("vit, deepspeed ZeRO-3", None),
        ("vit, mesh pipeline x ZeRO-2", None),
        ("vit, accelerate FSDP", None),
        ("vit, accelerate FSDP", other_labels),
    ],
)
def test_in_bfloat16_it_passes_and_a_fault_is_caught(pools, tmp_path, case, fault):
    model, size, overrides = CASES[case]
    arguments = {
        "path": config(tmp_path, model),
        "overrides": [*overrides, "bf16.enabled=true"],
        "world_size": size,
        "precision": "config",
        "fault": fault,
    }
    for passed, first, table in pools[size].run(certified, **arguments):
        assert (passed, first) == ((False, "gradient") if fault else (True, "")), table


@pytest.mark.more
@pytest.mark.parametrize(
    ("fault", "check"),
    [
        (other_labels, "gradient"),
        (gradients.dropped_micro_batch, "output"),
        (updates.wrong_rate, "update"),
    ],
)
def test_a_planted_fault_is_caught(pools, tmp_path, fault, check):
    arguments = {
        "path": config(tmp_path, "vit_b_16"),
        "overrides": ["trainer.engine=deepspeed"],
        "world_size": 2,
    }
    for passed, first, table in pools[2].run(certified, fault=fault, **arguments):
        assert not passed and first == check, table


@pytest.mark.more
def test_batch_norm_in_bfloat16_is_refused(pools, tmp_path):
    arguments = {"overrides": ["bf16.enabled=true"], "world_size": 2, "precision": "config"}
    with pytest.raises(AssertionError, match="ConfigError: precision: .*batch norm"):
        pools[2].run(certified, path=config(tmp_path, "resnet18"), **arguments)


@pytest.mark.more
def test_tensor_parallel_is_refused(pools, tmp_path):
    overrides = ["tensor_parallel.autotp_size=2", "trainer.engine=mesh"]
    with pytest.raises(AssertionError, match="tensor_parallel.autotp_size"):
        pools[2].run(
            certified, path=config(tmp_path, "vit_b_16"), world_size=2, overrides=overrides
        )
    with pytest.raises(ConfigError, match="trainer.images: saw keys"):
        tiny_run(
            config(tmp_path, "vit_b_16"), ["trainer.task=causal_lm", "trainer.images.size=8"], 2
        )
