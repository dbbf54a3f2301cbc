"""The certificate compares what is read of the user's own base with what transformers loads."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.bases import FP8, changed_config, in_blocks_of_fp8, rewritten, write_base
from tests.support.certify.certifying import config
from tests.support.messages import shows
from tests.support.models.weight_formats import FORMATS
from tests.support.pool import Pools, machine_here
from trainer.certify.one_process import quantising
from trainer.config.sections.adapter import QuantizeSection
from trainer.config.sections.model_and_data import ModelSection
from trainer.models import huggingface
from trainer.models.language import model_config
from trainer.models.pretrained import conversion, quantised, reader
from trainer.recipes.causal_lm.base_files import compare_base


def plain(folder: Path) -> Path:
    return write_base(folder, "qwen3_moe")


def in_fp8(folder: Path) -> Path:
    return changed_config(
        rewritten(write_base(folder, "llama"), in_blocks_of_fp8), quantization_config=FP8
    )


def with_another_head(folder: Path) -> Path:
    head = {"lm_head.weight": torch.randn(96, 32).bfloat16()}
    return rewritten(
        write_base(folder, "llama", tie_word_embeddings=True), lambda values: values | head
    )


def codes_for_values() -> Any:
    faults = contextlib.ExitStack()
    faults.enter_context(mock.patch.object(quantised, "dequantiser", lambda *_: None))
    faults.enter_context(mock.patch.object(reader, "check_read", lambda *_: None))
    faults.enter_context(mock.patch.object(reader, "check_unread", lambda *_: None))
    return faults


def ties_as_the_config_says() -> Any:
    return mock.patch.object(huggingface, "untied", lambda *_: "")


def experts_in_the_order_of_text() -> Any:
    return mock.patch.object(conversion, "dot_natural_key", str)


def a_matrix_of_another_layer() -> Any:
    real = reader.ConvertedWeights.read

    def read(self: Any, name: str) -> Any:
        return real(self, name.replace("layers.1.self_attn.q_proj", "layers.0.self_attn.q_proj"))

    return mock.patch.object(reader.ConvertedWeights, "read", read)


def compared(folder: Path, quantize: QuantizeSection | None = None) -> Any:
    options = ModelSection(name_or_path=str(folder))
    return compare_base(model_config.read_config(options), options, quantize)


@pytest.mark.parametrize("base", [plain, in_fp8, with_another_head])
def test_a_base_that_is_read_as_transformers_reads_it_passes(tmp_path, base):
    files = compared(base(tmp_path))
    assert files.finding.passed and files.finding.error == 0.0
    assert files.untied is (base is with_another_head)


@pytest.mark.parametrize(
    ("base", "fault", "where"),
    [
        (in_fp8, codes_for_values, "proj"),
        (with_another_head, ties_as_the_config_says, "lm_head"),
        (plain, experts_in_the_order_of_text, "experts"),
        (plain, a_matrix_of_another_layer, "layers.1.self_attn.q_proj"),
    ],
)
def test_a_base_that_is_read_otherwise_fails(tmp_path, base, fault: Callable[[], Any], where):
    base(tmp_path)
    with fault():
        finding = compared(tmp_path).finding
    assert not finding.passed and where in finding.where


def test_a_family_whose_config_has_no_word_of_ties_is_compared(tmp_path):
    architecture = ModelSection(config={"model_type": "inkling_text"})
    spec = huggingface.spec_of(model_config.read_config(architecture), architecture)
    small = spec.tiny.copy(2).build().config
    AutoModelForCausalLM.from_config(small).save_pretrained(tmp_path)
    assert compared(tmp_path).finding.passed


def test_of_a_large_base_the_first_blocks_are_compared(tmp_path, monkeypatch):
    from trainer.recipes.causal_lm import base_files as base

    write_base(tmp_path, "llama")
    size = huggingface.spec_of(
        model_config.read_config(ModelSection(name_or_path=str(tmp_path))),
        ModelSection(name_or_path=str(tmp_path)),
    ).parameters
    monkeypatch.setattr(base, "MOST_VALUES", size - 1)
    files = compared(tmp_path)
    assert files.finding.passed
    shows(files.notes[0], "first 1 of 2", "blocks")
    monkeypatch.setattr(base, "MOST_VALUES", 1)
    files = compared(tmp_path)
    assert files.finding is None and "too large" in files.notes[0]


@pytest.mark.parametrize("keys", FORMATS)
def test_how_far_quantising_moves_a_base_is_said(tmp_path, keys):
    quantize = QuantizeSection(**keys)
    write_base(tmp_path, "llama")
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    layers = dict(model.model.layers.named_modules())
    values = {n: m.weight.data for n, m in layers.items() if isinstance(m, torch.nn.Linear)}
    values["1.mlp.up_proj"][:, 0] *= 10  # large values, beside which the others are lost
    model.save_pretrained(tmp_path)
    (note,) = compared(tmp_path, quantize).notes
    moved = [quantising.rounded(value, quantize) - value for value in values.values()]
    squares = [sum(float(v.double().square().sum()) for v in of) for of in (moved, values.values())]
    share = f"{math.sqrt(squares[0] / squares[1]):.1%}"
    shows(note, f"{len(values)} tensors", share, "most model.layers.1.mlp.up_proj.weight")


def test_a_folder_with_a_config_alone_is_not_compared(tmp_path):
    (write_base(tmp_path, "llama") / "model.safetensors").unlink()
    files = compared(tmp_path)
    assert files.finding is None and "not compared" in files.notes[0]


def certified(path: str, fault: str = "") -> tuple[bool, str]:
    """Runs on each rank of a pool."""
    from trainer.certify import certificate as module
    from trainer.certify.tiny_run import tiny_run

    with globals()[fault]() if fault else contextlib.nullcontext():
        certificate = module.certify(tiny_run(path, [], 2), machine_here())
    return certificate.passed, module.table(certificate)


@pytest.mark.parametrize(
    "fault", [pytest.param("", marks=pytest.mark.more), "ties_as_the_config_says"]
)
def test_the_certificate_has_a_line_of_the_base(tmp_path, pools: Pools, fault):
    with_another_head(tmp_path / "base")
    model = {"name_or_path": str(tmp_path / "base")}
    path = config(tmp_path, "mesh", 3, model=model)
    for passed, text in pools[2].run(certified, path=path, fault=fault):
        assert passed is (not fault), text
        assert [line for line in text.splitlines() if line.startswith("base ")]
