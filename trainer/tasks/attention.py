"""Attention on CUDA without a mask of sequence x sequence: which kernel runs, and why.

SDPA's fast kernels know whole causal rows alone. For packed documents and windows, layers get
cu_seqlens or blocks in the place of a mask.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask
from torch.nn.attention.varlen import varlen_attn
from transformers.integrations import flex_attention as flex
from transformers.integrations.flex_attention import flex_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from trainer.distributed.context_ranks import ATTRIBUTE, ContextRanks
from trainer.tasks.kernel_order import kernels_for

VARLEN = frozenset(inspect.signature(varlen_attn).parameters)
"""The arguments of PyTorch's attention by cu_seqlens; in 2.10 it has no window and no scale."""


@dataclass(frozen=True)
class CuSeqlens:
    """In the place of a mask: rows laid end to end and cut into documents that stand alone."""

    cuts: torch.Tensor
    """The starts of documents over all rows laid end to end, and the end, int32."""
    row: int
    """The length of a row."""
    window: int | None
    """The most tokens that a token sees, itself included."""
    keys: torch.Tensor | None = None
    """The cuts of the keys, where they are other than those of the queries."""

    def visible_from(self, begin: int, end: int) -> CuSeqlens:
        """Return those for queries from `begin` to `end` of rows, and keys up to `end`."""
        rows = self.cuts // self.row
        within = self.cuts % self.row
        queries = rows * (end - begin) + (within - begin).clamp(0, end - begin)
        return replace(self, cuts=queries, keys=rows * end + within.clamp(max=end))


class AttentionCall(NamedTuple):
    """The attention of a layer, once."""

    pattern: str
    """The kind of its mask."""
    keys: int
    """The width of a key."""
    values: int
    """The width of a value."""
    dropout: float
    sinks: bool
    """True if the softmax has one more entry in each head, whose value is 0."""


@dataclass(frozen=True)
class Sealed:
    """A mask that only `attend` can read; it notes what it is for, and what each layer computes."""

    mask: torch.Tensor
    pattern: str
    calls: list[AttentionCall]


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: object,
    **more: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute attention, [batch, heads, sequence, width] -> [batch, sequence, heads, width].

    Of ranks that share rows, each computes it over whole rows, for a part of the heads. `s_aux`
    [heads], transformers' name for sinks, are in the softmax the score of one more key, whose value
    is 0 (Xiao et al., arXiv 2309.17453; GPT-OSS).
    """
    ranks: ContextRanks | None = getattr(module, ATTRIBUTE, None)
    if not ranks:
        return _attended(module, query, key, value, attention_mask, **more)
    key = ranks.for_each(key)
    value = ranks.for_each(value)
    if more.get("s_aux") is not None:
        more["s_aux"] = ranks.own_heads(more["s_aux"])
    groups = query.shape[1] // key.shape[1]
    known = getattr(module, "num_key_value_groups", 1)
    alike: Any = module
    if groups < known:  # of a rank's heads
        kept = {"training": module.training, "is_causal": getattr(module, "is_causal", True)}
        alike = SimpleNamespace(num_key_value_groups=groups, **kept)
    compute: Any = partial(_attended, alike, attention_mask=attention_mask, **more)
    return ranks.attended(compute, query, key, value)


def _visible_from(mask: torch.Tensor, begin: int, end: int) -> object:
    """Return a mask for the queries from `begin` to `end` of each row, and the keys up to `end`."""
    if isinstance(mask, Mapping):
        return mask[begin]  # in blocks
    if isinstance(mask, CuSeqlens):
        return mask.visible_from(begin, end)
    if mask is None:
        raise ValueError("it attends without a mask")
    return mask[..., begin:end, :end]


def _attended(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    section: tuple[int, int] | None = None,
    **more: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute attention by transformers' own code under any mask but cu_seqlens.

    Queries may be those of a section, with the keys and values up to its end.
    """
    if section is not None:
        attention_mask = _visible_from(attention_mask, *section)
    if isinstance(attention_mask, BlockMask) and more.get("s_aux") is not None:
        return _in_blocks_with_sinks(query, key, value, attention_mask, more), None
    if isinstance(attention_mask, BlockMask):
        return flex_attention_forward(module, query, key, value, attention_mask, **more)
    if isinstance(attention_mask, Sealed):
        if more.get("position_bias") is not None:
            raise ValueError("it adds a position bias to scores")
        widths = key.shape[-1], value.shape[-1]
        call = attention_mask.pattern, *widths, more.get("dropout") or 0.0
        attention_mask.calls.append(AttentionCall(*call, more.get("s_aux") is not None))
        attention_mask = attention_mask.mask
    if not isinstance(attention_mask, CuSeqlens):
        if (sinks := more.pop("s_aux", None)) is not None:
            key, value, attention_mask = _with_sinks(sinks, query, key, value, attention_mask)
        bias = more.get("position_bias")
        with kernels_for(bias if attention_mask is None else attention_mask):
            return sdpa_attention_forward(module, query, key, value, attention_mask, **more)
    cuts = attention_mask.cuts
    row = attention_mask.row
    keys = cuts if attention_mask.keys is None else attention_mask.keys
    behind = (attention_mask.window or 0) - 1  # -1: all
    q, k, v = (part.transpose(1, 2).flatten(0, 1) for part in (query, key, value))
    options: dict[str, Any] = {"scale": more.get("scaling"), "window_size": (behind, 0)}
    if "enable_gqa" in VARLEN:
        options["enable_gqa"] = query.shape[1] != key.shape[1]
    # a row with fewer documents than another has empty ones; cuDNN is not known to take them
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out: Any = varlen_attn(q, k, v, cuts, keys, row, row, **options)
    return out.unflatten(0, (len(query), query.shape[2])), None


