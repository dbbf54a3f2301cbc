"""Tiny bodies with a tokenizer of words, in folders that transformers opens."""

from __future__ import annotations

import json
from pathlib import Path

import torch

WORDS = 60
LENGTH = 10
"""The most tokens of a text."""


def bert_folder(folder: Path, dropout: float = 0.0) -> Path:
    """Write a tiny BERT with its tokenizer, which begins and ends each text."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=WORDS + 4, hidden_size=16, num_hidden_layers=3, num_attention_heads=4,
        intermediate_size=24, max_position_embeddings=32, hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout, initializer_range=0.3,
    )  # fmt: skip
    BertModel(config).save_pretrained(folder)
    write_tokenizer(folder, "[CLS] $A [SEP]")
    return folder


def llama_folder(folder: Path) -> Path:
    """Write a tiny Llama with its head, and a tokenizer that ends each text."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS + 4, hidden_size=16, intermediate_size=24, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, initializer_range=0.3,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    write_tokenizer(folder, "$A [SEP]")
    return folder


def write_tokenizer(folder: Path, template: str) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    words = special + [f"w{number}" for number in range(WORDS)]
    numbers = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(numbers, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    ends = [(word, numbers[word]) for word in ("[CLS]", "[SEP]") if word in template]
    tokenizer.post_processor = processors.TemplateProcessing(template, special_tokens=ends)
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "sep_token": "[SEP]"}
    if "[CLS]" in template:
        names["cls_token"] = "[CLS]"
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=LENGTH, **names)
    made.save_pretrained(folder)


def write_texts(path: Path, count: int, negatives: int = 0) -> Path:
    """Write different pairs, or triplets: a positive has the words of its anchor."""
    generator = torch.Generator().manual_seed(0)

    def words(number: int) -> str:
        length = 1 + int(torch.randint(8, (), generator=generator))
        others = torch.randint(WORDS, (length,), generator=generator).tolist()
        return " ".join(f"w{word}" for word in (number % WORDS, *others))

    rows = []
    for number in range(count):
        row = {"anchor": words(number), "positive": words(number)}
        row |= {f"negative_{at + 1}": words(number + at + 1) for at in range(negatives)}
        rows.append(json.dumps(row))
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return path
