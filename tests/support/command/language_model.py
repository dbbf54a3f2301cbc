"""A small language model, its tokenizer, and a task of lm-eval's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from tests.support.training import LLAMA, VOCABULARY

WORDS = ["<end>", "<user>", "<assistant>", "<system>", *(f"w{n}" for n in range(4, VOCABULARY))]
TEMPLATE = (
    "{% for turn in messages %}<{{ turn.role }}> {{ turn.content }} {% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
PLAIN = LLAMA | {"num_hidden_layers": 4, "attention_dropout": 0.0, "tie_word_embeddings": False}
PLAIN |= {"eos_token_id": 12, "initializer_range": 0.4}
"""Its config calls an ordinary word the end, as one from scratch may; its text is not one word."""


def tokenizer(**options: Any) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}, WORDS[-1]))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"eos_token": "<end>", "additional_special_tokens": WORDS[1:4]}
    return PreTrainedTokenizerFast(tokenizer_object=words, **special, **options)


def plain_model() -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(3)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**PLAIN)).eval()


def write_task(folder: Path, questions: list[tuple[str, list[str], int]]) -> Path:
    rows = [{"text": text, "options": options, "answer": n} for text, options, n in questions]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {
        "task": "own",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": str(folder / "rows.jsonl")},
        "test_split": "train",
        "output_type": "multiple_choice",
        "doc_to_text": "{{text}}",
        "doc_to_choice": "{{options}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc"}],
    }
    (folder / "own.yaml").write_text(json.dumps(task))
    return folder / "own.yaml"
