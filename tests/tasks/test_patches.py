"""transformers shows the symptoms for which it is patched: a failure tells which patch can go."""

from __future__ import annotations

import inspect
from typing import Any
from unittest.mock import patch

import torch

from tests.support.training import LLAMA, spec_of
from trainer.models.materialise import materialise
from trainer.tasks.patches import masks_made_by, register_attention, replace_loss

IDS = torch.arange(1, 9).reshape(1, 8)


def model() -> Any:
    spec = spec_of(LLAMA)
    made = spec.build()
    materialise(made, spec, seed=0)
    return made.eval()


def test_the_model_shifts_its_labels_and_takes_no_loss() -> None:
    one = model()
    assert "loss_function" not in inspect.signature(type(one).__init__).parameters
    first = torch.where(torch.arange(8) == 0, IDS, -100)  # no target, once shifted
    assert one(input_ids=IDS, labels=first).loss.isnan()
    replace_loss(one, lambda logits, labels, *_, **__: (labels != -100).sum())
    assert one(input_ids=IDS, labels=first).loss == 1


def test_transformers_looks_for_packed_rows_and_makes_masks_anew() -> None:
    from transformers import masking_utils, modeling_flash_attention_utils

    one, made = model(), list[str]()
    looks = inspect.getsource(masking_utils._preprocess_mask_arguments)
    assert "find_packed_sequence_indices(" in looks
    assert "_is_packed_sequence(" in inspect.getsource(modeling_flash_attention_utils)

    def wrapped(make: Any) -> Any:
        def note(*args: Any, **kwargs: Any) -> Any:
            made.append(make.__name__)
            return make(*args, **kwargs)

        return note

    with masks_made_by(wrapped, lambda *_: False):
        for _ in range(2):
            one(input_ids=IDS, use_cache=False)
    assert len(made) == 2  # one for each forward pass, though both are alike
    one(input_ids=IDS, use_cache=False)
    assert len(made) == 2


def test_transformers_computes_attention_by_its_own_function_until_one_is_registered() -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    one, calls = model(), list[str]()
    assert one.config._attn_implementation == "sdpa"

    def ours(module: Any, query: Any, key: Any, value: Any, mask: Any, **_: Any) -> Any:
        calls.append(type(module).__name__)
        return query.transpose(1, 2), None

    with patch.dict(ALL_ATTENTION_FUNCTIONS._global_mapping):
        with_theirs = one(input_ids=IDS).logits
        register_attention(ours)
        register_attention(ours)
        with_ours = one(input_ids=IDS).logits
    assert len(calls) == one.config.num_hidden_layers
    assert not torch.equal(with_theirs, with_ours)
