"""The ceilings of gpu.py: the speed of a GPU's copies, products and attention at a model's sizes,
and the tokens a second that they allow.

A step takes at least the time of its matrix products in three directions (y = x W^T; of the
backward pass dx = dy W and dW = dy^T x), of attention forward and backward in each layer, and of
the bytes that everything else must move, at the bandwidth of a copy:

    seconds = products + layers x attention + bytes / bandwidth
    ceiling = tokens of a micro-batch / seconds

Nothing is recomputed or communicated, and nothing overlaps. Bytes, with h the hidden size, i the
intermediate size, q and k the widths of queries and keys, V the vocabulary, values in 2 bytes:

- a token in a layer: 2 norms of 10 h (forward: read, write; backward: read 2, write 1), 2 residual
  additions of 4 h (read, write), 16 i of SwiGLU (forward: read 2, write 1; backward: read 3, write
  2), 8 (q + k) of rotary embeddings (forward and backward: read, write);
- a token of the loss: 8 V (the logits are written, read twice, and their gradient is written);
- a parameter of the optimizer: 38 (AdamW in float32 reads 16 and writes 12, the norm of gradients
  reads 4, the copy in 16 bits reads 4 and writes 2).

Without gradients of weights, as under an adapter, products have two directions, and the optimizer
moves nothing. Attention is counted as MFU counts it: 6 x width x sequence FLOPs a token and layer,
forward and backward, half of them masked (PaLM, arXiv 2204.02311, appendix B).
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

if TYPE_CHECKING:
    from benchmarks.gpu_bench import Bench

DIRECTIONS = ("x W^T", "dy W", "dy^T x")
OF_WEIGHTS = "dy^T x"
"""The direction that frozen weights do not have."""
KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
HEAD_SIZES = (64, 128)
COPIED = 2**30
"""Bytes of the copy on a GPU."""
OF_OPTIMIZER = 38
"""Bytes a parameter that AdamW, the norm of gradients and the copy in 16 bits move."""
INTERVALS = 3
CALLS = 10
"""Calls in each interval."""


@dataclass(frozen=True)
class Sizes:
    """A model's sizes, from its config."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    parameters: int

    @classmethod
    def of(cls, config: Mapping[str, Any], parameters: int) -> Sizes:
        """Return the sizes of a config of transformers and the number of its parameters."""
        heads = config["num_attention_heads"]
        return cls(
            hidden=config["hidden_size"],
            intermediate=config["intermediate_size"],
            layers=config["num_hidden_layers"],
            heads=heads,
            kv_heads=config["num_key_value_heads"],
            head_size=config.get("head_dim") or config["hidden_size"] // heads,
            vocabulary=config["vocab_size"],
            parameters=parameters,
        )

    @property
    def matrices(self) -> Counter[tuple[int, int]]:
        """The outputs and inputs of each matrix of the blocks and of the head, and how many."""
        queries = self.heads * self.head_size
        keys = self.kv_heads * self.head_size
        block = [
            (queries, self.hidden),
            (keys, self.hidden),
            (keys, self.hidden),
            (self.hidden, queries),
            (self.intermediate, self.hidden),
            (self.intermediate, self.hidden),
            (self.hidden, self.intermediate),
        ]
        counts = Counter({shape: block.count(shape) * self.layers for shape in block})
        counts[self.vocabulary, self.hidden] += 1
        return counts

    def bytes_of(self, tokens: int, frozen: bool) -> float:
        """Return the bytes of a step besides products and attention, by the module's formula."""
        widths = (self.heads + self.kv_heads) * self.head_size
        layer = 28 * self.hidden + 16 * self.intermediate + 8 * widths
        of_tokens = tokens * (self.layers * layer + 8 * self.vocabulary)
        return of_tokens + (0 if frozen else OF_OPTIMIZER * self.parameters)


@dataclass(frozen=True)
class Rates:
    """What was measured on one GPU, for one micro-batch."""

    bandwidth: float
    """Bytes/s of a copy on the device, of which each is read and written."""
    products: Mapping[str, float]
    """Seconds of all matrix products of a step, by direction."""
    attention: float
    """Seconds of the attention of one layer, forward and backward, by the fastest kernel."""


def ceiling(rates: Rates, sizes: Sizes, tokens: int, frozen: bool = False) -> float:
    """Return the most tokens a second on one GPU, by the module's formula.

    `tokens` are those of a micro-batch. `frozen`: the weights of all products have no gradient.
    """
    left_out = {OF_WEIGHTS} if frozen else set()
    seconds = sum(time for name, time in rates.products.items() if name not in left_out)
    seconds += sizes.layers * rates.attention
    return tokens / (seconds + sizes.bytes_of(tokens, frozen) / rates.bandwidth)


