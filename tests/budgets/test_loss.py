"""How often the compiled loss passes over its logits, in the code that is generated for a GPU."""

from __future__ import annotations

import re

import pytest
import torch

from tests.support.lowered import lowered, of_any_size
from trainer.tasks.losses.cross_entropy import chunk_loss

TOKENS = 1024
VOCABULARY = 32_000


def bytes_of_the_loss(smoothing: float) -> tuple[list[float], int]:
    """Return the bytes a bfloat16 logit of each kernel's tensors; and of all loads and stores."""

    def inputs() -> tuple[torch.Tensor, ...]:
        tokens = of_any_size(TOKENS)
        logits = torch.empty(tokens, VOCABULARY, dtype=torch.bfloat16)
        return logits, torch.zeros(tokens, dtype=torch.int64)

    kernels, code = lowered(
        lambda logits, targets: chunk_loss(logits, targets, torch.bfloat16, smoothing), inputs
    )
    assert "xnumel = " not in code  # the number of tokens is an argument of the kernel
    passes = re.findall(r"tl\.(?:load|store)\(.*r0_mask", code)  # over each number of a row
    return [kernel.size / TOKENS / VOCABULARY for kernel in kernels], 2 * len(passes)


@pytest.mark.first
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_reads_logits_twice_and_writes_nothing_but_their_gradient(pools, smoothing):
    """6 bytes a logit in one kernel, of 8 that are allowed. Computed in place, by `scatter_add_`
    and with the casts outside, it was 36 in three kernels and two casts.
    """
    pytest.importorskip("triton")
    [(kernels, passed)] = pools[1].run(bytes_of_the_loss, smoothing=smoothing)
    assert kernels == [pytest.approx(4, abs=0.01)]  # a logit and its gradient
    assert passed == 6
