"""Faults that a certificate once missed: an option that is not on, a norm that lacks a little, a
branch on a length of which the tiny run met one side. And what it once took for a fault.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest

from tests.support.certify.certifying import MISTRAL, SPREAD, config
from tests.support.certify.faults.planting import around
from tests.support.pool import machine_here
from trainer.storage import installed

LLAMA = {"model_type": "llama", "num_hidden_layers": 2, "vocab_size": 61}
QUICK = {"data": {"sequence_length": 28}}
needs_torchao = pytest.mark.skipif(not installed("torchao"), reason="torchao is not installed")


def norm_without_experts_of_rank_1() -> Any:
    import torch.distributed as dist

    from trainer.parallel.gradients import GradientNorm

    def without(real, self, *given):
        real(self, *given)
        if dist.get_rank() == 1:
            experts = [p for p, _ in self._parameters if p.ndim == 3]
            self._parameters = [
                (p, counts and not any(p is one for one in experts[:1]))
                for p, counts in self._parameters
            ]

    return around(GradientNorm, "__init__", without)


def no_float8() -> Any:
    from trainer.parallel import float8

    return mock.patch.object(float8, "apply", lambda *given, **named: None)


def float8_without_a_layer() -> Any:
    from trainer.parallel import float8

    return around(float8, "layers", lambda real, *given: real(*given)[:-1])


def plain_head_on_rank_1() -> Any:
    import torch.distributed as dist

    from trainer.tasks.losses.cross_entropy import LossHead

    def others(real, self, cast):
        if dist.get_rank() != 1:
            real(self, cast)

    return around(LossHead, "multiply_by", others)


def with_masks(change: Callable[[dict[str, Any]], None]) -> Any:
    """`change(wanted)` comes before the run's own masks are made; not those of one process."""
    from trainer.tasks.masks import Masks

    def once(real, self, make, rows):
        def made(**wanted):
            documents, more = rows.documents, change(wanted)
            if more == "together":
                documents = None
            return real(self, make, rows._replace(documents=documents))(**wanted)

        return made

    return around(Masks, "_once", once)


def documents_together_in_long_rows() -> Any:
    return with_masks(lambda wanted: "together" if wanted["kv_length"] > 64 else None)


def window_one_too_long_hides_nothing() -> Any:
    def change(wanted):
        window = wanted.get("local_size")
        if wanted.get("allow_is_causal_skip") and window and wanted["kv_length"] <= window + 1:
            wanted["local_size"] = None

    def masks(real, self, function, rows, wanted):
        return real(self, function, rows, wanted)

    return with_masks(change)


@dataclass(frozen=True)
class Missed:
    check: str
    stage: int = 2
    trainer: dict[str, Any] = field(default_factory=dict)
    overrides: tuple[str, ...] = ()


FLOAT8 = {"float8": "tensorwise", "model": {"config": LLAMA}, **QUICK}
ROWWISE = {**FLOAT8, "float8": "rowwise"}
HEAD = {**ROWWISE, "float8_head": True, "model": {"config": LLAMA | {"vocab_size": 64}}}
PACKED = {"model": {"config": LLAMA}, "data": {"sequence_length": 96, "documents": "pack"}}
WINDOW = {"model": {"config": MISTRAL}, **QUICK}
FAULTS = {
    norm_without_experts_of_rank_1: Missed("norm", 3, SPREAD | QUICK),
    no_float8: Missed("option", trainer=FLOAT8),
    float8_without_a_layer: Missed("option", trainer=FLOAT8),
    plain_head_on_rank_1: Missed("option", trainer=HEAD),
    documents_together_in_long_rows: Missed("output", trainer=PACKED),
    window_one_too_long_hides_nothing: Missed("output", trainer=WINDOW),
}


def certified(path: str, overrides: list[str], precision: str, fault: str) -> tuple[bool, str, str]:
    """Runs on each rank of a pool: the checks at start are left out."""
    from trainer.certify import certificate as module
    from trainer.certify.tiny_run import tiny_run

    with contextlib.ExitStack() as stack:
        if fault:
            stack.enter_context(mock.patch.object(module, "checked", lambda spec, *_: (spec, ())))
            stack.enter_context(globals()[fault]())
        certificate = module.certify(tiny_run(path, overrides, 2, precision), machine_here())
    failed = {finding.check for finding in certificate.findings if not finding.passed}
    return certificate.passed, " ".join(failed), module.table(certificate)


@pytest.mark.more
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_that_was_missed_is_caught(pools, tmp_path, fault, precision):
    planted = FAULTS[fault]
    if "float8" in planted.trainer and not installed("torchao"):
        pytest.skip("torchao is not installed")
    path = config(tmp_path, "mesh", planted.stage, **planted.trainer)
    low = precision == "bfloat16"
    given = {
        "path": path,
        "overrides": ["bf16.enabled=true"] if low else [],
        "precision": "config" if low else "float32",
    }
    for passed, _, table in pools[2].run(certified, fault="", **given):
        assert passed, table
    for passed, failed, table in pools[2].run(certified, fault=fault.__name__, **given):
        assert not passed, table
        assert planted.check in failed.split(), table


@pytest.mark.more
def test_smoothed_labels_of_a_large_vocabulary_are_right(pools, tmp_path):
    """The one process would be wrong in float32: PyTorch's smoothing rounds once for each logit."""
    sizes = {"hidden_size": 64, "vocab_size": 151_936}
    path = config(tmp_path, "mesh", 1, label_smoothing=0.1, model={"config": LLAMA | sizes})
    for passed, _, table in pools[2].run(
        certified, fault="", path=path, overrides=[], precision="float32"
    ):
        assert passed, table
