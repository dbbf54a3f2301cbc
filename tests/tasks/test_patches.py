"""transformers shows the symptoms for which it is patched: a failure tells which patch can go."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from tests.support.training import LLAMA, spec_of
from trainer.models.materialise import materialise
from trainer.tasks.patches import masks_made_by, replace_loss

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
