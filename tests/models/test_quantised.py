"""NF4 and int8 equal bitsandbytes bit for bit, whole or gathered; a layer multiplies by them."""

from __future__ import annotations

import contextlib
import copy
import json

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed import fsdp
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support.certify.certifying import DEEPSEEK
from tests.support.models.bitsandbytes_record import (
    FILE,
    INT8_FILE,
    SEEDS,
    Recorded,
    digest_of,
    matrix_of,
    recorded,
    tensor_of,
)
from tests.support.models.weight_formats import FORMATS
from trainer.certify.one_process import quantising as plainly
from trainer.config.sections.adapter import AdapterSection, QuantizeSection
from trainer.errors import ConfigError
from trainer.models.finetuning.quantised import quantised_base
from trainer.models.finetuning.quantised.format import MatrixPart
from trainer.models.finetuning.quantised.int8 import Int8
from trainer.models.finetuning.quantised.nf4 import BLOCK, NF4
from trainer.models.finetuning.quantised.quantised_base import (
    Form,
    QuantisedLinear,
    note_of,
    quantised_weights,
)
from trainer.models.finetuning.quantised.quantised_experts import quantised
from trainer.models.finetuning.quantised.quantised_files import format_of
from trainer.parallel import shard


def of_ours(tensor: torch.Tensor) -> Recorded:
    parts = [
        form.quantise(tensor).split(form.sizes(len(tensor))) for form in (NF4(), NF4(double=True))
    ]
    (_, scales, _, codes), (mean, *_) = parts
    return recorded(codes, scales, float(mean.view(torch.float32)), len(tensor) % 2)


@pytest.mark.parametrize("seeds", [SEEDS[:40], pytest.param(SEEDS[40:], marks=pytest.mark.more)])
def test_codes_and_scales_are_those_that_bitsandbytes_had(seeds):
    records = json.loads(FILE.read_text())
    for seed in seeds:
        theirs = records[seed]
        ours = of_ours(tensor_of(seed))
        assert ours == (theirs[0], pytest.approx(theirs[1], rel=1e-6))


@pytest.mark.parametrize("double", [False, True])
def test_values_are_those_of_the_installed_bitsandbytes(double):
    functional = pytest.importorskip("bitsandbytes.functional")
    shares = []
    for seed in SEEDS:
        tensor = tensor_of(seed).float()
        packed, state = functional.quantize_4bit(
            tensor, blocksize=64, compress_statistics=double, quant_type="nf4"
        )
        form = NF4(double)
        data = form.quantise(tensor)
        ours = form.dequantise(data, (len(tensor),), torch.float32)
        theirs = functional.dequantize_4bit(packed, state).flatten()
        if not double:
            assert torch.equal(ours, theirs)
            continue
        # on a CPU it takes the nearest number from a table of 65,536 entries: some are another
        scales = data.split(form.sizes(len(tensor)))[2]
        same = scales == state.absmax
        shares.append(float(same.float().mean()))
        every = same.repeat_interleave(BLOCK)[: len(tensor)]
        torch.testing.assert_close(ours[every], theirs[every], rtol=1e-5, atol=0)
    assert not double or sum(shares) > 0.95 * len(SEEDS)


@pytest.mark.parametrize("seeds", [SEEDS[:40], pytest.param(SEEDS[40:], marks=pytest.mark.more)])
def test_codes_and_scales_of_integers_are_those_that_bitsandbytes_had(seeds):
    records = json.loads(INT8_FILE.read_text())
    for seed in seeds:
        matrix = matrix_of(seed)
        rows, columns = matrix.shape
        scales, codes = Int8().quantise(matrix).split([4 * rows, rows * columns])
        assert digest_of(codes, scales) == records[seed]


def test_int8_is_that_of_the_installed_bitsandbytes():
    functional = pytest.importorskip("bitsandbytes.functional")
    for seed in SEEDS:
        matrix = matrix_of(seed)
        codes, scales, _ = functional.int8_vectorwise_quant(matrix)
        ours = Int8().dequantise(Int8().quantise(matrix), matrix.shape, torch.float32)
        assert torch.equal(ours, functional.int8_vectorwise_dequant(codes, scales))


