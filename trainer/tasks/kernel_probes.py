"""The kernel that computes a model's attention on a GPU, found by trying it on a tiny copy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import attention
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._triton import has_triton

from trainer.models.spec import LanguageModel, ModelSpec
from trainer.probes.inputs import sequence_of
from trainer.probes.probe import (
    TOLERANCE,
    Finding,
    differing_gradient,
    observe,
    probe,
    tiny,
)
from trainer.tasks.attention import (
    VARLEN,
    Attention,
    AttentionCall,
    CuSeqlens,
    Sealed,
    attend,
    blocks,
    documents_of,
)
from trainer.tasks.kernel_order import BACKENDS, kernels_for, prefer
from trainer.tasks.patches import attend_in_place_of_eager, has_eager_alone, register_attention

KERNELS = {
    "cu_seqlens": "flash attention by cu_seqlens",
    "blocks": "flex attention in blocks",
    "mask": "a mask of sequence x sequence",
}
"""The ways to compute packed documents and windows; the first that fits is taken."""


def _runs_by_attend(spec: ModelSpec, logits: Callable[..., torch.Tensor]) -> bool:
    """Return True if `attend` computes what the model's own eager attention does: GPT-OSS's, whose
    sinks transformers gives to no SDPA.

    On a tiny copy, logits and gradients of packed documents are compared.
    """
    calls: list[AttentionCall] = []

    def change(model: nn.Module, small: ModelSpec) -> nn.Module:
        attend_in_place_of_eager(model)
        return model

    def compare(eager: nn.Module, model: nn.Module, small: ModelSpec) -> Finding | None:
        row = sequence_of(small)[None]
        ours, theirs = (
            logits(one.train(), row, seal)
            for one, seal in ((model, partial(_sealed, calls)), (eager, _unsealed))
        )
        error = (ours - theirs).abs().max()
        if not calls or not bool(error <= TOLERANCE * theirs.abs().max()):
            return Finding("logits")
        for one in (ours, theirs):
            torch.nn.functional.cross_entropy(one[0, :-1].float(), row[0, 1:]).backward()
        different = differing_gradient(model, eager)
        return Finding(different[0]) if different else None

    return probe(spec, change, compare) is None


def attention_of(spec: ModelSpec, logits: Callable[..., torch.Tensor]) -> Attention:
    """Try masks that only `attend` can read on a tiny copy: it must compute the same with them.

    `logits(model, row, seal)` runs packed documents; `seal(pattern, mask)` replaces each mask.
    """
    register_attention(attend)
    calls: list[AttentionCall] = []

    def packed() -> tuple[LanguageModel, nn.Module, list[torch.Tensor], bool]:
        small, model = tiny(spec)
        by_attend = (
            has_eager_alone(model)
            and spec.language.attention.requested is None
            and _runs_by_attend(spec, logits)
        )
        if by_attend:
            attend_in_place_of_eager(model)
        outputs = []
        with torch.no_grad():
            for seal in (_unsealed, partial(_sealed, calls)):
                torch.default_generator.manual_seed(1)
                outputs.append(logits(model.train(), sequence_of(small)[None], seal))
        return small.language, model, outputs, by_attend

    result = observe(packed)
    if isinstance(result, Finding):
        return Attention(refusal=f"its layers need it ({result.actual:.80})")
    small, model, outputs, by_attend = result
    if not calls or not torch.equal(*outputs):
        kind = model.config._attn_implementation  # type: ignore[union-attr]
        return Attention(refusal=f"its attention ({kind}) is not transformers' SDPA")
    patterns, keys, values, dropouts, sinks = map(set, zip(*calls, strict=True))
    of_tiny, size = (language.attention.head_size for language in (small, spec.language))
    if not keys == values == {of_tiny}:
        size = 0
    dropout = max(dropouts)
    refusal = f"neither flash nor flex attention takes dropout of {dropout:g}" if dropout else ""
    return Attention(
        size,
        spec.language.attention.groups,
        dropout,
        frozenset(patterns),
        sinks=any(sinks),
        by_attend=by_attend,
        refusal=refusal,
    )


def _unsealed(pattern: str, mask: torch.Tensor) -> torch.Tensor:
    return mask


def _sealed(calls: list[AttentionCall], pattern: str, mask: torch.Tensor) -> Sealed:
    return Sealed(mask, pattern, calls)


def tested(
    model: Attention, pattern: str, dtype: torch.dtype, device: torch.device, divided: bool = False
) -> tuple[str, str]:
    """Choose the first of KERNELS that computes the right values on this GPU, and say why not one
    before it. `divided`: for sections of rows.

    Each rank chooses by itself: kernels communicate nothing, and all compute the same.
    """
    if model.refusal:
        return "mask", model.refusal
    generation = torch.cuda.get_device_capability(device)[0]
    reasons = list[str]()
    for kernel in ("cu_seqlens", "blocks"):
        reason = _unfit(kernel, model, pattern, dtype, generation)
        if not reason:
            heads = Heads(model.head_size, model.groups, model.sinks)
            fault = fault_of(kernel, heads, pattern, dtype, device, divided)
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
    if model.sinks:
        return "it takes no sinks"
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


class Heads(NamedTuple):
    """The heads of a model, for which a kernel is tested."""

    width: int
    """0: that of values is other than that of keys."""
    groups: int
    """The number of query heads to a key head."""
    sinks: bool
    """True if the softmax has one more entry in each head."""


@cache
@torch.inference_mode(False)
@torch.enable_grad()
def fault_of(
    kernel: str,
    heads: Heads,
    pattern: str,
    dtype: torch.dtype,
    device: torch.device,
    divided: bool = False,
) -> str:
    """Say in what a kernel's output and gradients for packed documents differ from those of SDPA's
    plain operators and a mask in float32; empty if in nothing.

    `divided`: in two sections.
    """
    example = _Example(heads, pattern, dtype, device, divided)
    with torch.autocast(device.type, enabled=False), sdpa_kernel(SDPBackend.MATH):
        result = observe(lambda: example.difference(kernel))
        if kernel == "blocks":
            torch.compiler.reset()  # it would make the length of the run's own rows dynamic
    return f"{result.actual:.80}" if isinstance(result, Finding) else result


class _Example:
    """Attention of two sequences of packed documents, to compute in several ways."""

    LENGTH = 160

    def __init__(
        self,
        heads: Heads,
        pattern: str,
        dtype: torch.dtype,
        device: torch.device,
        divided: bool,
    ) -> None:
        size, groups, sinks = heads
        self._dtype = dtype
        self._device = device
        self._window = 7 if pattern == "window" else None
        self._sections = [(0, 64), (64, self.LENGTH)] if divided else [(0, self.LENGTH)]
        lengths = torch.tensor([[70, 90], [41, 0]], device=device)
        self._documents = documents_of(lengths, self.LENGTH)
        self._module: Any = SimpleNamespace(num_key_value_groups=groups, training=True)
        keys, values = (size, size) if size else (192, 128)  # those of DeepSeek
        self._shapes = (2 * groups, keys), (2, keys), (2, values)
        self._sinks = torch.linspace(-1, 2, 2 * groups) if sinks else None

    def difference(self, kernel: str) -> str:
        """Say what a kernel computes otherwise; empty if nothing."""
        torch.default_generator.manual_seed(0)
        drawn = [
            torch.randn(2, heads, self.LENGTH, width).to(self._dtype)
            for heads, width in self._shapes
        ]
        at = torch.arange(self.LENGTH, device=self._device)
        mask = self._mask_function()(at[:2, None, None, None], None, at[:, None], at)
        expected = self._computed(drawn, mask, self._device, torch.float32)
        result = self._computed(drawn, self._masked_for(kernel), self._device)
        most = 8 * max(torch.finfo(self._dtype).eps, 2**-10)  # float32 may be computed as TF32
        names = ("output", *(f"gradient of {name}" for name in ("q", "k", "v", "sinks")))
        for name, actual, true in zip(names[: len(result)], result, expected, strict=True):
            share = float((actual - true).abs().max() / true.abs().max())
            if not share <= most:  # or it is NaN
                return f"its {name} differs by {share:.2g} of the largest value"
        return ""

    def _masked_for(self, kernel: str) -> object:
        if kernel == "cu_seqlens":
            return CuSeqlens(self._documents.cu_seqlens, self.LENGTH, self._window)
        sees = self._mask_function()  # flex attention takes no bound method
        return {ends[0]: blocks(sees, 2, ends, self._device) for ends in self._sections}

    def _mask_function(self) -> Callable[..., torch.Tensor]:
        number = self._documents.numbers
        most = self._window or self.LENGTH

        def sees(
            row: torch.Tensor, head: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor
        ) -> torch.Tensor:
            return (q >= k) & (q - k < most) & (number[row, q] == number[row, k])

        return sees

    def _computed(self, drawn: Sequence[torch.Tensor], mask: Any, *kind: Any) -> list[torch.Tensor]:
        """Return the output and the gradients of queries, keys, values and any sinks."""
        heads = [part.to(*kind).requires_grad_() for part in drawn]
        more = {}
        if self._sinks is not None:
            more["s_aux"] = self._sinks.to(self._dtype).to(*kind).requires_grad_()
        parts = [self._attended(begin, end, mask, *heads, **more) for begin, end in self._sections]
        heads += more.values()
        out = torch.cat(parts, 1)
        ramp = torch.linspace(-1, 1, out.numel()).to(self._dtype).view_as(out).to(out)
        gradients = torch.autograd.grad(out, heads, ramp)
        return [part.detach().float() for part in (out, *gradients)]

    def _attended(
        self,
        begin: int,
        end: int,
        mask: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        **more: torch.Tensor,
    ) -> torch.Tensor:
        own = q[:, :, begin:end], k[:, :, :end], v[:, :, :end], mask
        return attend(self._module, *own, section=(begin, end), scaling=0.1, **more)[0]


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
            for count in (spec.language.attention.heads, spec.language.attention.kv_heads)
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
