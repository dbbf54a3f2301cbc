"""A base is read as transformers reads it, tensor by tensor: names, ties, files, quantisations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from trainer.config.sections.model_and_data import ModelSection
from trainer.errors import ConfigError
from trainer.models import huggingface
from trainer.models.materialise import on_host

SMALL: dict[str, Any] = dict(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=64,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
ROUTED = dict(num_experts_per_tok=2, moe_intermediate_size=16)
GATED = dict(
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8
)
VISION = dict(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    depth=2,
    num_heads=4,
    image_size=28,
    patch_size=14,
    out_hidden_size=32,
)
TWELVE = 12
"""Experts: with more than ten, the order of names as text is another model."""
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": SMALL,
    "mistral": SMALL,
    "qwen3": SMALL,
    "olmo3": SMALL,
    "smollm3": SMALL,
    "phi3": SMALL,
    "gpt2": dict(vocab_size=96, n_embd=32, n_layer=2, n_head=4, n_positions=64),
    "qwen3_moe": SMALL | ROUTED | dict(num_experts=TWELVE),
    "mixtral": SMALL | dict(num_local_experts=TWELVE, num_experts_per_tok=2),
    "glm4_moe": SMALL
    | ROUTED
    | dict(n_routed_experts=TWELVE, first_k_dense_replace=1, n_group=1, topk_group=1),
    "deepseek_v3": {key: value for key, value in SMALL.items() if key != "head_dim"}
    | ROUTED
    | dict(num_key_value_heads=4, n_routed_experts=TWELVE, n_group=2, topk_group=1)
    | dict(first_k_dense_replace=1, q_lora_rank=16, kv_lora_rank=16, n_shared_experts=1)
    | dict(qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8),
    "gpt_oss": SMALL | dict(num_local_experts=TWELVE, num_experts_per_tok=2),
    "qwen3_next": SMALL
    | ROUTED
    | GATED
    | dict(num_experts=TWELVE, shared_expert_intermediate_size=16),
    "gemma3": dict(text_config=SMALL, vision_config=VISION),
    "qwen3_5": dict(text_config=SMALL | GATED, vision_config=VISION),
    "llama4": dict(
        text_config=SMALL
        | dict(num_local_experts=4, intermediate_size_mlp=64, interleave_moe_layer_step=2),
        vision_config=VISION
        | dict(vision_output_dim=32, projector_input_dim=32, projector_output_dim=32),
    ),
}
MULTIMODAL = {"gemma3", "qwen3_5", "llama4"}


def write_base(folder: Path, family: str, **more: Any) -> Path:
    """Save a tiny model with drawn values in bfloat16, by transformers, under its names on disk."""
    config = AutoConfig.for_model(family, **FAMILIES[family], **more)
    kind = AutoModelForImageTextToText if family in MULTIMODAL else AutoModelForCausalLM
    torch.manual_seed(0)
    model = kind.from_config(config).to(torch.bfloat16)
    for value in model.state_dict().values():
        if value.dtype == torch.bfloat16:
            value.copy_(torch.randn_like(value))
    model.save_pretrained(folder)
    return folder


def options(folder: Path) -> ModelSection:
    return ModelSection(name_or_path=str(folder))


def spec_of(folder: Path) -> Any:
    return huggingface.spec_of(huggingface.read_config(options(folder)), options(folder))


def assert_read_as_transformers_does(folder: Path) -> Any:
    spec = spec_of(folder)
    config = AutoConfig.from_pretrained(folder)
    if quantised := getattr(config, "quantization_config", None):
        quantised["dequantize"] = True
    theirs = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32)
    assert type(theirs) is type(spec.build())
    values = theirs.state_dict()
    assert values.keys() == spec.build().state_dict().keys()
    for name, value in values.items():
        read = spec.weights.read(name)
        assert read is not None, name
        assert torch.equal(read.to(value.dtype), value), name
    model = on_host(spec, 0).eval()
    ids = torch.arange(3, 15).reshape(2, 6)
    with torch.no_grad():
        assert torch.equal(
            model(ids, use_cache=False).logits, theirs.eval()(ids, use_cache=False).logits
        )
    return spec


@pytest.mark.parametrize("family", FAMILIES)
def test_a_base_is_read_by_value(tmp_path, family):
    assert_read_as_transformers_does(write_base(tmp_path, family))


class Counted:
    """Stored tensors that count the bytes that are read at once for one tensor of the model."""

    def __init__(self, stored: Any) -> None:
        self._stored, self.read = stored, 0

    def names(self) -> set[str]:
        return self._stored.names()

    def like(self, name: str) -> torch.Tensor:
        return self._stored.like(name)

    def __getitem__(self, name: str) -> torch.Tensor:
        value = self._stored[name]
        self.read += value.nbytes
        return value

    def release(self) -> None:
        self._stored.release()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tensor_is_read_from_its_own_sources_alone(tmp_path, family, monkeypatch):
    opened = huggingface.stored_tensors
    counted: list[Counted] = []

    def counting(*arguments: Any) -> Any:
        counted.append(Counted(opened(*arguments)))
        return counted[-1]

    monkeypatch.setattr(huggingface, "stored_tensors", counting)
    spec = spec_of(write_base(tmp_path, family))
    stored = counted[-1]
    stored.read = 0
    for name in spec.build().state_dict():
        value = spec.weights.read(name)
        # a tensor of several that one source holds reads the whole of it
        assert stored.read <= 3 * value.nbytes, name
        stored.read = 0


# Files


def rewritten(folder: Path, change: Any) -> Path:
    values = load_file(folder / "model.safetensors")
    save_file(change(values), folder / "model.safetensors", {"format": "pt"})
    return folder


def changed_config(folder: Path, **values: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    return folder


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


def test_weights_under_another_name_are_unsupported(tmp_path):
    changed_config(write_base(tmp_path, "llama"), transformers_weights="ema.safetensors")
    with pytest.raises(ConfigError, match="transformers_weights"):
        spec_of(tmp_path)


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


def test_a_tied_table_is_read_from_the_head_where_that_alone_is_stored(tmp_path):
    write_base(tmp_path, "llama", tie_word_embeddings=True)
    table = "model.embed_tokens.weight"
    rewritten(
        tmp_path,
        lambda values: {("lm_head.weight" if n == table else n): v for n, v in values.items()},
    )
    assert assert_read_as_transformers_does(tmp_path).tied


# Quantised bases


def in_blocks_of_fp8(values: dict[str, torch.Tensor], block: int = 8) -> dict[str, torch.Tensor]:
    """Quantise the matrices of projections as DeepSeek-V3's are: a scale for each square block."""
    found: dict[str, torch.Tensor] = {}
    for name, value in values.items():
        if value.ndim != 2 or "_proj" not in name:
            found[name] = value
            continue
        rows, columns = (size // block for size in value.shape)
        blocks = value.float().reshape(rows, block, columns, block)
        scale = blocks.abs().amax((1, 3)) / 448
        codes = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
        found[name] = codes.reshape(value.shape)
        found[f"{name}_scale_inv"] = scale
    return found


FP8 = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "weight_block_size": [8, 8],
    "modules_to_not_convert": ["lm_head"],
}