def measure(bench: Bench, sizes: Sizes) -> None:
    """Measure copy, products and attention, tell each as it is there, and the ceilings at last."""
    tokens = bench.micro_batch * bench.sequence
    dtype = torch.bfloat16
    bandwidth = copied(bench)
    bench.tell(copy=bandwidth)
    products = products_of(bench, sizes.matrices, tokens, dtype)
    flops = 2 * tokens * sum(count * a * b for (a, b), count in sizes.matrices.items())
    bench.tell(products={name: flops / seconds for name, seconds in products.items()})
    best = {}
    for size in dict.fromkeys((sizes.head_size, *HEAD_SIZES)):
        times = attention_of(bench, sizes, size, dtype)
        if times:
            best[size] = min(times.values())
        work = 6 * sizes.heads * sizes.head_size * bench.sequence * tokens
        if size in HEAD_SIZES:
            rates = {name: work / seconds for name, seconds in times.items()}
            bench.tell(attention={**bench.result.get("attention", {}), str(size): rates})
    if sizes.head_size not in best:
        return bench.tell(note="no kernel of attention ran; so there is no ceiling")
    rates = Rates(bandwidth, products, best[sizes.head_size])
    bench.tell(
        ceiling=ceiling(rates, sizes, tokens) * bench.world_size,
        frozen_ceiling=ceiling(rates, sizes, tokens, frozen=True) * bench.world_size,
    )


def seconds_of(bench: Bench, work: Callable[[], object]) -> float:
    """Return the seconds of a call: the median of intervals of `CALLS`, after two that warm up.

    On a GPU they are timed by its own events, and a call is launched while another runs.
    """
    for _ in range(2):
        work()
    bench.wait()
    if not bench.cuda:
        started = time.perf_counter()
        work()
        return time.perf_counter() - started
    times = []
    for _ in range(INTERVALS):
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(CALLS):
            work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / CALLS)
    return statistics.median(times)


def copied(bench: Bench) -> float:
    """Return the bytes/s of a large copy on the device: each is read, and written."""
    size = COPIED if bench.cuda else 2**20
    source = torch.zeros(size, dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    return 2 * size / seconds_of(bench, lambda: target.copy_(source))


def products_of(
    bench: Bench, matrices: Mapping[tuple[int, int], int], tokens: int, dtype: torch.dtype
) -> dict[str, float]:
    """Return the seconds of all matrices' products with so many tokens, by direction."""
    totals = dict.fromkeys(DIRECTIONS, 0.0)
    for (outputs, inputs), count in matrices.items():
        x = torch.randn(tokens, inputs, device=bench.device, dtype=dtype)
        dy = torch.randn(tokens, outputs, device=bench.device, dtype=dtype)
        weight = torch.randn(outputs, inputs, device=bench.device, dtype=dtype)
        works = (lambda: x @ weight.T, lambda: dy @ weight, lambda: dy.T @ x)  # noqa: B023
        for name, work in zip(DIRECTIONS, works, strict=True):
            totals[name] += count * seconds_of(bench, work)
    return totals


def attention_of(
    bench: Bench, sizes: Sizes, head_size: int, dtype: torch.dtype
) -> dict[str, float]:
    """Return the seconds of causal attention, forward and backward, by each kernel that runs.

    Heads of another size than the model's are as many as have its width. Keys are repeated for a
    kernel that has no groups of queries, before the clock starts.
    """
    heads = max(1, sizes.heads * sizes.head_size // head_size)
    kv_heads = max(1, sizes.kv_heads * sizes.head_size // head_size)
    times = {}
    for name, backend in KERNELS.items():
        groups = name != "efficient" and heads != kv_heads
        q, k, v = (
            torch.randn(
                bench.micro_batch,
                count,
                bench.sequence,
                head_size,
                device=bench.device,
                dtype=dtype,
                requires_grad=True,
            )
            for count in (heads, *[kv_heads if groups else heads] * 2)
        )
        dy = torch.randn_like(q)

        def work() -> None:
            out = torch.nn.functional.scaled_dot_product_attention(
                q,  # noqa: B023
                k,  # noqa: B023
                v,  # noqa: B023
                is_causal=True,
                enable_gqa=groups,  # noqa: B023
            )
            torch.autograd.grad(out, (q, k, v), dy)  # noqa: B023

        try:
            with sdpa_kernel(backend):
                times[name] = seconds_of(bench, work)
        except RuntimeError as error:  # no such kernel here
            if bench.rank == 0:
                print(f"attention by {name}, heads of {head_size}: {error}"[:300])
    return times
