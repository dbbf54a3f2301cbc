"""Architectures whose routed experts are stacked, as transformers' folders."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

FAMILIES = {
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
}


def write_routed(folder_of: Callable[[str], Path]) -> dict[str, str]:
    """Write each family's config to a folder of its own; return the folders by family."""
    from transformers import AutoConfig

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "vocab_size": 96}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    folders = {name: folder_of(name) for name in FAMILIES}
    for name, folder in folders.items():
        AutoConfig.for_model(name, **sizes, **FAMILIES[name]).save_pretrained(folder)
    return {name: str(folder) for name, folder in folders.items()}
