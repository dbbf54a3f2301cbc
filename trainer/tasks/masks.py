"""Attention masks of transformers' models, made once and without waiting for the device.

In every forward pass transformers checks on the host if position ids restart within a sequence
(packed documents); not every family passes them on to its masks. It also makes a mask for a window
that no sequence exceeds, which disables the flash kernel, and makes masks again each time. The
model's own code requests its masks. The functions here answer, for SDPA with what adds to scores
(SDPA would make that of a mask of truth values in each layer, and keep it for the backward pass),
or with cu_seqlens or blocks, which have no entry for each pair of tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FunctionType
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedConfig, masking_utils

from trainer.distributed.context_ranks import ContextRanks
from trainer.errors import ConfigError, Problem
from trainer.tasks.attention import CuSeqlens, MaskFunction, PackedDocuments, blocks
from trainer.tasks.patches import masks_made_by

MaskArguments = dict[str, Any]
"""Keyword arguments with which transformers has a mask made; they differ between versions."""


class _Rows(NamedTuple):
    """The rows of the forward passes that run."""

    documents: PackedDocuments | None
    length: int | None
    """The tokens of a sequence of which ranks have parts."""
    sections: list[tuple[int, int]]
    """The begin and end of what this rank's queries are of such a row; empty: the whole."""
    choose: Callable[..., str]
    always: bool
    """True if causal rows need their mask."""


class Masks:
    """The replacement of transformers' mask functions; keeps the last mask of each kind.

    `seal(pattern, mask)` replaces a mask.
    """

    def __init__(self, seal: Callable[..., object] = lambda pattern, mask: mask) -> None:
        self._seal = seal
        self._made: dict[object, tuple[dict[str, object], object, int]] = {}

    @contextmanager
    def of(
        self,
        documents: PackedDocuments | None,
        ranks: ContextRanks | None = None,
        choose: Callable[..., str] = lambda *_: "mask",
        always: bool = False,
    ) -> Iterator[None]:
        """Wrap forward passes in which a token sees only its own document; without `documents`, a
        row is one. Ranks that share rows have a part of each; masks are those of whole rows.

        `choose(pattern, device, dtype)` is one of KERNELS. Flash attention uses no mask: it gets
        the cu_seqlens, and a model that does not pass them on to it is refused. `always`:
        whole causal rows get their mask, too, which most kernels do without.
        """
        row, sections = (ranks.row, ranks.sections) if ranks else (None, [])
        rows = _Rows(documents, row, sections, choose, always)
        is_packed = _refuse if documents else lambda *_: False
        with masks_made_by(lambda make: self._once(make, rows), is_packed):
            yield

    def _once(self, make: Callable[..., torch.Tensor | None], rows: _Rows) -> Callable[..., object]:
        documents = rows.documents

        def made(
            *, mask_function: MaskFunction, config: PreTrainedConfig = None, **wanted: Any
        ) -> object:
            if rows.length is not None:
                wanted = _of_whole_rows(wanted, rows.length)
            window = wanted.get("local_size")
            length = wanted["kv_length"]
            if documents or rows.sections or rows.always:
                wanted["allow_is_causal_skip"] = False
            elif wanted.get("allow_is_causal_skip") and window is not None and length <= window:
                wanted["local_size"] = None  # a window as long as the row hides nothing
            padded = documents or wanted.get("attention_mask") is not None
            kind = None if padded else _kind(mask_function)
            key = make, kind, *rows.sections
            last, mask, version = self._made.get(key, (None, None, 0))
            arguments = {k: v for k, v in wanted.items() if k != "cache_position"}  # a tensor
            if last == arguments and getattr(mask, "_version", 0) == version:  # unchanged since
                return mask
            if make is masking_utils.sdpa_mask:
                mask = self._for_sdpa(mask_function, rows, {**wanted, "config": config})
            else:
                mask = make(mask_function=_apart(mask_function, documents), config=config, **wanted)
            if kind is not None and mask is not None:
                self._made[key] = arguments, mask, getattr(mask, "_version", 0)
            return mask

        return made

    def _for_sdpa(self, function: MaskFunction, rows: _Rows, wanted: MaskArguments) -> object:
        """Return what SDPA's layers get as a mask; None where rows are causal and whole."""
        count = wanted["batch_size"]
        length = wanted["kv_length"]
        window = wanted.get("local_size")
        place = wanted.get("device") or wanted["cache_position"].device  # transformers before 5.4
        is_cast = place.type != "meta" and torch.is_autocast_enabled(place.type)
        dtype = torch.get_autocast_dtype(place.type) if is_cast else wanted["dtype"]
        pattern = _pattern(function, window)
        apart = _apart(function, rows.documents)
        whole = wanted.get("allow_is_causal_skip") and window is None
        given = wanted.get("attention_mask") is not None
        chosen = "mask" if whole or given else rows.choose(pattern, place, dtype)
        if chosen == "cu_seqlens":
            ends = torch.arange(0, (count + 1) * length, length, dtype=torch.int32, device=place)
            return CuSeqlens(rows.documents.cu_seqlens if rows.documents else ends, length, window)
        if chosen == "blocks":
            make = partial(blocks, apart, count, device=place)
            return {ends[0]: make(ends) for ends in rows.sections} or make((0, length))
        mask = masking_utils.sdpa_mask(mask_function=apart, **wanted)
        return None if mask is None else self._seal(pattern, _added(mask, dtype))


