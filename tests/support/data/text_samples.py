"""Rows of text, their tokenizer, and the options that read them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trainer.config import DataSection

WORDS = ["<end>", "<bos>", *"abcdefgh"]


def tokenizer(beginning: bool = False) -> Any:
    """One token per word; with `beginning`, one that begins every text with <bos>, as Llama's
    does.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({word: at for at, word in enumerate(WORDS)}, unk_token="h"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if beginning:
        words.post_processor = processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", 1)]
        )
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", bos_token="<bos>")


def options(path: Any, **changes: Any) -> DataSection:
    shape = {"sequence_length": 4, "documents": "concatenate", "evaluation_fraction": 0.0}
    return DataSection(**{"path": str(path), **shape, **changes})


def write_rows(path: Path, *rows: dict[str, str] | str) -> Path:
    objects = [{"text": row} if isinstance(row, str) else row for row in rows]
    path.write_text("".join(json.dumps(row) + "\n" for row in objects))
    return path