@given(rows=st.integers(1, 200), columns=st.integers(1, 200), seed=st.integers(0, 99))
@settings(max_examples=40, deadline=None)
@pytest.mark.parametrize("keys", FORMATS)
def test_gathered_bytes_have_the_values_of_the_whole(rows, columns, seed, keys):
    shape = rows, columns
    quantize = QuantizeSection(**keys)
    matrix = tensor_of(seed, rows * columns).view(shape)
    data = format_of(quantize).quantise(matrix)
    assert len(data) == format_of(quantize).size(shape)
    # at a place in a larger buffer that no float could be read from
    gathered = torch.cat([torch.zeros(3, dtype=torch.uint8), *data.chunk(7)])[3:]
    ours = format_of(quantize).dequantise(gathered, shape, torch.float32)
    assert torch.equal(ours, plainly.rounded(matrix, quantize))
    assert torch.equal(ours, plainly.read(data, shape, quantize))
    largest = matrix.float().abs().max()
    share = {"nf4": 0.16, "nf4 with double_quant": 0.2, "int8": 0.004}[format_of(quantize).name]
    assert (ours - matrix.float()).abs().max() <= share * largest


@given(
    rows=st.integers(1, 40),
    columns=st.integers(1, 40),
    dim=st.sampled_from([0, 1]),
    parts=st.integers(1, 5),
)
@settings(max_examples=60, deadline=None)
@pytest.mark.parametrize("keys", FORMATS)
def test_the_parts_of_a_matrix_have_the_values_of_the_whole(rows, columns, dim, parts, keys):
    shape = (rows * parts, columns) if dim == 0 else (rows, columns * parts)
    quantize = QuantizeSection(**keys)
    form = format_of(quantize)
    matrix = tensor_of(rows, rows * columns * parts).view(shape)
    data = form.divided(form.quantise(matrix), shape, MatrixPart(dim, 0, parts))
    assert len(data) == parts * form.size(shape, parts)
    whole = plainly.rounded(matrix, quantize)
    assert torch.equal(plainly.read(data, shape, quantize, dim, parts), whole)
    for number, (own, values) in enumerate(
        zip(data.chunk(parts), whole.chunk(parts, dim), strict=True)
    ):
        part = MatrixPart(dim, number, parts)
        assert torch.equal(form.dequantise(own, shape, torch.float32, part), values)