def in_channels_of_fp8(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Quantise as llm-compressor's FP8_DYNAMIC: a scale for each row."""
    found: dict[str, torch.Tensor] = {}
    for name, value in values.items():
        found[name] = value
        if value.ndim == 2 and "_proj" in name:
            scale = value.float().abs().amax(1, keepdim=True) / 448
            found[name] = (value.float() / scale).to(torch.float8_e4m3fn)
            found[f"{name}_scale"] = scale.bfloat16()
    return found


COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"},
            "input_activations": {
                "num_bits": 8,
                "type": "float",
                "symmetric": True,
                "strategy": "token",
                "dynamic": True,
            },
        }
    },
}


def in_mxfp4(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Store the experts of GPT-OSS as drawn codes of four bits, with a power of two for each 32."""
    found: dict[str, torch.Tensor] = {}
    for name, value in values.items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            found[name] = value
            continue
        experts, rows, columns = value.shape
        shape = (experts, columns, rows // 32)
        found[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8)
        found[f"{name}_scales"] = torch.randint(118, 124, shape, dtype=torch.uint8)
    return found


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


def test_tensors_of_modules_that_are_not_trained_are_noted(tmp_path):
    """A vision tower's own scale is no companion of a weight that is read."""
    tower = {"model.visual.norm.logit_scale": torch.ones(1), "mtp.fc.weight": torch.ones(2, 2)}
    rewritten(write_base(tmp_path, "llama"), lambda values: values | tower)
    assert any("mtp" in note for note in spec_of(tmp_path).notes)
