"""A quantised base is bit for bit that of one process under every layout; a fault is caught."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.support.certify import certifying
from tests.support.certify.certifying import config
from tests.support.commands import run
from tests.support.messages import shows
from tests.support.models.routed import FAMILIES, write_routed
from tests.support.pool import machine_here
from trainer.models.finetuning.quantised import nf4, quantised_experts
from trainer.models.finetuning.quantised.format import FLOAT, MatrixPart
from trainer.models.finetuning.quantised.int8 import Int8
from trainer.models.finetuning.quantised.nf4 import NF4
from trainer.models.finetuning.quantised.quantised_base import Form

DOUBLE = {"r": 4, "dropout": 0.1, "quantize": {"double_quant": True}}
WITHOUT_DROPOUT = {"r": 4, "quantize": {"double_quant": True}}
"""Tensor ranks would draw other numbers than one process."""
SINGLE = {"r": 4, "quantize": {"type": "nf4"}}
INTEGERS = {"r": 4, "quantize": {"type": "int8"}}


def changed(change: Callable[[list[torch.Tensor]], None]) -> Any:
    """The bytes as they are, but for what `change` does to mean, scales and codes."""
    real = NF4.quantise

    def quantise(form: NF4, matrix: torch.Tensor) -> torch.Tensor:
        parts = list(real(form, matrix).split(form.sizes(matrix.numel())))
        change(parts)
        return torch.cat(parts)

    return mock.patch.object(NF4, "quantise", quantise)


def integers_of_the_next_row() -> Any:
    real = Int8.quantise

    def quantise(form: Int8, matrix: torch.Tensor) -> torch.Tensor:
        scales, codes = real(form, matrix).split([FLOAT * len(matrix), matrix.numel()])
        return torch.cat([scales.roll(FLOAT), codes])

    return mock.patch.object(Int8, "quantise", quantise)


def scales_of_other_blocks() -> Any:
    def rolled(parts: list[torch.Tensor]) -> None:
        parts[2] = parts[2].roll(1)

    return changed(rolled)


def the_mean_of_a_part() -> Any:
    def other(parts: list[torch.Tensor]) -> None:
        parts[0] = (parts[0].view(torch.float32) * 1.001).view(torch.uint8)

    return changed(other)


def codes_in_another_order() -> Any:
    def turned(parts: list[torch.Tensor]) -> None:
        parts[3] = parts[3] << 4 | parts[3] >> 4

    return changed(turned)


def values_rounded_to_16_bits() -> Any:
    real = NF4.dequantise

    def dequantise(
        form: NF4, data: Any, shape: Any, dtype: torch.dtype, part: MatrixPart
    ) -> torch.Tensor:
        return real(form, data, shape, torch.bfloat16, part).to(dtype)

    return mock.patch.object(NF4, "dequantise", dequantise)


def scales_of_the_next_rank() -> Any:
    """Each tensor rank takes the scales of the places of another part."""

    def places(part: MatrixPart, shape: Any, device: Any) -> torch.Tensor:
        return real(part._replace(number=(part.number + 1) % part.of), shape, device)

    real = nf4._places
    return mock.patch.object(nf4, "_places", places)


def a_layer_in_16_bits_too_many() -> Any:
    real = quantised_experts.quantised
    return mock.patch(
        "trainer.models.finetuning.lora.quantised",
        lambda model, blocks, form: real(model, blocks[1:], form),
    )


def a_stack_with_one_mean() -> Any:
    """Each matrix has the first one's mean, as if the stack were one tensor."""
    real = Form.stored

    def stored(form: Form, value: torch.Tensor) -> torch.Tensor:
        data = real(form, value)
        if form.stacked:
            data[:, :FLOAT] = data[0, :FLOAT]
        return data

    return mock.patch.object(Form, "stored", stored)


