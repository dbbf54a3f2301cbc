"""The vocabulary and the special tokens of a new model's config, from its tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from trainer.errors import ConfigError, Problem
from trainer.models.language import model_config
from trainer.storage import Json

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

    from trainer.config.sections.model_and_data import ModelSection

IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def align_new(
    options: ModelSection, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> tuple[str, ...]:
    """Align the config of a new model as `align` does; a base has its own vocabulary."""
    if options.name_or_path is not None:
        return ()
    return align(config, model_config.stated(options.config), tokenizer)


def align(
    config: PreTrainedConfig, stated: Json, tokenizer: PreTrainedTokenizerBase
) -> tuple[str, ...]:
    """Set a new model's vocabulary and special tokens, in place, to the tokenizer's.

    What the user has `stated` stays; returns a note on each stated token that differs. A padding
    token that also begins or ends texts is not set, as its embedding would get no gradient. Raises
    ConfigError for a stated vocabulary that is too small for the tokenizer's ids.
    """
    text = config.get_text_config()
    inner = stated.get("text_config")
    own = {**stated, **(inner if isinstance(inner, Mapping) else {})}
    names = {"vocab_size", text.attribute_map.get("vocab_size", "vocab_size")}
    rows = max(tokenizer.get_vocab().values(), default=-1) + 1
    of_tokenizer = {name: getattr(tokenizer, name, None) for name in IDS}
    if of_tokenizer["pad_token_id"] in (of_tokenizer["bos_token_id"], of_tokenizer["eos_token_id"]):
        of_tokenizer["pad_token_id"] = None
    stated_ids = {name: own[name] for name in IDS if name in own}
    values = {name: value for name, value in of_tokenizer.items() if name not in own}
    if given := [own[name] for name in names if name in own]:
        if given[0] < rows:
            expected = f"at least {rows:,}, for all ids of the tokenizer"
            hint = "Leave it out: it is then the tokenizer's"
            place = "trainer.model.config.vocab_size"
            raise ConfigError(Problem(place, f"{given[0]:,}", expected, hint))
    else:
        values["vocab_size"] = rows
    for part in (text, config):
        part.update({name: value for name, value in values.items() if hasattr(part, name)})
    differing = [
        f"{name} is {value} in trainer.model.config, and the tokenizer has {of_tokenizer[name]}"
        for name, value in stated_ids.items()
        if value != of_tokenizer[name]
    ]
    return tuple(differing)
