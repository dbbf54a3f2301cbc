"""Tiny models with a head for labels, their configs, and rows for them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
CAUSAL = {"num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2}
BODIES: dict[str, dict[str, Any]] = {
    "llama": SIZES | CAUSAL | {"model_type": "llama", "attention_dropout": 0.1},
    "qwen3": SIZES | CAUSAL | {"model_type": "qwen3", "head_dim": 8},
    "bert": SIZES | {"model_type": "bert"},
    "modernbert": SIZES
    | {
        "model_type": "modernbert",
        "local_attention": 8,
        "classifier_dropout": 0.1,
        **{name: 1 for name in ("bos_token_id", "cls_token_id")},
        **{name: 2 for name in ("eos_token_id", "sep_token_id")},
    },
    "deberta-v2": SIZES
    | {
        "model_type": "deberta-v2",
        "relative_attention": True,
        "pos_att_type": ["p2c", "c2p"],
        "position_buckets": 16,
        "share_att_key": True,
        "norm_rel_ebd": "layer_norm",
    },
    "qwen3_moe": SIZES
    | CAUSAL
    | {
        "model_type": "qwen3_moe",
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    },
}
"""The bidirectional ones have dropout in attention, in the blocks and before the head."""
KINDS = ("single", "multi", "regression", "tokens", "reward")
LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "zero2": {"zero_optimization": {"stage": 2}},
    "zero3": {"zero_optimization": {"stage": 3}},
    "fsdp": {"zero_optimization": {"stage": 3}, "trainer": {"engine": "accelerate"}},
    "hsdp": {
        "zero_optimization": {"stage": 3},
        "trainer": {"mesh": {"replicate": 2, "shard": 2}},
    },
    "pipeline_zero2": {"zero_optimization": {"stage": 2}, "pipeline": {"stages": 2}},
    "tensor_zero2": {"zero_optimization": {"stage": 2}, "tensor_parallel": {"autotp_size": 2}},
    "context": {"sequence_parallel_size": 2},
    "expert": {
        "zero_optimization": {"stage": 2},
        "expert_parallel": {"enabled": True, "autoep_size": 2},
    },
    "lora": {"zero_optimization": {"stage": 2}, "trainer": {"adapter": {"r": 4}}},
}


WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", *"abcdefgh")


def tokenizer_of(**special: str) -> Any:
    """Return a tokenizer of words of one letter, which puts [CLS] and [SEP] around a text."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    ids = {word: number for number, word in enumerate(WORDS)}
    plain = Tokenizer(models.WordLevel(ids, unk_token="[UNK]"))
    plain.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Whitespace(), pre_tokenizers.Split("", "isolated")]
    )
    plain.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    known = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]"}
    names = ["input_ids", "token_type_ids", "attention_mask"]
    return PreTrainedTokenizerFast(
        tokenizer_object=plain, model_input_names=names, **known, **special
    )


def content(body: str, kind: str, layout: str = "ddp", **trainer: Any) -> dict[str, Any]:
    """Return a config: clipped, decayed, accumulated."""
    of_layout = dict(LAYOUTS[layout])
    section = {
        "task": "labels",
        "model": {"config": BODIES[body]},
        "labels": {"kind": kind, **({"centring": 0.01} if kind == "reward" else {})},
        "data": {"path": "rows.jsonl", "sequence_length": 32, "evaluation_fraction": 0.1},
        "device": "cpu",
        "run": {"folder": "runs"},
        "log": {"every": 1},
        **of_layout.pop("trainer", {}),
        **trainer,
    }
    return {
        "train_batch_size": 16,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.1}},
        **of_layout,
        "trainer": section,
    }


def base_of(folder: Path, body: str) -> str:
    """Save a body without a head for labels, as a hub has it; return its folder."""
    import torch
    from transformers import AutoConfig, AutoModel

    torch.manual_seed(0)
    path = folder / body
    AutoModel.from_config(AutoConfig.for_model(**BODIES[body])).save_pretrained(path)
    tokenizer_of(eos_token="[SEP]").save_pretrained(path)
    return str(path)


def rows_of(kind: str, count: int) -> list[dict[str, Any]]:
    """Draw rows whose labels can be learned from their words."""
    rng = random.Random(count)
    rows = []
    for _ in range(count):
        words = [rng.choice("abcdefgh") for _ in range(rng.randint(2, 12))]
        text = " ".join(words)
        more = sum(word < "e" for word in words) * 2 - len(words)
        if kind == "reward":
            worse = " ".join(rng.choice("efgh") for _ in words)
            rows.append({"chosen": text, "rejected": worse, "margin": rng.random() / 4})
        elif kind == "tokens":
            tags = ["low" if word < "e" else "high" for word in words]
            rows.append({"tokens": words, "ner_tags": tags})
        else:
            label: Any = {"single": "more" if more > 0 else "less", "regression": more / 4}
            names = {"multi": sorted({*words} & {*"ace"})}
            rows.append({"text": text, "label": (label | names)[kind]})
    return rows


def written(folder: Path, body: str, kind: str, layout: str = "ddp", **trainer: Any) -> str:
    """Write a config; return its path."""
    path = folder / "config.json"
    path.write_text(json.dumps(content(body, kind, layout, **trainer)))
    return str(path)
