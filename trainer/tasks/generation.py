"""Text that a language model writes, at the end of a run and for the commands."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TextStreamer

from trainer.errors import printable, refused
from trainer.models.door import limited
from trainer.models.language_model import positions_of, text_config


class Shown(TextStreamer):
    """Prints what a model writes, as it is written, and keeps it."""

    text = ""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.text += text
        print(printable(text), end="\n" if stream_end else "", flush=True)


def continued(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: Any,
    tokens: int,
    **options: object,
) -> torch.Tensor:
    """Return the tokens [count] of a prompt (text, tokens, or turns of a chat that the model is to
    answer) and at most `tokens` that the model adds.

    `options` are transformers'; by default one of the 50 likeliest tokens is drawn, by temperature
    0 it is the likeliest. Raises ConfigError for a prompt that does not fit, or without room.
    """
    end = tokenizer.eos_token_id
    how = {"do_sample": True, "temperature": 0.8, "top_k": 50} | options
    if not how["temperature"]:
        how |= {"do_sample": False, "temperature": None}
    stated = model.generation_config.eos_token_id
    stated = stated if isinstance(stated, list) else [stated]
    # in a model from scratch it is a default, and may be the number of an ordinary token
    ends = [end, *(token for token in stated if token in tokenizer.all_special_ids)]
    expected = "options in their ranges, and a prompt that fits the model, with room behind it"
    with refused("the text", expected, named=True):  # libraries and templates raise what they like
        if isinstance(prompt, str):  # a command line may hold bytes that are no text
            prompt = tokenizer(prompt.encode(errors="replace").decode())["input_ids"] or [end]
        elif isinstance(prompt[0], dict):
            to_text = partial(tokenizer.apply_chat_template, tokenize=False)
            render = partial(to_text, prompt, add_generation_prompt=True)
            text = limited(render, prompt, tokenizer.name_or_path)
            prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
        row = torch.tensor([prompt], device=model.device)
        room = (positions_of(model, text_config(model)) or math.inf) - row.shape[1]
        how |= {"max_new_tokens": int(min(tokens, room)), "eos_token_id": ends, "pad_token_id": end}
        written: torch.Tensor = model.generate(row, attention_mask=torch.ones_like(row), **how)
    return written[0]
