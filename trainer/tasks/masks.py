"""Attention masks of transformers' models, made once and without waiting for the device.

In every forward pass transformers checks on the host if position ids restart within a row (packed
documents); not every family passes them on to its masks. It also makes a mask for a window that no
row exceeds, which disables the flash kernel, and makes masks anew each time. The model's own code
requests its masks; the functions here answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch

from trainer.errors import ConfigError, Problem
from trainer.tasks.documents import PackedDocuments


class Masks:
    """The replacement of transformers' mask functions, with a cache of the last mask of each
    kind.
    """

    def __init__(self) -> None:
        self._made: dict[Any, tuple[dict[str, Any], torch.Tensor, int]] = {}

    @contextmanager
    def of(self, documents: PackedDocuments | None) -> Iterator[None]:
        """Wrap forward passes in which a token sees only its own document; without `documents`, a
        row is one.

        Flash attention uses no mask: it gets the borders, and a model that does not pass them on to
        it is refused.
        """
        from transformers import masking_utils, modeling_flash_attention_utils

        makers = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS._global_mapping
        is_packed = _refuse if documents else lambda *_: False
        # by hand: mock.patch takes 50 microseconds of each forward pass
        ours: list[tuple[dict[str, Any], str, Any]] = [
            (makers, "sdpa", self._once(makers["sdpa"], documents)),
            (makers, "eager", self._once(makers["eager"], documents)),
            (vars(masking_utils), "find_packed_sequence_indices", lambda position_ids: None),
            (vars(modeling_flash_attention_utils), "_is_packed_sequence", is_packed),
        ]
        theirs = [(place, name, place[name]) for place, name, _ in ours]
        for place, name, value in ours:
            place[name] = value
        try:
            yield
        finally:
            for place, name, value in theirs:
                place[name] = value

    def _once(
        self, make: Callable[..., torch.Tensor | None], documents: PackedDocuments | None
    ) -> Callable[..., torch.Tensor | None]:
        def made(*, mask_function: Any, config: Any = None, **wanted: Any) -> torch.Tensor | None:
            if documents:
                apart = _apart(mask_function, documents)
                return make(
                    mask_function=apart, config=config, **{**wanted, "allow_is_causal_skip": False}
                )
            window, length = wanted.get("local_size"), wanted["kv_length"]
            if wanted.get("allow_is_causal_skip") and window is not None and length <= window:
                wanted["local_size"] = None  # a window as long as the row hides nothing
            kind = None if wanted.get("attention_mask") is not None else _kind(mask_function)
            found = self._made.get((make, kind))
            if found and found[0] == wanted and found[1]._version == found[2]:  # unchanged since
                return found[1]
            mask = make(mask_function=mask_function, config=config, **wanted)
            if kind is not None and type(mask) is torch.Tensor:
                self._made[make, kind] = wanted, mask, mask._version
            return mask

        return made


def _apart(mask_function: Any, documents: PackedDocuments) -> Any:
    """Restrict a mask function to each document, as if it were alone."""
    at, of = documents.positions, documents.numbers
    return lambda row, head, q, k: (
        mask_function(row, head, at[row, q], at[row, k]) & (of[row, q] == of[row, k])
    )


def _refuse(*_: Any) -> bool:
    """Refuse flash attention that got no borders: from position ids it would find them in a single
    row only.
    """
    seen = (
        "the model's code does not tell flash attention where documents end: they would see "
        "one "
        "another"
    )
    mend = 'Set trainer.model.attention to "sdpa", or trainer.data.documents to "pad".'
    raise ConfigError(
        Problem("trainer.data.documents", seen, "a model that hands cu_seq_lens on", mend)
    )


def _kind(function: Any) -> tuple[Any, ...] | None:
    """Identify a mask function by its code and the numbers and functions in it; None if it holds
    anything else.
    """
    if not isinstance(function, FunctionType):
        return None
    found: list[Any] = [function.__code__]
    for cell in function.__closure__ or ():
        for value in (
            cell.cell_contents if isinstance(cell.cell_contents, tuple) else (cell.cell_contents,)
        ):
            part = value if isinstance(value, int | float) else _kind(value)
            if part is None:
                return None
            found.append(part)
    return tuple(found)
