"""Tokenizers: one that the user names, or a small one trained on the embedded corpus at first
use.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer.data.cache import cached_folder
from trainer.data.progress import QUIET, Progress
from trainer.data.text import corpus
from trainer.errors import DataError, Problem, first_line

END_OF_TEXT = "<|endoftext|>"


def tokens_of(tokenizer: Any, texts: Sequence[str], offsets: bool = False) -> Any:
    """Tokenise each text without special tokens: `input_ids`, and their `offset_mapping` if
    `offsets`.

    Takes about 160 bytes of memory per character.
    """
    options = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}
    return tokenizer(
        list(texts), **options, **({"return_offsets_mapping": True} if offsets else {})
    )


def load_tokenizer(
    name_or_path: str, trust_remote_code: bool = False, revision: str | None = None, **options: Any
) -> Any:
    """Load the tokenizer of a folder or hub id. Raises DataError for none, or without an end of
    text.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            name_or_path, trust_remote_code=trust_remote_code, revision=revision, **options
        )
    except (
        Exception
    ) as error:  # from a dozen libraries: OSError, ValueError, KeyError, bare Exception
        seen = f"no tokenizer could be loaded ({first_line(error)})"
        expected = "a folder with a tokenizer, or a hub id"
        raise DataError(
            Problem(name_or_path, seen, expected, "Set trainer.data.tokenizer")
        ) from error
    end_of_text(tokenizer)
    return tokenizer


def embedded_tokenizer(
    cache_folder: Path, vocabulary: int = 4096, progress: Progress = QUIET, **options: Any
) -> Any:
    """Return a byte-level BPE of `vocabulary` tokens for the embedded corpus, trained at first use
    (seconds) and cached, with `options` of its constructor.
    Deterministic. Raises DiskError if it can't be stored."""
    from transformers import PreTrainedTokenizerFast

    name = f"tokenizer-{corpus.name()}-{vocabulary}"
    folder = cached_folder(cache_folder, name, lambda folder: _train(vocabulary, folder), progress)
    return PreTrainedTokenizerFast.from_pretrained(folder, **options)


def end_of_text(tokenizer: Any) -> int:
    """Return the id of the token that ends a document; raises DataError if the tokenizer has
    none.
    """
    if tokenizer.eos_token_id is None:
        mend = "Set eos_token in its tokenizer_config.json"
        raise DataError(
            Problem(_name(tokenizer), "a tokenizer without an end-of-text token", "eos_token", mend)
        )
    return int(tokenizer.eos_token_id)


def tokenizer_key(tokenizer: Any) -> str:
    """Return a digest that two tokenizers share only if they turn the same text into the same
    tokens.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    content = (
        backend.to_str()
        if backend is not None
        else json.dumps([_name(tokenizer), tokenizer.get_vocab()])
    )
    parts = (content, str(tokenizer.bos_token_id), str(tokenizer.eos_token_id))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _train(vocabulary: int, folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus.documents(), trainer)
    PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, eos_token=END_OF_TEXT, clean_up_tokenization_spaces=False
    ).save_pretrained(folder)


def _name(tokenizer: Any) -> str:
    return str(getattr(tokenizer, "name_or_path", "")) or type(tokenizer).__name__
