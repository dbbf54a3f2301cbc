"""The same architecture made tiny: what is proved of the copy holds for the model."""

from __future__ import annotations

import copy
from typing import Any

VOCABULARY = 97

# attribute of a transformers config -> what it becomes, where there is one and it is larger
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "head_dim": 8,
    "num_attention_heads": 4,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "sliding_window": 8,
}


def shrink_model(architecture: Any, layers: int = 2) -> Any:
    """The same architecture with fewer, narrower blocks: same dropout, tying, attention, kinds of layers.

    It has `layers` blocks, more where it takes more to have one of each kind, and never more than it had.
    """
    small = copy.deepcopy(architecture)
    heads, kv_heads = (getattr(small, name, None) for name in ("num_attention_heads", "num_key_value_heads"))
    kinds = getattr(small, "layer_types", None)
    layers = max(layers, *(kinds.index(kind) + 1 for kind in set(kinds))) if kinds else layers
    for name, size in SIZES.items():
        value = getattr(small, name, None)
        if name == "head_dim" and hasattr(small, "qk_rope_head_dim"):
            continue  # latent attention puts its heads together from parts that stay as they are
        if isinstance(value, int) and value > size:
            setattr(small, name, size)
    small.num_hidden_layers = min(layers, architecture.num_hidden_layers)
    if kinds and small.layer_types != kinds[: small.num_hidden_layers]:  # some work it out themselves
        small.layer_types = kinds[: small.num_hidden_layers]
    if kv_heads is not None:
        small.num_key_value_heads = small.num_attention_heads if kv_heads == heads else min(kv_heads, 2)
    small.vocab_size = VOCABULARY
    for token in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if isinstance(getattr(small, token, None), int):
            setattr(small, token, 0)
    return small