@pytest.mark.parametrize("keys", FORMATS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_multiplies_by_its_dequantised_weight(bias, dtype, keys):
    torch.manual_seed(0)
    plain = nn.Linear(96, 40, bias=bias, dtype=dtype)
    layer = QuantisedLinear(plain, format_of(QuantizeSection(**keys)))
    layer.weight.data = layer.form.stored(plain.weight)
    given_ = torch.randn(5, 96, dtype=dtype, requires_grad=True)
    output = layer(given_)
    output.square().sum().backward()
    again = given_.detach().clone().requires_grad_()
    weight = layer.form.dequantised(layer.weight, dtype)
    expected = F.linear(again, weight, plain.bias)
    expected.square().sum().backward()
    assert torch.equal(output, expected) and torch.equal(given_.grad, again.grad)
    assert layer.weight.grad is None


def test_bytes_that_were_cast_are_an_error():
    layer = QuantisedLinear(nn.Linear(64, 64), NF4())
    layer.weight.data = layer.weight.data.bfloat16()
    with pytest.raises(TypeError, match="bfloat16"):
        layer(torch.ones(1, 64))


EXPERTS = {
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": DEEPSEEK
    | {"num_hidden_layers": 2, "n_group": 1, "num_experts_per_tok": 2}
    | {"num_key_value_heads": 4, "head_dim": 8},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
}
SMALL = {"hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 61}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}


@pytest.mark.parametrize("kept", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("family", EXPERTS)
@pytest.mark.parametrize("keys", FORMATS[1:])
def test_experts_compute_with_matrices_that_were_quantised_one_by_one(family, kept, keys):
    quantize = QuantizeSection(**keys)
    torch.manual_seed(0)
    config = AutoConfig.for_model(**{**SMALL, **EXPERTS[family], "model_type": family})
    model = AutoModelForCausalLM.from_config(config, experts_implementation=kept).eval()
    with torch.no_grad():
        for parameter in model.requires_grad_(False).parameters():
            parameter.normal_(std=0.2)
    expected = copy.deepcopy(model)
    plainly.quantised(expected, ["model.layers"], quantize)
    values = dict(model.named_parameters())
    quantised(model, ["model.layers"], format_of(quantize))
    stored = quantised_weights(model)
    stacks = {name: weight for name, weight in stored.items() if weight.form.stacked}
    assert len(stacks) == 2 * (2 if family != "deepseek_v3" else 1)
    for name, weight in stored.items():
        weight.data.copy_(weight.form.stored(values[name]))
    largest = max(weight.form.values for weight in stacks.values())

    def small(saved: torch.Tensor) -> torch.Tensor:
        assert saved.numel() < largest
        return saved

    given_ = torch.randn(2, 9, 32)
    results = []
    for one in (model, expected):
        given_ = given_.detach().clone().requires_grad_()
        hooks = torch.autograd.graph.saved_tensors_hooks(small, lambda saved: saved)
        with hooks if one is model else contextlib.nullcontext():
            logits = one(inputs_embeds=given_, use_cache=False).logits
        logits.square().sum().backward()
        results.append((logits.detach(), given_.grad))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6 * float(theirs.abs().max()))


def test_a_part_of_a_stack_has_the_values_of_its_matrices(monkeypatch):
    monkeypatch.setattr(quantised_base, "CHUNK", 100)
    form = Form((5, 7, 11), NF4(double=True), stacked=True)
    data = form.stored(stack := torch.randn(form.shape))
    quantize = QuantizeSection(double_quant=True)
    whole = plainly.read(data, form.shape, quantize)
    assert torch.equal(whole, torch.stack([plainly.rounded(matrix, quantize) for matrix in stack]))
    assert not torch.equal(whole, plainly.rounded(stack, quantize))  # another mean
    for part in (data, data[1:4], data[:0]):
        start = 1 if len(part) == 3 else 0
        expected = whole[start : start + len(part)]
        assert torch.equal(form.dequantised(part, torch.float32), expected)


def test_the_head_what_is_tied_and_what_is_trained_stay_as_they_are():
    block = nn.ModuleDict({"plain": nn.Linear(8, 8), "tied": nn.Linear(8, 8)})
    block["trained"] = nn.Linear(8, 8)
    model = nn.ModuleDict({"block": block, "head": nn.Linear(8, 8)})
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    block["trained"].weight.requires_grad_()
    model["head"].weight = block["tied"].weight
    quantised(model, ["block"], NF4())
    kinds = {name for name, module in model.named_modules() if isinstance(module, QuantisedLinear)}
    assert kinds == {"block.plain"}
    with pytest.raises(ConfigError):
        note_of("a model", model["head"])


def test_magnitudes_of_quantised_rows_are_refused():
    with pytest.raises(ValueError, match="dora"):
        AdapterSection.model_validate({"quantize": {"type": "nf4"}, "dora": True})


def test_scales_of_integers_are_not_quantised():
    with pytest.raises(ValueError, match="double_quant"):
        QuantizeSection(type="int8", double_quant=True)


def test_a_row_of_zeros_stays_so():
    matrix = torch.tensor([[0.0, 0.0], [1.0, -3.0], [1e-38, 0.0]])
    values = Int8().dequantise(Int8().quantise(matrix), (3, 2), torch.float32)
    assert values.isfinite().all() and values[0].tolist() == [0, 0] and values[1, 1] == -3


def test_an_fsdp_that_casts_bytes_is_refused(monkeypatch):
    layer = nn.Sequential(QuantisedLinear(nn.Linear(64, 64), NF4()))
    policy = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    options = {"mp_policy": policy}
    shard.check_bytes(layer, options)
    monkeypatch.setattr(shard, "KEEPS_BYTES", "9.9")
    with pytest.raises(ConfigError) as error:
        shard.check_bytes(layer, options)
    assert error.value.problems[0].place == "trainer.adapter.quantize"
    kept = set(layer.parameters())
    shard.check_bytes(layer, options | {"ignored_params": kept})
    shard.check_bytes(layer, {"mp_policy": fsdp.MixedPrecisionPolicy()})
