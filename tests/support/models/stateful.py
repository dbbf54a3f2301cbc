"""Tiny hybrids and recurrent models: layers with state along the sequence, most beside attention."""

from __future__ import annotations

from typing import Any

from tests.support.layouts import family

HEADS = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 8}
MAMBA2 = {"num_heads": 4, "head_dim": 16, "n_groups": 1, "state_size": 8}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
GATED = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "head_dim": 8,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
MIXED = ["mamba", "attention", "mamba"]


def _of(name: str, **values: object) -> dict[str, Any]:
    return family(name, attention_dropout=0.0) | values


STATEFUL: dict[str, dict[str, Any]] = {
    "mamba": _of("mamba", state_size=8),
    "mamba2": _of("mamba2", **MAMBA2),
    "falcon_mamba": _of("falcon_mamba", state_size=8),
    "rwkv": _of("rwkv"),
    "recurrent_gemma": _of("recurrent_gemma", block_types=["recurrent", "attention"]),
    "jamba": _of(
        "jamba",
        attn_layer_period=2,
        attn_layer_offset=1,
        num_experts=2,
        num_experts_per_tok=1,
        mamba_d_state=8,
    ),
    "bamba": _of("bamba", **HEADS, attn_layer_indices=[1]),
    "granitemoehybrid": _of("granitemoehybrid", **HEADS, layer_types=MIXED),
    "falcon_h1": _of("falcon_h1", **HEADS, mamba_d_ssm=64),
    "lfm2": _of("lfm2", layer_types=["conv", "full_attention", "conv"]),
    "nemotron_h": _of(
        "nemotron_h",
        layers_block_type=["mamba", "attention", "mlp"],
        mamba_num_heads=4,
        mamba_head_dim=16,
        n_groups=1,
        ssm_state_size=8,
        head_dim=8,
    ),
    "zamba2": _of(
        "zamba2",
        layers_block_type=["mamba", "hybrid", "mamba"],
        mamba_headdim=16,
        n_mamba_heads=4,
        mamba_ngroups=1,
        mamba_d_state=8,
        num_mem_blocks=1,
    ),
    "qwen3_next": _of("qwen3_next", **GATED, **EXPERTS),
    "qwen3_5_text": _of("qwen3_5_text", **GATED),
}
