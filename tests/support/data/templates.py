"""A tokenizer of bytes with special tokens."""

from __future__ import annotations

from typing import Any

MORE = ["<|end|>", "<|call|>", "<|user|>", "<|observation|>", "<|assistant|>", "<|system|>"]
MORE += ["<|im_start|>", "</tool_call>", "<|END_OF_TURN_TOKEN|>", "<|END_RESPONSE|>"]


def tokenizer_of(eos: str, bos: str = "<bos>", special: list[str] = MORE) -> Any:
    """One token a byte, and special ones."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE({letter: at for at, letter in enumerate(letters)}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    tokens = dict.fromkeys([*special, eos, bos])
    raw.add_special_tokens([AddedToken(one, special=True, normalized=False) for one in tokens])
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token=eos, bos_token=bos)
