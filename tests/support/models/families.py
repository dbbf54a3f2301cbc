"""A small config of each family of models, and models with values."""

from __future__ import annotations

from typing import Any

from tests.support.training import GPT2, LLAMA, VOCABULARY
from trainer.models.materialise import materialise

SMALL: dict[str, Any] = {
    key: value for key, value in LLAMA.items() if key not in ("model_type", "tie_word_embeddings")
}
# family -> (what its config needs beside the small one, whether nothing but the head makes the
# logits)
FAMILIES = {
    "llama": ({}, True),
    "mistral": ({}, True),
    "qwen2": ({}, True),
    "qwen3": ({"head_dim": 8}, True),
    "olmo2": ({}, True),
    "phi3": ({"pad_token_id": 0, "eos_token_id": 0, "bos_token_id": 0}, True),
    "gemma2": ({"head_dim": 8}, False),  # soft caps
    "cohere": ({}, False),  # a logit scale
    "granite": ({}, False),  # divides the logits
    "gpt_neox": ({}, True),
    "gpt2": (
        {key: value for key, value in GPT2.items() if key not in ("model_type", "vocab_size")},
        True,
    ),
    "qwen3_moe": (
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8},
        True,
    ),
}


def family(name: str) -> dict[str, Any]:
    extra, _ = FAMILIES[name]
    return {
        "model_type": name,
        **({"vocab_size": VOCABULARY} if name == "gpt2" else SMALL),
        **extra,
    }


def real(spec: Any, seed: int = 0) -> Any:
    model = spec.build()
    materialise(model, spec, seed=seed)
    return model.eval()
