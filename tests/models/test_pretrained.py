"""A base is read as transformers reads it, tensor by tensor: names, ties, files, quantisations."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support.bases import (
    COMPRESSED,
    FAMILIES,
    FP8,
    changed_config,
    count_reads,
    in_blocks_of_fp8,
    in_channels_of_fp8,
    in_mxfp4,
    rewritten,
    write_base,
)
from trainer.config.sections.model_and_data import ModelSection
from trainer.errors import ConfigError
from trainer.models import huggingface
from trainer.models.language import model_config
from trainer.models.language.auto_class import auto_class
from trainer.models.materialise import on_host


def options(folder: Path) -> ModelSection:
    return ModelSection(name_or_path=str(folder))


def spec_of(folder: Path) -> Any:
    return huggingface.spec_of(model_config.read_config(options(folder)), options(folder))


def assert_read_as_transformers_does(folder: Path) -> Any:
    spec = spec_of(folder)
    config = AutoConfig.from_pretrained(folder)
    if quantised := getattr(config, "quantization_config", None):
        quantised["dequantize"] = True
    kind = auto_class(config)
    theirs = kind.from_pretrained(folder, config=config, dtype=torch.float32)
    assert type(theirs) is type(spec.build())
    values = theirs.state_dict()
    assert values.keys() == spec.build().state_dict().keys()
    for name, value in values.items():
        read = spec.building.weights.read(name)
        assert read is not None, name
        assert torch.equal(read.to(value.dtype), value), name
    model = on_host(spec, 0).eval()
    ids = torch.arange(3, 15).reshape(2, 6)
    with torch.no_grad():
        assert torch.equal(
            model(ids, use_cache=False).logits, theirs.eval()(ids, use_cache=False).logits
        )
    return spec


@pytest.mark.first("llama", "qwen3_moe", "qwen3_5", "gemma3", "mistral3")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_base_is_read_by_value(tmp_path, family):
    assert_read_as_transformers_does(write_base(tmp_path, family))


@pytest.mark.first("llama", "qwen3_moe", "qwen3_5", "gemma3", "mistral3")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_tensor_is_read_from_its_own_sources_alone(tmp_path, family, monkeypatch):
    counted = count_reads(monkeypatch)
    spec = spec_of(write_base(tmp_path, family))
    stored = counted[-1]
    stored.read = 0
    for name in spec.build().state_dict():
        value = spec.building.weights.read(name)
        # a tensor of several that one source holds reads the whole of it
        assert stored.read <= 3 * value.nbytes, name
        stored.read = 0


# Files


def test_one_file_comes_before_a_stale_index(tmp_path):
    write_base(tmp_path, "llama")
    stale = {
        name: torch.zeros_like(v) for name, v in load_file(tmp_path / "model.safetensors").items()
    }
    save_file(stale, tmp_path / "model-00001-of-00001.safetensors", {"format": "pt"})
    index = {"weight_map": dict.fromkeys(stale, "model-00001-of-00001.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert_read_as_transformers_does(tmp_path)


def test_shards_are_read(tmp_path):
    write_base(tmp_path, "qwen3_moe")
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    assert_read_as_transformers_does(tmp_path)


@pytest.mark.parametrize("zipped", [True, False], ids=["mapped", "before PyTorch 1.6"])
def test_a_pickle_of_tensors_is_read(tmp_path, zipped):
    write_base(tmp_path, "mixtral")
    values = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    torch.save(values, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    assert_read_as_transformers_does(tmp_path)


def test_a_pickle_of_parameters_is_read_as_tensors(tmp_path):
    write_base(tmp_path, "llama")
    values = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    parameters = {name: torch.nn.Parameter(value) for name, value in values.items()}
    torch.save(parameters, tmp_path / "pytorch_model.bin")
    spec = assert_read_as_transformers_does(tmp_path)
    assert not spec.building.weights.read("model.norm.weight").requires_grad


@pytest.mark.parametrize("name", ["ema.safetensors", "model.safetensors.index.json"])
def test_weights_under_another_name_are_unsupported(tmp_path, name):
    changed_config(write_base(tmp_path, "llama"), transformers_weights=name)
    with pytest.raises(ConfigError, match="transformers_weights"):
        spec_of(tmp_path)


def test_shards_are_read_whole_whatever_the_index_says(tmp_path):
    """Transformers takes the names of the files from an index, and the tensors from the files."""
    write_base(tmp_path, "llama")
    values = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    head, norm = "lm_head.weight", "model.norm.weight"
    later = {norm: values[norm] + 1, head: values.pop(head)}
    files = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    for name, part in zip(files, (values, later), strict=True):
        save_file(part, tmp_path / name, {"format": "pt"})
    index = {"metadata": {}, "weight_map": dict.fromkeys(values, files[0]) | {"other": files[1]}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert_read_as_transformers_does(tmp_path)


def test_an_adapter_beside_a_model_is_an_error(tmp_path):
    """Transformers would load it on top."""
    write_base(tmp_path, "llama")
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    with pytest.raises(ConfigError, match="adapter"):
        spec_of(tmp_path)


def test_a_buffer_of_another_shape_is_an_error(tmp_path):
    rewritten(
        write_base(tmp_path, "deepseek_v3"),
        lambda values: {n: v[:1].clone() if "e_score" in n else v for n, v in values.items()},
    )
    with pytest.raises(ConfigError, match="e_score_correction_bias.*shape"):
        on_host(spec_of(tmp_path), 0)


def test_experts_that_are_stored_twice_are_an_error(tmp_path):
    write_base(tmp_path, "qwen3_moe")
    fused = "model.layers.0.mlp.experts.down_proj"
    rewritten(tmp_path, lambda values: values | {fused: torch.zeros(12, 32, 16)})
    with pytest.raises(ConfigError, match="experts.down_proj"):
        spec_of(tmp_path).building.weights.read(fused)


# Ties


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gemma3"])
def test_a_head_that_differs_from_the_table_is_not_tied_to_it(tmp_path, family):
    write_base(tmp_path, family, tie_word_embeddings=True)
    rewritten(tmp_path, lambda values: values | {"lm_head.weight": torch.randn(96, 32).bfloat16()})
    spec = assert_read_as_transformers_does(tmp_path)
    assert not spec.tied
    assert any("tie_word_embeddings" in note for note in spec.notes)
    spec.files.save_config(tmp_path / "saved", None)
    assert AutoConfig.from_pretrained(tmp_path / "saved").tie_word_embeddings is False


def test_a_head_that_equals_the_table_is_tied(tmp_path):
    write_base(tmp_path, "llama", tie_word_embeddings=True)
    table = "model.embed_tokens.weight"
    rewritten(tmp_path, lambda values: values | {"lm_head.weight": values[table].clone()})
    assert assert_read_as_transformers_does(tmp_path).tied


def test_a_head_that_is_its_table_rounded_is_not_tied(tmp_path):
    write_base(tmp_path, "llama", tie_word_embeddings=True)
    table = "model.embed_tokens.weight"

    def in_float(values: Any) -> Any:
        return values | {
            table: values[table].float() * 1.0001,
            "lm_head.weight": values[table].clone(),
        }

    rewritten(tmp_path, in_float)
    assert not assert_read_as_transformers_does(tmp_path).tied


def test_a_tied_table_is_read_from_the_head_where_that_alone_is_stored(tmp_path):
    write_base(tmp_path, "llama", tie_word_embeddings=True)
    table = "model.embed_tokens.weight"
    rewritten(
        tmp_path,
        lambda values: {("lm_head.weight" if n == table else n): v for n, v in values.items()},
    )
    assert assert_read_as_transformers_does(tmp_path).tied


# Quantised bases


@pytest.mark.parametrize(
    ("family", "quantise", "config"),
    [
        ("llama", in_blocks_of_fp8, FP8),
        ("qwen3_moe", in_blocks_of_fp8, FP8),
        ("deepseek_v3", in_blocks_of_fp8, FP8),
        ("llama", in_channels_of_fp8, COMPRESSED),
        ("gpt_oss", in_mxfp4, {"quant_method": "mxfp4"}),
    ],
    ids=["fp8", "fp8 experts", "fp8 latent attention", "compressed-tensors", "mxfp4"],
)
def test_a_quantised_base_is_dequantised_as_it_is_read(tmp_path, family, quantise, config):
    if config is COMPRESSED:
        pytest.importorskip("compressed_tensors")
    write_base(tmp_path, family)
    changed_config(rewritten(tmp_path, quantise), quantization_config=config)
    spec = assert_read_as_transformers_does(tmp_path)
    assert any(config["quant_method"] in note for note in spec.notes)
    assert not any("left out" in note for note in spec.notes)
    spec.files.save_config(tmp_path / "saved", torch.bfloat16)
    assert "quantization_config" not in json.loads((tmp_path / "saved/config.json").read_text())


@pytest.mark.parametrize(
    "config",
    [
        {"quant_method": "gptq", "bits": 4, "group_size": 128},
        {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True},
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
        {"quant_method": "hqq", "quant_config": {}},
        {"quant_method": "metal", "bits": 4, "group_size": 64},
        {"quant_method": "FP8", "weight_block_size": [8, 8]},
        {"quant_method": "something of tomorrow"},
        {"bits": 4},
    ],
    ids=lambda config: f"{config.get('quant_method')}-{len(config)}",
)
def test_another_quantisation_is_unsupported(tmp_path, config):
    changed_config(write_base(tmp_path, "llama"), quantization_config=config)
    with pytest.raises(ConfigError, match="quantization_config") as caught:
        spec_of(tmp_path)
    assert config.get("quant_method", "unnamed") in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        lambda values: in_blocks_of_fp8(values),
        lambda values: in_channels_of_fp8(values),
        lambda values: {n: v.to(torch.int8) if "q_proj" in n else v for n, v in values.items()},
        lambda values: {
            n: v.to(torch.float8_e4m3fn) if "q_proj" in n else v for n, v in values.items()
        },
        lambda values: values | {"model.layers.0.mlp.up_proj.weight_zero_point": torch.zeros(64)},
        lambda values: values | {"model.layers.0.mlp.up_proj.input_scale": torch.ones(1)},
        lambda values: values | {"model.layers.0.mlp.up_proj.weight.absmax": torch.ones(4)},
        lambda values: values | {"model.layers.0.mlp.up_proj.qweight": torch.ones(4).int()},
    ],
    ids=["blocks", "channels", "int8", "float8", "zero point", "input scale", "absmax", "qweight"],
)
def test_codes_without_a_quantization_config_are_an_error(tmp_path, change):
    rewritten(write_base(tmp_path, "llama"), change)
    with pytest.raises(ConfigError, match="quantised|stored as"):
        spec_of(tmp_path)


def renamed(old: str, new: str, among: str = "") -> Any:
    """Rename the tensors that have `old` and `among` in their names; None: leave them out."""

    def change(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        hit = {name: name.replace(old, new) for name in values if old in name and among in name}
        return {hit.get(name, name): v for name, v in values.items() if new or name not in hit}

    return change


@pytest.mark.parametrize(
    ("family", "quantise", "config", "change"),
    [
        ("llama", in_blocks_of_fp8, FP8, renamed("up_proj.weight_scale_inv", "")),
        ("qwen3_moe", in_blocks_of_fp8, FP8, renamed("_scale_inv", "_scale", "experts")),
        ("qwen3_moe", in_blocks_of_fp8, FP8, renamed("3.up_proj.weight_scale_inv", "")),
        ("llama", in_channels_of_fp8, COMPRESSED, renamed("up_proj.weight_scale", "")),
        ("qwen3_moe", in_channels_of_fp8, COMPRESSED, renamed("3.up_proj.weight_scale", "")),
    ],
    ids=["fp8", "experts, other name", "one expert", "channels", "channels, one expert"],
)
def test_a_code_without_its_scale_is_an_error(tmp_path, family, quantise, config, change):
    if config is COMPRESSED:
        pytest.importorskip("compressed_tensors")
    rewritten(write_base(tmp_path, family), lambda values: change(quantise(values)))
    changed_config(tmp_path, quantization_config=config)
    with pytest.raises(ConfigError, match="without its scale"):
        spec_of(tmp_path)


def test_a_last_block_that_is_smaller_is_read(tmp_path):
    """DeepSeek-V3 has 576 rows in blocks of 128, which transformers refuses to dequantise."""
    base = write_base(tmp_path, "llama")
    before = load_file(base / "model.safetensors")
    rewritten(base, partial(in_blocks_of_fp8, block=20))
    changed_config(base, quantization_config=FP8 | {"weight_block_size": [20, 20]})
    stored = load_file(base / "model.safetensors")
    weights = spec_of(base).building.weights
    for name in (name for name in before if "_proj" in name):
        codes = stored[name].float()
        scale = stored[f"{name}_scale_inv"]
        for place in (0, 1):
            scale = scale.repeat_interleave(20, place).narrow(place, 0, codes.shape[place])
        assert torch.equal(weights.read(name), codes * scale), name


def test_an_expert_whose_last_block_is_smaller_is_an_error(tmp_path):
    """Transformers would take 16 rows in blocks of 12 for two blocks of 8."""
    rewritten(write_base(tmp_path, "qwen3_moe"), partial(in_blocks_of_fp8, block=12))
    changed_config(tmp_path, quantization_config=FP8 | {"weight_block_size": [12, 12]})
    with pytest.raises(ConfigError, match=r"experts.*blocks of"):
        spec_of(tmp_path)


def with_another_scheme() -> dict[str, Any]:
    group = COMPRESSED["config_groups"]["group_0"]
    mlp = group | {"targets": ["re:.*mlp.*"], "weights": group["weights"] | {"num_bits": 4}}
    return COMPRESSED | {"config_groups": {"group_0": group, "group_1": mlp}}


@pytest.mark.parametrize(
    ("config", "word"),
    [
        (with_another_scheme(), "schemes"),
        (COMPRESSED | {"transform_config": {"config_groups": {"u": {}}}}, "transform_config"),
    ],
    ids=["schemes", "transform"],
)
def test_what_transformers_ignores_of_compressed_tensors_is_an_error(tmp_path, config, word):
    pytest.importorskip("compressed_tensors")
    rewritten(write_base(tmp_path, "llama"), in_channels_of_fp8)
    changed_config(tmp_path, quantization_config=config)
    with pytest.raises(ConfigError, match=word):
        spec_of(tmp_path)


def test_the_order_of_an_experts_codes_is_not_left_out(tmp_path):
    """A single expert is no module of the model, and a g_idx beside its codes is no stranger."""
    rewritten(write_base(tmp_path, "qwen3_moe"), in_blocks_of_fp8)
    order = {"model.layers.0.mlp.experts.3.up_proj.weight_g_idx": torch.arange(32).int()}
    rewritten(tmp_path, lambda values: values | order)
    changed_config(tmp_path, quantization_config=FP8)
    with pytest.raises(ConfigError, match="g_idx"):
        spec_of(tmp_path)


def test_scales_of_activations_are_no_part_of_a_quantised_weight(tmp_path):
    rewritten(write_base(tmp_path, "llama"), in_blocks_of_fp8)
    layer = "model.layers.0.self_attn"
    names = [f"{layer}.q_proj.input_scale", f"{layer}.k_scale", f"{layer}.v_proj.v_scale"]
    rewritten(tmp_path, lambda values: values | {name: torch.ones(1) for name in names})
    changed_config(tmp_path, quantization_config=FP8)
    assert any("3 tensors" in note for note in assert_read_as_transformers_does(tmp_path).notes)


def test_what_is_not_quantised_is_read_as_it_is_stored(tmp_path):
    rewritten(write_base(tmp_path, "llama"), in_blocks_of_fp8)
    changed_config(tmp_path, quantization_config=FP8)
    weights = spec_of(tmp_path).building.weights
    assert weights.read("model.norm.weight").dtype == torch.bfloat16
    assert weights.read("model.layers.0.mlp.up_proj.weight").dtype == torch.float32


def test_an_adapter_is_merged_into_a_quantised_base_in_the_dtype_it_states(tmp_path):
    from peft import LoraConfig, get_peft_model

    from trainer.command.merge import main
    from trainer.data.text.tokenizer import embedded_tokenizer
    from trainer.supervise.process import cache_folder

    base, adapter, out = (tmp_path / name for name in ("base", "adapter", "out"))
    settings = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    model = AutoModelForCausalLM.from_pretrained(write_base(base, "llama"))
    get_peft_model(model, settings).save_pretrained(adapter)
    changed_config(rewritten(base, in_blocks_of_fp8), quantization_config=FP8)
    embedded_tokenizer(cache_folder()).save_pretrained(base)
    assert main([str(adapter), str(out), "--base", str(base)], "meshloom merge") == 0
    config = json.loads((out / "config.json").read_text())
    assert config["dtype"] == "bfloat16" and "quantization_config" not in config
    merged = [load_file(path) for path in out.glob("*.safetensors")]
    assert {value.dtype for part in merged for value in part.values()} == {torch.bfloat16}


def test_tensors_of_modules_that_are_not_trained_are_noted(tmp_path):
    """A vision tower's own scale is no companion of a weight that is read."""
    tower = {"model.visual.norm.logit_scale": torch.ones(1), "mtp.fc.weight": torch.ones(2, 2)}
    rewritten(write_base(tmp_path, "llama"), lambda values: values | tower)
    assert any("mtp" in note for note in spec_of(tmp_path).notes)