FAULTS = {
    scales_of_other_blocks: "initial",
    the_mean_of_a_part: "initial",
    codes_in_another_order: "initial",
    values_rounded_to_16_bits: "output",
    a_layer_in_16_bits_too_many: "initial",
    integers_of_the_next_row: "initial",
}


def certified(path: str, ranks: int, fault: str | None) -> tuple[bool, str]:
    """Runs on each rank of a pool; a fault's model is not tried at the start."""
    from trainer.certify import certificate as module
    from trainer.certify.tiny_run import tiny_run

    with contextlib.ExitStack() as stack:
        if fault:
            stack.enter_context(mock.patch.object(module, "checked", lambda spec, *_: (spec, ())))
            stack.enter_context(globals()[fault]())
        certificate = module.certify(tiny_run(path, [], ranks), machine_here())
    return certificate.passed, module.table(certificate)


@pytest.fixture(scope="module")
def base(tmp_path_factory: Any) -> str:
    """A folder with the architecture, which has layers of torch.nn.Linear."""
    from transformers import LlamaConfig

    folder: Path = tmp_path_factory.mktemp("base")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6, "vocab_size": 96}
    LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2).save_pretrained(folder)
    return str(folder)


LAYOUTS = {
    "mesh-ddp": {"engine": "mesh", "stage": 0},
    "mesh-zero2": {"engine": "mesh", "stage": 2},
    "mesh-zero3": {"engine": "mesh", "stage": 3},
    "accelerate-fsdp": {"engine": "accelerate", "stage": 3},
    "deepspeed-zero2": {"engine": "deepspeed", "stage": 2},
    "deepspeed-zero3": {"engine": "deepspeed", "stage": 3},
    "pipeline-zero2": {"engine": "mesh", "stage": 2, "stages": 2},
    "context-zero3": {"engine": "mesh", "stage": 3, "context": 2},
    "tensor": {"engine": "mesh", "stage": 0, "tensor": 2, "adapter": WITHOUT_DROPOUT},
}


@pytest.mark.more
@pytest.mark.parametrize("layout", ["mesh-zero3", "deepspeed-zero3", "pipeline-zero2", "tensor"])
def test_a_base_of_integers_is_that_of_one_process(pools, tmp_path, base, layout):
    adapter = {"model": {"name_or_path": base}, **LAYOUTS[layout], "adapter": INTEGERS}
    path = config(tmp_path, **adapter)
    for passed, table in pools[2].run(certified, path=path, ranks=2, fault=None):
        assert passed, table


@pytest.mark.more
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_base_is_that_of_one_process_under_every_layout(pools, tmp_path, base, layout):
    adapter = {"adapter": DOUBLE, "model": {"name_or_path": base}}
    path = config(tmp_path, **(adapter | LAYOUTS[layout]))
    for passed, table in pools[2].run(certified, path=path, ranks=2, fault=None):
        assert passed, table


ROUTED = {
    "mesh-zero2": LAYOUTS["mesh-zero2"],
    "mesh-zero3": LAYOUTS["mesh-zero3"],
    "accelerate-fsdp": LAYOUTS["accelerate-fsdp"],
    "deepspeed-zero3": LAYOUTS["deepspeed-zero3"],
    "pipeline-zero2": LAYOUTS["pipeline-zero2"],
    "mesh-zero3, experts": {"engine": "mesh", "stage": 3, "expert": 2},
    "mesh-zero2, experts, full": {
        **{"engine": "mesh", "stage": 2, "expert": 2},
        "activation_checkpointing": "full",
    },
    "deepspeed-zero2, experts": {"engine": "deepspeed", "stage": 2, "expert": 2},
    "tensor": LAYOUTS["tensor"],
}


@pytest.fixture(scope="module")
def routed(tmp_path_factory: Any) -> dict[str, str]:
    return write_routed(tmp_path_factory.mktemp)


