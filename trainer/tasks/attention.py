"""Attention on CUDA without a mask of sequence x sequence: which kernel runs, and why.

SDPA's fast kernels know whole causal rows alone. For packed documents and windows, layers get
borders or blocks in the place of a mask.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch.nn import attention
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from torch.nn.attention.varlen import varlen_attn
from torch.utils._triton import has_triton
from transformers.integrations.flex_attention import flex_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from trainer.distributed.context_ranks import ATTRIBUTE, ContextRanks
from trainer.errors import named_line
from trainer.models.spec import ModelSpec
from trainer.tasks.kernel_order import BACKENDS, kernels_for, prefer
from trainer.tasks.patches import register_attention
from trainer.trial.setup import own_randomness, row_of, tiny

VARLEN = frozenset(inspect.signature(varlen_attn).parameters)
"""The arguments of PyTorch's attention within borders; in 2.10 it has no window and no scale."""
KERNELS = {
    "borders": "flash attention within borders",
    "blocks": "flex attention in blocks",
    "mask": "a mask of sequence x sequence",
}
"""The ways to compute packed documents and windows; the first that fits is taken."""


@dataclass(frozen=True)
class Borders:
    """In the place of a mask: rows laid end to end and cut into documents that stand alone."""

    cuts: torch.Tensor
    """The starts of documents over all rows laid end to end, and the end, int32."""
    row: int
    """The length of a row."""
    window: int | None
    """The most tokens that a token sees, itself included."""
    keys: torch.Tensor | None = None
    """The cuts of the keys, where they are other than those of the queries."""

    def seen_from(self, begin: int, end: int) -> Borders:
        """Return the borders for queries from `begin` to `end` of rows, and keys up to `end`."""
        rows, within = self.cuts // self.row, self.cuts % self.row
        queries = rows * (end - begin) + (within - begin).clamp(0, end - begin)
        return replace(self, cuts=queries, keys=rows * end + within.clamp(max=end))


@dataclass(frozen=True)
class Sealed:
    """A mask that only `attend` can read; it notes what it is for, and what each layer computes."""

    mask: torch.Tensor
    pattern: str
    calls: list[tuple[str, int, int, float]]
    """The pattern, the widths of keys and values, and the dropout."""


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    **more: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute attention, [batch, heads, sequence, width] -> [batch, sequence, heads, width].

    Of ranks that share rows, each computes it over whole rows, for a part of the heads.
    """
    ranks: ContextRanks | None = getattr(module, ATTRIBUTE, None)
    if not ranks:
        return _attended(module, query, key, value, attention_mask, **more)
    key, value = ranks.for_each(key), ranks.for_each(value)
    groups, known = query.shape[1] // key.shape[1], getattr(module, "num_key_value_groups", 1)
    alike: Any = module
    if groups < known:  # of a rank's heads
        kept = {"training": module.training, "is_causal": getattr(module, "is_causal", True)}
        alike = SimpleNamespace(num_key_value_groups=groups, **kept)
    compute: Any = partial(_attended, alike, attention_mask=attention_mask, **more)
    return ranks.attended(compute, query, key, value)


def _seen_from(mask: Any, begin: int, end: int) -> Any:
    """Return a mask for the queries from `begin` to `end` of each row, and the keys up to `end`."""
    if isinstance(mask, Mapping):
        return mask[begin]  # in blocks
    if isinstance(mask, Borders):
        return mask.seen_from(begin, end)
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
    """Compute attention by transformers' own code under any mask but borders.

    Queries may be those of a section, with the keys and values up to its end.
    """
    if section is not None:
        attention_mask = _seen_from(attention_mask, *section)
    if isinstance(attention_mask, BlockMask):
        return flex_attention_forward(module, query, key, value, attention_mask, **more)
    if isinstance(attention_mask, Sealed):
        if more.get("position_bias") is not None:
            raise ValueError("it adds a position bias to scores")
        widths = key.shape[-1], value.shape[-1]
        attention_mask.calls.append((attention_mask.pattern, *widths, more.get("dropout") or 0.0))
        attention_mask = attention_mask.mask
    if not isinstance(attention_mask, Borders):
        bias = more.get("position_bias")
        with kernels_for(bias if attention_mask is None else attention_mask):
            return sdpa_attention_forward(module, query, key, value, attention_mask, **more)
    cuts, row = attention_mask.cuts, attention_mask.row
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


def blocks(function: Any, rows: int, section: tuple[int, int], device: torch.device) -> BlockMask:
    """Make a mask in blocks, for a section's queries and the keys up to its end.

    It is compiled on a GPU, as all entries are written otherwise.
    """
    make = torch.compile(create_block_mask) if device.type == "cuda" else create_block_mask
    begin, end = section

    def sees(row: Any, head: Any, q: Any, k: Any) -> Any:
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
    refusal: str = ""
    """The reason why its layers need true masks; empty if they don't."""


