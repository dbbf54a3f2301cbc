"""Tiny bases as they lie on disk: families of today, their quantisations, and changes by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from trainer.models.pretrained import named_base

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
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    layer_types=["linear_attention", "full_attention"],
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
SECTIONS = dict(rope_type="default", rope_theta=1e4, mrope_section=[1, 1, 2])
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
    "qwen3_5_moe": dict(
        text_config=SMALL
        | GATED
        | ROUTED
        | dict(num_experts=TWELVE, shared_expert_intermediate_size=16),
        vision_config=VISION,
    ),
    "gemma4": dict(
        text_config=SMALL
        | dict(global_head_dim=8, num_global_key_value_heads=2, hidden_size_per_layer_input=0)
        | dict(vocab_size_per_layer_input=96, num_kv_shared_layers=0)
        | dict(num_hidden_layers=4, layer_types=["sliding_attention", "full_attention"] * 2),
        vision_config=VISION | dict(num_key_value_heads=4, head_dim=8),
        audio_config=None,
    ),
    "mistral3": dict(
        text_config=SMALL | dict(model_type="mistral"),
        vision_config=VISION | dict(model_type="pixtral", head_dim=8),
    ),
    "glm4v": dict(
        text_config=SMALL
        | dict(rope_parameters=dict(rope_type="default", mrope_section=[1, 1, 2])),
        vision_config=VISION,
    ),
    "qwen3_vl": dict(text_config=SMALL, vision_config=VISION | dict(deepstack_visual_indexes=[0])),
    "llava": dict(
        text_config=SMALL | dict(model_type="llama"),
        vision_config=VISION | dict(model_type="clip_vision_model", projection_dim=32),
        image_token_index=5,
    ),
    "glm4v_moe": dict(
        text_config=SMALL
        | ROUTED
        | dict(n_routed_experts=TWELVE, first_k_dense_replace=1, n_group=1, topk_group=1)
        | dict(n_shared_experts=1, rope_parameters=SECTIONS | dict(partial_rotary_factor=1.0)),
        vision_config=VISION,
    ),
    "qwen2_5_vl": dict(text_config=SMALL | dict(rope_parameters=SECTIONS), vision_config=VISION),
    "qwen3_vl_moe": dict(
        text_config=SMALL | ROUTED | dict(num_experts=TWELVE, decoder_sparse_step=1),
        vision_config=VISION | dict(deepstack_visual_indexes=[0]),
    ),
    "internvl": dict(
        text_config=SMALL | dict(model_type="qwen2"),
        vision_config=VISION
        | dict(model_type="internvl_vision", image_size=[28, 28], patch_size=[14, 14]),
    ),
    "llava_next": dict(
        text_config=SMALL | dict(model_type="llama"),
        vision_config=VISION | dict(model_type="clip_vision_model", projection_dim=32),
        image_token_index=5,
        image_grid_pinpoints=[[28, 56], [56, 28]],
    ),
    "mllama": dict(
        text_config=SMALL | dict(cross_attention_layers=[1]),
        vision_config=VISION
        | dict(num_global_layers=1, vision_output_dim=64, intermediate_layers_indices=[0])
        | dict(attention_heads=4, max_num_tiles=1, supported_aspect_ratios=[[1, 1]]),
    ),
}
DIVIDED = {
    "sarvam_moe": SMALL | ROUTED | dict(n_routed_experts=TWELVE),
    "ernie4_5_vl_moe": dict(
        text_config=SMALL
        | dict(moe_num_experts=TWELVE, moe_k=2, moe_num_shared_experts=1)
        | dict(moe_intermediate_size=[16, 16], mlp_layer_types=["dense", "sparse"])
        | dict(rope_parameters=SECTIONS),
        vision_config=VISION,
    ),
}
"""Families whose files have tensors that transformers divides among several of the model."""
MULTIMODAL = {name for name, values in (FAMILIES | DIVIDED).items() if "vision_config" in values}


def write_base(folder: Path, family: str, **more: Any) -> Path:
    """Save a tiny model with drawn values in bfloat16, by transformers, under its names on disk."""
    values = (FAMILIES | DIVIDED)[family]
    if family in MULTIMODAL:
        text = values["text_config"] | more.pop("text_config", {})
        values = {**values, "text_config": text}
    config = AutoConfig.for_model(family, **{**values, **more})
    kind = AutoModelForImageTextToText if family in MULTIMODAL else AutoModelForCausalLM
    torch.manual_seed(0)
    model = kind.from_config(config).to(torch.bfloat16)
    for value in model.state_dict().values():
        if value.dtype == torch.bfloat16:
            value.copy_(torch.randn_like(value))
    model.save_pretrained(folder)
    return folder


def rewritten(folder: Path, change: Any) -> Path:
    values = load_file(folder / "model.safetensors")
    save_file(change(values), folder / "model.safetensors", {"format": "pt"})
    return folder


def changed_config(folder: Path, **values: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    return folder


def in_blocks_of_fp8(values: dict[str, torch.Tensor], block: int = 8) -> dict[str, torch.Tensor]:
    """Quantise the matrices of projections as DeepSeek-V3's are: a scale for each square block."""
    results: dict[str, torch.Tensor] = {}
    for name, value in values.items():
        if value.ndim != 2 or "_proj" not in name:
            results[name] = value
            continue
        height, width = value.shape
        rows, columns = (-(-size // block) for size in value.shape)
        padded = torch.zeros(rows * block, columns * block)
        padded[:height, :width] = value
        blocks = padded.reshape(rows, block, columns, block)
        scale = blocks.abs().amax((1, 3)) / 448
        codes = (blocks / scale[:, None, :, None]).reshape(padded.shape)
        results[name] = codes[:height, :width].to(torch.float8_e4m3fn).contiguous()
        results[f"{name}_scale_inv"] = scale
    return results


FP8 = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "weight_block_size": [8, 8],
    "modules_to_not_convert": ["lm_head"],
}


def in_channels_of_fp8(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Quantise as llm-compressor's FP8_DYNAMIC: a scale for each row."""
    results: dict[str, torch.Tensor] = {}
    for name, value in values.items():
        results[name] = value
        if value.ndim == 2 and "_proj" in name:
            scale = value.float().abs().amax(1, keepdim=True) / 448
            results[name] = (value.float() / scale).to(torch.float8_e4m3fn)
            results[f"{name}_scale"] = scale.bfloat16()
    return results


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
    results: dict[str, torch.Tensor] = {}
    for name, value in values.items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            results[name] = value
            continue
        experts, rows, columns = value.shape
        shape = (experts, columns, rows // 32)
        results[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8)
        results[f"{name}_scales"] = torch.randint(118, 124, shape, dtype=torch.uint8)
    return results


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


def count_reads(monkeypatch: Any) -> list[Counted]:
    """Count what is read of each base that is opened from now on."""
    opened = named_base.stored_tensors
    counted: list[Counted] = []

    def counting(*arguments: Any) -> Any:
        counted.append(Counted(opened(*arguments)))
        return counted[-1]

    monkeypatch.setattr(named_base, "stored_tensors", counting)
    return counted
