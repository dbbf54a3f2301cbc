"""A new model's vocabulary and special tokens, from the tokenizer that it is trained with."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoConfig

from tests.support.commands import train, write_job
from tests.support.data.templates import tokenizer_of
from tests.support.messages import raises
from trainer.errors import ConfigError
from trainer.models.language.own_vocabulary import align

LLAMA = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
LLAMA |= {"num_attention_heads": 4}


def aligned(tokenizer: Any, **stated: Any) -> tuple[Any, tuple[str, ...]]:
    values = {**LLAMA, **stated}
    config = AutoConfig.for_model(**values)
    return config, align(config, values, tokenizer)


def test_what_is_not_stated_is_the_tokenizers() -> None:
    tokenizer = tokenizer_of("<eos>")
    config, notes = aligned(tokenizer)
    assert config.vocab_size == len(tokenizer) != 32000 and not notes
    ids = tokenizer.bos_token_id, tokenizer.eos_token_id, None
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == ids


def test_a_padding_token_that_ends_texts_is_none_of_the_models() -> None:
    """The row of the embedding at padding_idx has no gradient."""
    tokenizer = tokenizer_of("<eos>")
    tokenizer.pad_token = "<eos>"
    assert aligned(tokenizer)[0].pad_token_id is None
    tokenizer.pad_token = "<|end|>"
    assert aligned(tokenizer)[0].pad_token_id == tokenizer.pad_token_id


def test_what_is_stated_stays_and_is_told_where_it_differs() -> None:
    tokenizer = tokenizer_of("<eos>")
    config, notes = aligned(tokenizer, vocab_size=1000, eos_token_id=7)
    assert (config.vocab_size, config.eos_token_id) == (1000, 7)
    [note] = notes
    assert "eos_token_id is 7" in note and str(tokenizer.eos_token_id) in note
    assert not aligned(tokenizer, eos_token_id=tokenizer.eos_token_id)[1]
    with raises(ConfigError, "vocab_size: 100", "least"):
        aligned(tokenizer, vocab_size=100)


def test_a_model_of_several_parts_has_it_in_its_text() -> None:
    tokenizer, vision = tokenizer_of("<eos>"), {"hidden_size": 32, "num_hidden_layers": 1}
    values = {"model_type": "gemma3", "text_config": {"hidden_size": 32}, "vision_config": vision}
    config = AutoConfig.for_model(**values)
    align(config, values, tokenizer)
    text = config.get_text_config()
    assert (text.vocab_size, text.eos_token_id) == (len(tokenizer), tokenizer.eos_token_id)
    values["text_config"] = {"hidden_size": 32, "vocab_size": 5}
    with pytest.raises(ConfigError, match="vocab_size"):
        align(config, values, tokenizer)
    holes = SimpleNamespace(get_vocab=lambda: {"a": 0, "b": 9}, eos_token_id=9)
    assert align(fresh := AutoConfig.for_model(**LLAMA), LLAMA, holes) == ()
    assert (fresh.vocab_size, fresh.bos_token_id, fresh.eos_token_id) == (10, None, 9)


@pytest.mark.more
def test_a_run_from_scratch_with_an_own_tokenizer_saves_a_config_that_fits(tmp_path: Path) -> None:
    tokenizer = tokenizer_of("<eos>")
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    path = write_job(tmp_path, model={"config": LLAMA})
    result = train("--config", path, f"trainer.data.tokenizer={tmp_path}/tokenizer")
    assert result.code == 0, result.output
    saved = json.loads((tmp_path / "runs/job/final/config.json").read_text())
    assert saved["vocab_size"] == len(tokenizer)
    assert saved["eos_token_id"] == tokenizer.eos_token_id
