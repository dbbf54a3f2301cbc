"""Libraries show the symptoms for which they are patched: a failure tells which patch can go."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from trainer.models import patches

SIZES = {"hidden_size": 32, "vocab_size": 64, "num_hidden_layers": 3, "intermediate_size": 32}


def model_of(**config: Any) -> Any:
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))


@pytest.mark.parametrize("given", [False, True])
def test_initialisation_draws_every_tensor_that_is_not_marked(given: bool) -> None:
    model = model_of(**SIZES, model_type="llama", num_attention_heads=4)
    table = model.get_input_embeddings()
    nn.init.ones_(table.weight)
    patches.mark_values(table.weight, given=given)
    assert patches.has_values(table.weight) is given
    model._init_weights(table)
    assert torch.equal(table.weight, torch.ones_like(table.weight)) is given


def test_a_text_model_states_another_prefix_than_it_has() -> None:
    model = model_of(**SIZES, model_type="llama4_text", num_attention_heads=4)
    assert model.base_model is model
    patches.correct_prefix(model)
    assert model.base_model is model.model


def test_rwkv_divides_its_weights_in_evaluation() -> None:
    sizes = {**SIZES, "attention_hidden_size": 32, "rescale_every": 2}
    for patched in (False, True):
        model = model_of(**sizes, model_type="rwkv")
        if patched:
            patches.skip_rescaling(model)
        before = model.rwkv.blocks[2].attention.output.weight.clone()
        with torch.no_grad():
            model.eval()(input_ids=torch.ones(1, 4, dtype=torch.long), use_cache=False)
        assert torch.equal(before, model.rwkv.blocks[2].attention.output.weight) is patched
        assert model.config.rescale_every == 2


def test_peft_keeps_no_order_of_target_modules(tmp_path: Path) -> None:
    names = [f"layers.{index}.up" for index in range(12)]
    config = LoraConfig(target_modules=names)
    assert isinstance(config.target_modules, set)
    patches.saved_adapter_config(config).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "adapter_config.json").read_text())
    assert saved["target_modules"] == sorted(names)
    assert saved["inference_mode"] and not config.inference_mode