def attention_of(spec: ModelSpec, logits: Callable[..., torch.Tensor]) -> Attention:
    """Try masks that only `attend` can read on a tiny copy: it must compute the same with them.

    `logits(model, row, seal)` runs packed documents; `seal(pattern, mask)` replaces each mask.
    """
    register_attention(attend)
    calls: list[tuple[str, int, int, float]] = []
    try:
        with own_randomness(), torch.no_grad():
            small, model = tiny(spec)
            found = []
            for seal in (lambda _, mask: mask, lambda kind, mask: Sealed(mask, kind, calls)):
                torch.default_generator.manual_seed(1)
                found.append(logits(model.train(), row_of(small)[None], seal))
    except Exception as error:  # whatever a model's own code raises about what is no tensor
        return Attention(refusal=f"its layers need it ({named_line(error, 80)})")
    if not calls or not torch.equal(*found):
        kind = model.config._attn_implementation  # type: ignore[union-attr]
        return Attention(refusal=f"its attention ({kind}) is not transformers' SDPA")
    patterns, keys, values, dropouts = map(set, zip(*calls, strict=True))
    languages = small.language, spec.language
    of_tiny, size = (part.attention_width // (part.heads or 1) for part in languages)
    if not keys == values == {of_tiny}:
        size = 0
    groups, dropout = spec.language.heads // (spec.language.kv_heads or 1), max(dropouts)
    refusal = f"neither flash nor flex attention takes dropout of {dropout:g}" if dropout else ""
    return Attention(size, groups, dropout, frozenset(patterns), refusal)


def tested(
    model: Attention, pattern: str, dtype: torch.dtype, device: torch.device, divided: bool = False
) -> tuple[str, str]:
    """Choose the first of KERNELS that computes the right values on this GPU, and say why not one
    before it. `divided`: for sections of rows.

    Each rank chooses by itself: kernels communicate nothing, and all compute the same.
    """
    if model.refusal:
        return "mask", model.refusal
    generation, reasons = torch.cuda.get_device_capability(device)[0], list[str]()
    for kernel in ("borders", "blocks"):
        reason = _unfit(kernel, model, pattern, dtype, generation)
        if not reason:
            shape = model.head_size, model.groups
            fault = fault_of(kernel, *shape, pattern, dtype, device, divided)
            if not fault:
                return kernel, "; ".join(reasons)
            reason = f"{KERNELS[kernel]} failed its test: {fault}"
        reasons.append(reason)
    return "mask", "; ".join(reasons)


def _unfit(kernel: str, model: Attention, pattern: str, dtype: torch.dtype, generation: int) -> str:
    """Return the reason why a kernel can't compute a pattern, or nothing.

    `generation` is the major number of a GPU's compute capability.
    """
    if kernel == "blocks":
        return "" if has_triton() else "there is no Triton"
    if pattern == "other":
        return "it is neither causal nor a window"
    if not (reason := _no_flash(model, dtype, generation)) and "window_size" not in VARLEN:
        return f"torch {torch.__version__} has no windows in varlen_attn"
    return reason


def _no_flash(model: Attention, dtype: torch.dtype, generation: int) -> str:
    if generation < 8:
        return "flash attention needs compute capability 8.0"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"flash attention takes no {str(dtype).removeprefix('torch.')}"
    if not model.head_size:
        return "values may have other heads than keys"
    if model.head_size > 256 or model.head_size % 8:
        return f"flash attention takes no heads of {model.head_size}"
    return ""


@cache
@torch.inference_mode(False)
@torch.enable_grad()
@own_randomness()
def fault_of(
    kernel: str,
    size: int,
    groups: int,
    pattern: str,
    dtype: torch.dtype,
    device: torch.device,
    divided: bool = False,
) -> str:
    """Compare a kernel's output and gradients for packed documents with those of SDPA's
    plain operators and a mask in float32; return what differs. `divided`: in two sections.
    """
    length, window = 160, 7 if pattern == "window" else None
    sections = [(0, 64), (64, length)] if divided else [(0, length)]
    documents = documents_of(torch.tensor([[70, 90], [41, 0]], device=device), length)
    at, number = torch.arange(length, device=device), documents.numbers
    module: Any = SimpleNamespace(num_key_value_groups=groups, training=True)

    def sees(row: Any, head: Any, q: Any, k: Any) -> Any:
        return (q >= k) & (q - k < (window or length)) & (number[row, q] == number[row, k])

    def attended(at: int, end: int, mask: Any, q: Any, k: Any, v: Any) -> torch.Tensor:
        own = q[:, :, at:end], k[:, :, :end], v[:, :, :end], mask
        return attend(module, *own, section=(at, end), scaling=0.1)[0]

    def computed(mask: Any, *kind: Any) -> list[torch.Tensor]:
        heads = [part.to(*kind).requires_grad_() for part in drawn]
        out = torch.cat([attended(at, end, mask, *heads) for at, end in sections], 1)
        ramp = torch.linspace(-1, 1, out.numel()).to(dtype).view_as(out).to(out)
        parts = (out, *torch.autograd.grad(out, heads, ramp))
        return [part.detach().float() for part in parts]

    keys, values = (size, size) if size else (192, 128)  # those of DeepSeek
    shapes = (2 * groups, keys), (2, keys), (2, values)
    with torch.autocast(device.type, enabled=False), sdpa_kernel(SDPBackend.MATH):
        torch.default_generator.manual_seed(0)
        drawn = [torch.randn(2, heads, length, width).to(dtype) for heads, width in shapes]
        mask = sees(at[:2, None, None, None], None, at[:, None], at)
        right = computed(mask, device, torch.float32)
        try:
            if kernel == "borders":
                given: Any = Borders(documents.borders, length, window)
            else:
                given = {ends[0]: blocks(sees, 2, ends, device) for ends in sections}
            found = computed(given, device)
        except Exception as error:  # whatever a kernel or its compiler raises
            return named_line(error, 80)
        finally:
            if kernel == "blocks":
                torch.compiler.reset()  # it would make the length of the run's own rows dynamic
    most = 8 * max(torch.finfo(dtype).eps, 2**-10)  # float32 may be computed as TF32
    names = ("output", "gradient of q", "gradient of k", "gradient of v")
    for name, mine, true in zip(names, found, right, strict=True):
        share = float((mine - true).abs().max() / true.abs().max())
        if not share <= most:  # or it is NaN
            return f"its {name} differs by {share:.2g} of the largest value"
    return ""


def notes(
    model: Attention,
    spec: ModelSpec,
    packed: bool,
    dtype: torch.dtype,
    device: torch.device,
    divided: bool = False,
) -> Iterator[str]:
    """Say which kernels run on a GPU, a line for each kind of mask, and set their order.

    `divided`: a rank has the queries of sections of rows, by themselves.
    """
    generation = torch.cuda.get_device_capability(device)[0]
    prefer(generation, model.dropout)
    if model.head_size and not divided:
        query, key = (
            torch.empty(1, count, 128, model.head_size, dtype=dtype, device=device).requires_grad_()
            for count in (spec.language.heads, spec.language.kv_heads)
        )
        rows = None, model.dropout, True  # no mask, causal
        with kernels_for(None):
            backend = torch._fused_sdp_choice(query, key, key, *rows, enable_gqa=model.groups > 1)
        kernel = next(name for name, own in BACKENDS.items() if own.value == backend)
        newer = attention.current_flash_attention_impl() if kernel == "flash" else None
        reason = "" if kernel in ("cuDNN", "flash") else _no_flash(model, dtype, generation)
        yield f"attention of whole rows: {newer or kernel}{reason and f': {reason}'}"
    if model.refusal:
        yield f"attention: {KERNELS['mask']} where one is needed: {model.refusal}"
        return
    for pattern in sorted(model.patterns):
        if packed or divided or pattern != "causal":
            kernel, reason = tested(model, pattern, dtype, device, divided)
            name = f"{'packed documents' if packed else 'rows'}, {pattern} mask"
            yield f"attention of {name}: {KERNELS[kernel]}{reason and f': {reason}'}"


class PackedDocuments(NamedTuple):
    """The place of each token in the documents of its row; padding counts as one more document."""

    numbers: torch.Tensor
    """The number of each token's document within its row, int64 [batch, sequence]."""
    positions: torch.Tensor
    """The position of each token in its document, from 0 on, int64 [batch, sequence]."""
    lengths: torch.Tensor
    """The length of each token's document, int64 [batch, sequence]."""
    borders: torch.Tensor
    """The starts of documents over all rows laid end to end, and the end, int32."""


def documents_of(lengths: torch.Tensor, sequence: int) -> PackedDocuments:
    """Locate the documents in rows of `sequence` tokens; `lengths` [batch, most] may have zeros."""
    lengths = torch.cat([lengths, sequence - lengths.sum(1, keepdim=True)], 1)
    ends = lengths.cumsum(1)
    places = torch.arange(sequence, device=lengths.device).expand(len(lengths), -1).contiguous()
    numbers = torch.searchsorted(ends, places, right=True)
    positions = places - (ends - lengths).gather(1, numbers)
    borders = torch.nn.functional.pad(lengths.flatten().cumsum(0), (1, 0)).to(torch.int32)
    return PackedDocuments(numbers, positions, lengths.gather(1, numbers), borders)