def _of_whole_rows(wanted: MaskArguments, length: int) -> MaskArguments:
    """Return a mask's arguments for whole rows, of which the model has a part."""
    whole = {**wanted, **dict.fromkeys({"kv_length", "q_length"} & wanted.keys(), length)}
    if "cache_position" in wanted:  # transformers before 5.4
        device = wanted["cache_position"].device
        whole["cache_position"] = torch.arange(length, device=device)
    return whole


def _added(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return what a mask adds to scores: 0 where it is true, minus infinity elsewhere."""
    written = mask[:1] if mask.stride(0) == 0 else mask  # once, if it is that of every row
    zero = torch.zeros((), dtype=dtype, device=mask.device)
    return torch.where(written, zero, -math.inf).expand_as(mask)


def _pattern(function: MaskFunction, window: int | None) -> str:
    """Name a mask function's kind: causal, window (of `window` tokens), or other."""
    patterns = {"causal": masking_utils.causal_mask_function}
    if window is not None:
        patterns["window"] = masking_utils.sliding_window_causal_mask_function(window)
    kind = _kind(function)
    return next((name for name, own in patterns.items() if _kind(own) == kind), "other")


def _apart(mask_function: MaskFunction, documents: PackedDocuments | None) -> MaskFunction:
    """Restrict a mask function to each document, as if it were alone."""
    if documents is None:
        return mask_function
    at = documents.positions
    of = documents.numbers
    return lambda row, head, q, k: (
        mask_function(row, head, at[row, q], at[row, k]) & (of[row, q] == of[row, k])
    )


def _refuse(*_: object) -> bool:
    """Refuse flash attention without cu_seqlens: position ids show them in a single row only."""
    untold = "the model's code does not tell flash attention where documents end"
    actual = f"{untold}: they would attend to one another"
    expected = "a model that passes cu_seq_lens on"
    hint = 'Set trainer.model.attention to "sdpa", or trainer.data.documents to "pad".'
    raise ConfigError(Problem("trainer.data.documents", actual, expected, hint))


def _kind(function: object) -> tuple[object, ...] | None:
    """Identify a mask function by its code, numbers and functions; None if it holds more."""
    if not isinstance(function, FunctionType):
        return None
    parts: list[object] = [function.__code__]
    for cell in function.__closure__ or ():
        content = cell.cell_contents
        for value in content if isinstance(content, tuple) else (content,):
            part = value if isinstance(value, int | float) else _kind(value)
            if part is None:
                return None
            parts.append(part)
    return tuple(parts)
