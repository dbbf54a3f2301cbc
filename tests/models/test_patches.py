"""transformers shows the symptoms for which it is patched: a failure here tells which patch can go."""

from __future__ import annotations

from typing import Any

import pytest
import torch
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
