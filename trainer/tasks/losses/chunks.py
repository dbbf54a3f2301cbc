"""Logits, and the gradients of what they are computed from, a chunk of tokens at a time.

Memory holds one chunk of logits in float32, not `[tokens, vocabulary]`.

Shapes: n tokens, h hidden size, v vocabulary. Where there is no weight, what is given are logits
[n, v] instead of hidden states [n, h].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from trainer.distributed.exchange import VocabularyShard

CHUNK_BYTES = 64 << 20
"""The bytes of a chunk of logits in float32 or wider, unless `product_chunks` needs more: enough
for full speed, and small beside any model."""
UNCOMPILED = 2
"""The memory of each logit of a chunk, in float32 numbers, at the peak of uncompiled code: in 16
bits, the logit in both precisions, and its gradient. A plan counts this."""
FEWEST = 512
"""With this many tokens, a product with a frozen head takes longer than reading the head: 512 FLOPs
a byte in 16 bits, and an H100 does 295 in the time of a byte."""


Compilable = Callable[..., torch.Tensor]
"""A function of tensors."""


class Compiler(Protocol):
    """Compiles a function of tensors."""

    def __call__(self, function: Callable[..., Any], of_tokens: int = 0) -> Callable[..., Any]:
        """Return the compiled function, whose first `of_tokens` arguments are tensors of tokens.

        One graph serves any number of them. If the first number had a graph of its own, a run and
        the same run resumed, which begins with another number, would differ in the last bits.
        """


class AutogradContext(Protocol):
    """The context of an autograd function, which torch leaves untyped."""

    needs_input_grad: tuple[bool, ...]
    saved_tensors: tuple[torch.Tensor, ...]

    def save_for_backward(self, *tensors: torch.Tensor | None) -> None: ...


class CastMatrix(Protocol):
    """A head's matrix W [v, h], cast to another precision for the products with chunks."""

    def logits(self, part: torch.Tensor) -> torch.Tensor:
        """Return x W^T [n, v] of hidden states [n, h]."""

    def hidden_gradient(self, grad: torch.Tensor) -> torch.Tensor:
        """Return g W [n, h] of the logits' gradient [n, v]."""


class Cast(Protocol):
    """Casts a head's matrix, once for all chunks of a micro-batch."""

    def __call__(self, weight: torch.Tensor) -> CastMatrix: ...

    def compiled(self, by: Compiler) -> Cast:
        """Return the same whose parts are compiled."""


class ChunkGradients:
    """The gradients of hidden states, weight and bias, or of logits, from a chunk's at a time."""

    def __init__(
        self,
        given: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        wide: torch.dtype,
        needed: Sequence[bool],
    ) -> None:
        """`needed`: which of the three are wanted."""
        wants, wants_weight, wants_bias = needed
        self._weight = weight
        self._dtype = given.dtype
        self.of_logits = wide if wants_bias and bias is not None else given.dtype
        """The dtype of the logits' gradient: a bias has its sum, in full precision."""
        self._given = torch.empty_like(given) if wants else None
        # summed over chunks in full precision, rounded once at the end
        self._of_weight = self._of_bias = None
        if wants_weight and weight is not None:
            self._of_weight = torch.zeros_like(weight, dtype=wide)
        if wants_bias and bias is not None:
            self._of_bias = torch.zeros_like(bias, dtype=wide)

    def add(
        self,
        rows: slice,
        part: torch.Tensor,
        grad: torch.Tensor,
        matrix: CastMatrix | None = None,
    ) -> None:
        """Add what follows from `grad` [rows, v], the gradient of a chunk's logits.

        `part` is the chunk of what is given: hidden states [rows, h], or logits [rows, v]. `matrix`
        is the weight as its logits were multiplied by; None: as it stands.
        """
        low = grad.to(self._dtype)  # it is, but for a bias
        if self._given is not None and self._weight is None:
            self._given[rows] = low
        elif self._given is not None and matrix is not None:
            self._given[rows] = matrix.hidden_gradient(low)
        elif self._given is not None and self._weight is not None:
            torch.mm(low, self._weight, out=self._given[rows])
        if self._of_weight is not None:
            add_product(self._of_weight, low.T, part)
        if self._of_bias is not None:
            self._of_bias += grad.sum(0)

    def whole(self) -> list[torch.Tensor | None]:
        """Return the three gradients; None for one that is not needed."""
        sums = (self._of_weight, self._of_bias)
        return [self._given, *(None if one is None else one.to(self._dtype) for one in sums)]


def product_chunks(
    given: torch.Tensor,
    weight: torch.Tensor | None,
    shard: VocabularyShard | None,
    wide: torch.dtype,
    logit_bytes: int | None = None,
) -> list[slice]:
    """Return the chunks of hidden states [n, h] or, without a weight, of logits [n, v], in order.

    Each chunk passes over the whole weight gradient once; from h / 2 tokens on, its product costs
    more than that. A frozen weight has no gradient, and FEWEST tokens are enough. With a `shard`
    all tensor ranks have equal chunks, those of the largest shard.

    `logit_bytes`: those of each logit in memory; None: as where operations run one by one. In
    compiled code they are 4 in bfloat16, a logit and its gradient: 2,048 tokens in the memory of
    1,024. Where chunks end changes the order of sums, and nothing else.
    """
    width = given.shape[1]
    at_least = 1
    count = width
    more = UNCOMPILED * wide.itemsize // logit_bytes if logit_bytes else 1
    if weight is not None:
        at_least = width // 2 * more if weight.requires_grad else min(width // 2, FEWEST)
        count = weight.shape[0]
    count = shard.most if shard else count
    size = max(at_least, CHUNK_BYTES * more // (count * wide.itemsize))
    return chunks_of(len(given), size)


def chunks_of(tokens: int, size: int) -> list[slice]:
    """Divide a range of tokens into chunks of `size`; the last has what is left."""
    return [slice(start, min(start + size, tokens)) for start in range(0, tokens, size)]


def chunk_logits(
    part: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    wide: torch.dtype | None = None,
    matrix: CastMatrix | None = None,
) -> torch.Tensor:
    """Return the logits of a chunk of hidden states, or of logits, in memory of their own.

    In the dtype `wide`; None: as they are computed. By the weight as `matrix` has cast it; None: as
    it stands.
    """
    if weight is None:
        return part.to(wide or part.dtype, copy=True)
    if matrix is None:
        logits = F.linear(part, weight, bias)
    else:
        logits = matrix.logits(part)
        logits = logits if bias is None else logits.add_(bias)
    return logits if wide is None else logits.to(wide)


def add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Add left @ right to a total of the same or a wider dtype, in place and in its precision."""
    if total.is_cuda and total.dtype != left.dtype:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:  # a processor has no such product
        total.addmm_(left.to(total.dtype), right.to(total.dtype))


def times(saved: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return `saved`, in its dtype, times a scale of one element, which is not rounded to it.

    A rounded scale would shift all gradients of a step by the same share.
    """
    return torch.mul(saved, scale.reshape(1), out=torch.empty_like(saved))
