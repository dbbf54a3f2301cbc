"""How many kernels a compiled block runs on a GPU, and the bytes that they move.

A Llama's block is compiled as a run does, up to the kernels' code; its products and attention are
functions of libraries, and what is generated for the rest is counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule

from tests.support.lowered import Lowered, lowered_on_gpu
from tests.support.training import spec_of
from trainer.layout import Recompute
from trainer.parallel import compilation
from trainer.parallel.recompute import activation_checkpointing
from trainer.recipes.causal_lm.task import CausalLM

HIDDEN, INNER, HEADS, WIDTH = 2048, 8192, 32, 64
KEYS = WIDTH * HEADS // 4
TOKENS = 2, 8192
MODEL: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS // 4,
    "head_dim": WIDTH,
}
ROTATED = 2 * (HEADS * WIDTH + KEYS)
"""Numbers of a token that are read and written to rotate its queries and keys."""
FORWARD = 2 * HIDDEN + ROTATED + 3 * HIDDEN + 3 * INNER + 4 * HIDDEN
"""A norm; the rotation; the residual with the second norm; gate x up; the residual."""
BACKWARD = 5 * INNER + 6 * HIDDEN + ROTATED + 7 * HIDDEN + 6 * HIDDEN
"""Gate and up; a norm; the rotation; the gradient of a norm's weight; the other norm."""


class Budget(NamedTuple):
    """The most that a block's two passes may take besides products and attention."""

    kernels: tuple[int, int]
    """The number of generated kernels."""
    numbers: tuple[int, int]
    """The numbers that they read and write for a token, of two bytes each."""
    products: tuple[int, int]


BUDGETS = {
    "none": Budget((6, 9), (FORWARD, BACKWARD), (7, 14)),
    # gate x up, both norms and the rotation are computed again
    "selective": Budget((6, 11), (FORWARD, BACKWARD + INNER + 2 * HIDDEN + ROTATED), (7, 14)),
}


def passes_of(mode: str) -> list[Lowered]:
    """Compile a block with its loss, and return the forward and the backward pass of the block."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.compile_fx import _recursive_joint_graph_passes
    from torch._inductor.decomposition import select_decomp_table

    graphs: list[tuple[GraphModule, Sequence[object]]] = []

    def keep(module: GraphModule, inputs: Sequence[object]) -> GraphModule:
        graphs.append((deepcopy(module), inputs))
        return module

    def partition(joint: GraphModule, inputs: Sequence[object], **options: Any) -> object:
        _recursive_joint_graph_passes(joint)
        return min_cut_rematerialization_partition(joint, inputs, compiler="inductor", **options)

    backend = aot_autograd(
        fw_compiler=keep,
        bw_compiler=keep,
        partition_fn=partition,
        decompositions=select_decomp_table(),
    )
    spec = spec_of(MODEL)
    task = CausalLM.of(spec)
    model = task.prepare(spec.build()).train()
    with FakeTensorMode(), patch.object(compilation, "BACKEND", backend):
        for module in model.modules():
            for name, tensor in module.named_parameters(recurse=False):
                fake = torch.empty(tensor.shape, dtype=torch.bfloat16)
                module.register_parameter(name, nn.Parameter(fake))
            for name, tensor in module.named_buffers(recurse=False):
                setattr(module, name, torch.empty(tensor.shape, dtype=tensor.dtype))
        activation_checkpointing.apply(model, spec, Recompute(mode))
        compilation.apply(model, spec)
        ids = torch.ones(TOKENS, dtype=torch.int64)
        task.loss_sum(model, {"input_ids": ids, "targets": ids}).backward()
    return [lowered_on_gpu(*graphs[0]), lowered_on_gpu(*graphs[-1])]


@pytest.mark.first("selective")
@pytest.mark.parametrize("mode", BUDGETS)
def test_a_block_moves_no_more_than_what_its_products_leave(pools, mode: str) -> None:
    pytest.importorskip("triton")
    [passes] = pools[1].run(passes_of, mode=mode)
    for index, lowered in enumerate(passes):
        generated = [kernel.size for kernel in lowered.kernels if not kernel.name]
        numbers = sum(generated) / 2 / TOKENS[0] / TOKENS[1]
        print(mode, index, len(generated), numbers, BUDGETS[mode].numbers[index])
        assert len(generated) <= BUDGETS[mode].kernels[index]
        assert numbers <= 1.02 * BUDGETS[mode].numbers[index]
        products = [kernel for kernel in lowered.kernels if kernel.name.endswith("mm")]
        assert len(products) == BUDGETS[mode].products[index]