def _with_sinks(
    sinks: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return keys, values and what adds to scores with the sink as one more key, of zeros."""
    batch, heads, rows, _ = query.shape
    if mask is None:  # causal rows
        behind = key.shape[2] - rows
        mask = torch.ones(rows, key.shape[2], dtype=torch.bool, device=key.device).tril(behind)
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, -torch.inf)
    scores = sinks.to(mask.dtype).view(1, heads, 1, 1).expand(batch, heads, rows, 1)
    masks = mask.expand(batch, heads, rows, mask.shape[-1])
    key, value = (torch.nn.functional.pad(part, (0, 0, 0, 1)) for part in (key, value))
    return key, value, torch.cat([masks, scores], -1)


def _in_blocks_with_sinks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: BlockMask,
    options: Mapping[str, Any],
) -> torch.Tensor:
    """Compute attention in blocks, and then what the sinks take of each row's softmax.

    With z the logarithm of the sum of exponentials, the other entries keep exp(z) / (exp(z) +
    exp(sink)) of the row. Transformers rounds z to 16 bits.
    """
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (part.repeat_interleave(groups, 1) for part in (key, value))
    output, more = flex.compile_friendly_flex_attention(
        query,
        key,
        value,
        training=True,
        block_mask=mask,
        scale=options.get("scaling"),
        return_aux=AuxRequest(lse=True),
    )
    sinks = options["s_aux"].float().view(1, -1, 1)
    kept = torch.sigmoid(more.lse.float() - sinks).unsqueeze(-1)
    return (output * kept.to(output.dtype)).transpose(1, 2)


MaskFunction = Callable[..., torch.Tensor]
"""`function(row, head, query, key)` is true where a query sees a key, as in transformers."""


def blocks(
    function: MaskFunction, rows: int, section: tuple[int, int], device: torch.device
) -> BlockMask:
    """Make a mask in blocks, for a section's queries and the keys up to its end.

    It is compiled on a GPU, as all entries are written otherwise.
    """
    make = torch.compile(create_block_mask) if device.type == "cuda" else create_block_mask
    begin, end = section

    def sees(
        row: torch.Tensor, head: torch.Tensor, q: torch.Tensor, k: torch.Tensor
    ) -> torch.Tensor:
        return function(row, head, q + begin, k)

    return make(sees if begin else function, rows, None, end - begin, end, device=device)


class Attention(NamedTuple):
    """The demands of a model's attention on its kernels."""

    head_size: int = 0
    """The width of a head; 0 if it is unknown, or values have another width than keys."""
    groups: int = 1
    """The number of query heads to a key head."""
    dropout: float = 0.0
    patterns: frozenset[str] = frozenset()
    """The kinds of its masks: causal, window, other."""
    sinks: bool = False
    """True if the softmax has one more entry in each head."""
    by_attend: bool = False
    """True if `attend` takes the place of eager attention, the only one that the model has."""
    refusal: str = ""
    """The reason why its layers need true masks; empty if they don't."""


class PackedDocuments(NamedTuple):
    """The place of each token in the documents of its row; padding counts as one more document."""

    numbers: torch.Tensor
    """The number of each token's document within its row, int64 [batch, sequence]."""
    positions: torch.Tensor
    """The position of each token in its document, from 0 on, int64 [batch, sequence]."""
    lengths: torch.Tensor
    """The length of each token's document, int64 [batch, sequence]."""
    cu_seqlens: torch.Tensor
    """The starts of documents over all rows laid end to end, and the end, int32."""


def documents_of(lengths: torch.Tensor, sequence: int) -> PackedDocuments:
    """Locate the documents in rows of `sequence` tokens; `lengths` [batch, most] may have zeros."""
    lengths = torch.cat([lengths, sequence - lengths.sum(1, keepdim=True)], 1)
    ends = lengths.cumsum(1)
    places = torch.arange(sequence, device=lengths.device).expand(len(lengths), -1).contiguous()
    numbers = torch.searchsorted(ends, places, right=True)
    positions = places - (ends - lengths).gather(1, numbers)
    cu_seqlens = torch.nn.functional.pad(lengths.flatten().cumsum(0), (1, 0)).to(torch.int32)
    return PackedDocuments(numbers, positions, lengths.gather(1, numbers), cu_seqlens)
