"""What a compiled block computes while its messages are under way, by the generated code."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist
from torch._inductor import config

from tests.support.lowered import lowered
from trainer.distributed.exchange import Exchange
from trainer.parallel.compilation import EARLY

WIDTH, LENGTH = 256, 512
CALLS = re.compile(r"extern_kernels\.(mm|addmm)|_c10d_functional\.(\w+)\.default\(")


def calls_of(sequence: bool, early: bool) -> list[str]:
    """Return the products and messages of a backward pass, in the order in which they are called.

    It is that of two matrices split by columns, in the order of autograd.
    """
    ranks = Exchange(dist.group.WORLD)  # type: ignore[arg-type]
    summed = ranks._scattered(1) if sequence else ranks._sum

    def inputs() -> tuple[torch.Tensor, ...]:
        rows = [torch.empty(1, LENGTH, WIDTH) for _ in range(3)]
        return *rows, torch.empty(WIDTH, WIDTH), torch.empty(WIDTH, WIDTH)

    def backward(
        hidden: torch.Tensor,
        of_gate: torch.Tensor,
        of_up: torch.Tensor,
        gate: torch.Tensor,
        up: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        of_gate, of_up = of_gate.tanh(), of_up.tanh()
        matrices = [of_up[0].T @ hidden[0]]
        terms = of_up @ up
        matrices.append(of_gate[0].T @ hidden[0])
        gradient = summed(terms + of_gate @ gate)
        return gradient * 2, *matrices

    with config.patch(EARLY if early else {}):
        _, code = lowered(backward, inputs, "cpu")
    return [one or two.removesuffix("_") for one, two in CALLS.findall(code)]


@pytest.mark.first
@pytest.mark.parametrize("kind", ["all_reduce", "reduce_scatter_tensor"])
def test_the_gradients_of_matrices_are_computed_before_the_wait_for_the_sum(pools, kind):
    sequence = kind == "reduce_scatter_tensor"
    by_itself, early = (
        pools[1].run(calls_of, sequence=sequence, early=early)[0] for early in (False, True)
    )
    assert by_itself[-2:] == [kind, "wait_tensor"]  # else the options can go
    assert early[-4:] == [kind, "mm", "mm", "wait_tensor"]
