"""Tiny masked language models, their configs, and texts for them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from tests.support.labels import BODIES as LABELLED
from tests.support.labels import SIZES, content, tokenizer_of

BODIES: dict[str, dict[str, Any]] = {
    name: LABELLED[name] for name in ("bert", "modernbert", "deberta-v2")
} | {
    "roberta": SIZES | {"model_type": "roberta", "attention_probs_dropout_prob": 0.0},
    "albert": SIZES | {"model_type": "albert", "embedding_size": 16},
    "esm": SIZES | {"model_type": "esm", "mask_token_id": 1, "token_dropout": False},
}
"""ESM adds a bias to what its last linear layer gives: its loss is computed from whole logits."""


def masked_content(body: str, layout: str = "ddp", **trainer: Any) -> dict[str, Any]:
    """Return a config: clipped, decayed, accumulated; a third of the tokens masked."""
    model = {"model": {"config": BODIES[body]}, "masked": {"probability": 0.3}}
    made = content("bert", "single", layout, **(model | trainer))
    made["trainer"]["task"] = "masked_lm"
    del made["trainer"]["labels"]
    return made


def masked_tokenizer() -> Any:
    return tokenizer_of(sep_token="[SEP]", mask_token="[MASK]")


def masked_base(folder: Path, body: str, auto: str = "AutoModelForMaskedLM") -> str:
    """Save a model and its tokenizer; return its folder."""
    import torch
    import transformers

    torch.manual_seed(0)
    path = folder / body
    config = transformers.AutoConfig.for_model(**BODIES[body])
    getattr(transformers, auto).from_config(config).save_pretrained(path)
    masked_tokenizer().save_pretrained(path)
    return str(path)


def written(folder: Path, body: str, layout: str = "ddp", **trainer: Any) -> str:
    """Write a config; return its path."""
    path = folder / "config.json"
    path.write_text(json.dumps(masked_content(body, layout, **trainer)))
    return str(path)


def texts_of(count: int) -> list[dict[str, Any]]:
    """Draw texts in which each second word is the one before it."""
    rng = random.Random(count)
    rows = []
    for _ in range(count):
        words = [rng.choice("abcdefgh") for _ in range(rng.randint(2, 12))]
        rows.append({"text": " ".join(word for word in words for _ in range(2))})
    return rows