@pytest.mark.more
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", ROUTED)
def test_quantised_experts_are_those_of_one_process(pools, tmp_path, routed, layout, family):
    adapter = {"adapter": DOUBLE, "model": {"name_or_path": routed[family]}}
    path = config(tmp_path, **(adapter | ROUTED[layout]))
    for passed, table in pools[2].run(certified, path=path, ranks=2, fault=None):
        assert passed, table


@pytest.mark.more
def test_a_stack_that_was_quantised_as_one_is_caught(pools, tmp_path, routed):
    fault = "a_stack_with_one_mean"
    path = config(tmp_path, "mesh", 3, adapter=DOUBLE, model={"name_or_path": routed["qwen3_moe"]})
    for passed, table in pools[2].run(certified, path=path, ranks=2, fault=fault):
        assert not passed
        shows(table.splitlines()[-1], "rank 0: initial")


ON_FOUR_RANKS = {
    "hsdp": {"stage": 3, "mesh": {"shard": 2}},
    "hsdp, computed again": {
        "stage": 3,
        "mesh": {"shard": 2},
        "activation_checkpointing": "full",
    },
    "tensor-zero2": {"stage": 2, "tensor": 2},
    "tensor-zero3": {"stage": 3, "tensor": 2},
    "tensor-pipeline": {"stage": 0, "tensor": 2, "stages": 2},
}


@pytest.mark.more
@pytest.mark.parametrize("layout", ON_FOUR_RANKS)
def test_on_four_ranks(pools, tmp_path, base, layout):
    adapter = {"adapter": SINGLE, "model": {"name_or_path": base}}
    path = config(tmp_path, "mesh", **ON_FOUR_RANKS[layout], **adapter)
    for passed, table in pools[4].run(certified, path=path, ranks=4, fault=None):
        assert passed, table


@pytest.mark.more
def test_scales_of_another_tensor_rank_are_seen_at_the_start(pools, tmp_path, base):
    adapter = {"adapter": WITHOUT_DROPOUT, "model": {"name_or_path": base}}
    path = config(tmp_path, "mesh", 0, tensor=2, **adapter)
    fault = scales_of_the_next_rank.__name__
    with pytest.raises(AssertionError, match="ConfigError.*o_proj.base_layer"):
        pools[2].run(certified, path=path, ranks=2, fault=fault)


@pytest.mark.more
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_of_quantising_is_caught(pools, tmp_path, base, fault):
    adapter = INTEGERS if fault is integers_of_the_next_row else DOUBLE
    path = config(tmp_path, "mesh", 3, adapter=adapter, model={"name_or_path": base})
    for passed, table in pools[2].run(certified, path=path, ranks=2, fault=fault.__name__):
        assert not passed
        shows(table.splitlines()[-1], f"rank 0: {FAULTS[fault]}")


@pytest.mark.more
@pytest.mark.parametrize("layout", ["mesh-zero2", "mesh-zero3", "deepspeed-zero3"])
def test_a_quantised_base_in_the_configs_precision(pools, tmp_path, base, layout):
    given = {"adapter": DOUBLE, "model": {"name_or_path": base}, **LAYOUTS[layout]}
    path = config(tmp_path, **given)
    overrides = ["bf16.enabled=true", "optimizer.params.lr=1e-5"]
    arguments = {"world_size": 2, "overrides": overrides, "precision": "config"}
    for passed, _, table in pools[2].run(certifying.certified, path=path, **arguments):
        assert passed, table
        assert "bfloat16" in table


@pytest.mark.more
@pytest.mark.parametrize("stage", [2, 3])
def test_a_quantised_base_in_compiled_blocks(tmp_path, base, stage):
    path = config(tmp_path, "mesh", stage, adapter=DOUBLE, model={"name_or_path": base})
    out = tmp_path / "certificate.json"
    words = "--config", path, "--compile", "--world-size", "2", "--output", out
    result = run("meshloom", "verify", *words)
    assert result.code == 0, result.output
    assert "compiled blocks" in result.output and "uncompiled" not in result.output
