"""Masks: no wait for the device in a step, the flash kernel where a window hides nothing, the
model's own numbers.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.support.models.masks import FAMILIES, WINDOW, Waits, batch, tiny
from trainer.layout import Recompute
from trainer.parallel.recompute import activation_checkpointing as recompute
from trainer.tasks.masks import Masks


@pytest.fixture
def attention(monkeypatch) -> list[dict[str, Any]]:
    """The arguments of every call of PyTorch's attention."""
    calls: list[dict[str, Any]] = []
    real = F.scaled_dot_product_attention

    def watched(*args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(kwargs)
        return real(*args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    return calls


@pytest.mark.first("llama-none", "mistral-selective")
@pytest.mark.parametrize("mode", ["none", "full", "selective"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_step_waits_for_nothing(name, mode):
    spec, task, model = tiny(name)
    recompute.apply(model, spec, Recompute(mode))
    with Waits() as waits:
        for length in (WINDOW - 2, WINDOW, WINDOW + 4):
            task.loss_sum(model, batch(length, rows=1)).backward()
    assert waits.found == []


def test_the_watch_sees_what_it_looks_for():
    _, _, model = tiny("llama")
    with Waits() as waits:
        model(**{"input_ids": batch(4)["input_ids"]}, use_cache=False)
        bool(torch.ones(2).all())
        torch.ones(2)[torch.tensor([True, False])]
    assert waits.found == ["_local_scalar_dense", "_local_scalar_dense", "index"]


@pytest.mark.more
@pytest.mark.parametrize(
    "name", [name for name in FAMILIES if name != "gemma2"]
)  # its soft caps need eager attention
def test_a_window_that_hides_nothing_leaves_the_flash_kernel(name, attention):
    _, task, model = tiny(name)
    attention.clear()  # of the trial on a tiny copy
    for length in (WINDOW - 2, WINDOW):
        task.loss_sum(model, batch(length))
    assert len(attention) == 4
    assert all(call["is_causal"] and call["attn_mask"] is None for call in attention)


def test_a_mask_is_made_once_for_all_forward_passes(attention):
    _, task, model = tiny("mistral")
    attention.clear()  # of the trial on a tiny copy
    for length in (WINDOW + 4, WINDOW + 4, WINDOW + 5, WINDOW + 4):
        task.loss_sum(model, batch(length))
    masks = [call["attn_mask"] for call in attention[::2]]
    assert masks[0] is masks[1]
    assert masks[2].shape[-1] == WINDOW + 5 and masks[3].shape[-1] == WINDOW + 4
    # more rows, another mask
    task.loss_sum(model, batch(WINDOW + 4, rows=3))
    assert attention[-1]["attn_mask"].shape[0] == 3


def test_a_mask_that_was_written_into_is_made_again():
    from transformers.masking_utils import create_sliding_window_causal_mask

    _, _, model = tiny("mistral")
    masks, inputs = Masks(), torch.zeros(1, WINDOW + 4, 32)
    with masks.of(None):
        first = create_sliding_window_causal_mask(model.config, inputs, None, None)
        expected = first.clone()
        first[..., 0] = False
        again = create_sliding_window_causal_mask(model.config, inputs, None, None)
    assert torch.equal(again, expected) and again is not first


def test_outside_of_a_forward_pass_transformers_is_as_it_was():
    from transformers import masking_utils

    before = (
        masking_utils.find_packed_sequence_indices,
        dict(masking_utils.ALL_MASK_ATTENTION_FUNCTIONS),
    )
    with pytest.raises(RuntimeError), Masks().of(None):
        assert masking_utils.find_packed_sequence_indices is not before[0]
        raise RuntimeError
    assert before == (
        masking_utils.find_packed_sequence_indices,
        dict(masking_utils.ALL_MASK_ATTENTION_FUNCTIONS),
    )


@pytest.mark.first("gemma2-sdpa")
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", FAMILIES)
def test_loss_and_gradients_are_those_of_the_models_own_forward(name, attention):
    if (name, attention) == ("gemma2", "sdpa"):
        pytest.skip("its soft caps need eager attention")
    _, task, ours = tiny(name)
    _, _, own = tiny(name)
    for model in (ours, own):
        model.set_attn_implementation(attention)
    for length in (WINDOW, WINDOW + 5, WINDOW + 5, WINDOW + 1):
        inputs = batch(length)
        task.loss_sum(ours, inputs).backward()
        logits = own(input_ids=inputs["input_ids"], use_cache=False).logits
        F.cross_entropy(
            logits.flatten(0, 1), inputs["targets"].flatten(), reduction="sum"
        ).backward()
    for (key, mine), theirs in zip(ours.named_parameters(), own.parameters(), strict=True):
        if theirs.grad is not None:
            torch.testing.assert_close(
                mine.grad, theirs.grad, rtol=1e-5, atol=1e-4, msg=lambda text, key=key: key + text
            )
