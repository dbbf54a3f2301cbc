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
from trainer.tasks.patches import masks_made_by


class Masks:
    """The replacement of transformers' mask functions; keeps the last mask of each kind."""

    def __init__(self) -> None:
        self._made: dict[Any, tuple[dict[str, Any], torch.Tensor, int]] = {}

    @contextmanager
    def of(self, documents: PackedDocuments | None) -> Iterator[None]:
        """Wrap forward passes in which a token sees only its own document; without `documents`, a
        row is one.

        Flash attention uses no mask: it gets the borders, and a model that does not pass them on to
        it is refused.
        """
        is_packed = _refuse if documents else lambda *_: False
        with masks_made_by(lambda make: self._once(make, documents), is_packed):
            yield

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
    """Refuse flash attention without borders: position ids would show them in a single row only."""
    seen = (
        "the model's code does not tell flash attention where documents end: they would see one "
        "another"
    )
    expected = "a model that hands cu_seq_lens on"
    mend = 'Set trainer.model.attention to "sdpa", or trainer.data.documents to "pad".'
    raise ConfigError(Problem("trainer.data.documents", seen, expected, mend))


def _kind(function: Any) -> tuple[Any, ...] | None:
    """Identify a mask function by its code, numbers and functions; None if it holds more."""
    if not isinstance(function, FunctionType):
        return None
    found: list[Any] = [function.__code__]
    for cell in function.__closure__ or ():
        content = cell.cell_contents
        for value in content if isinstance(content, tuple) else (content,):
            part = value if isinstance(value, int | float) else _kind(value)
            if part is None:
                return None
            found.append(part)
    return tuple(found)
