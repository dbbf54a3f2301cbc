"""Sequence parallelism: what a rank has between the split matrices, and what is sent.

`tests/conformance/` compares its numbers with those of one process.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.layouts import PARTS, SPLIT
from tests.support.messages import shows
from tests.support.parallel.eight_billion import EIGHT_B, eight_ranks
from tests.support.run.layout import layout
from tests.support.training import Case, build, spec_of, task_of
from trainer.engines import ENGINES
from trainer.parallel.apply import wrap_blocks

WHOLE_ROWS = layout(1, 1, 1, 2, 1, 1)
DIVIDED = replace(WHOLE_ROWS, sequence_parallel=True)


def test_between_split_matrices_a_rank_has_a_part_of_the_tokens(pools):
    """Seven tokens on two ranks: four each, the last of which is none."""
    case = replace(SPLIT, engine="mesh", more=PARTS)
    expected = {"input_layernorm": 4, "self_attn.o_proj": 7, "mlp.gate_proj": 7, "model.norm": 7}
    assert pools[2].run(lengths, case=case) == [expected] * 2


def lengths(case: Case) -> dict[str, int]:
    """Return how many tokens some modules of the model see. Runs on each rank."""
    module = build(case, dist.get_rank()).modules[0]
    results: dict[str, int] = {}
    for name, part in module.model.named_modules():
        short = name.removeprefix("model.layers.1.")
        if short in ("input_layernorm", "self_attn.o_proj", "mlp.gate_proj", "model.norm"):
            note = lambda _, args, short=short: results.update({short: args[0].shape[1]})  # noqa: E731
            part.register_forward_pre_hook(note)
    ids = torch.arange(14).reshape(2, 7)
    module.train()({"input_ids": ids, "targets": ids})
    return results


class Sent(TorchDispatchMode):
    """Counts collectives by name."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "_c10d_functional" and "wait" not in str(func):
            self.count[func._opname] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("sequence", [False, True])
def test_a_block_sends_as_often_as_megatrons(sequence):
    """Two all-reduces in each pass, or for each of them a reduce-scatter and an all-gather; and two
    all-gathers of what entered attention and MLP, for the gradients of their matrices.
    """
    results = []
    for layers in (1, 2):
        spec = spec_of(EIGHT_B | {"num_hidden_layers": layers})
        task = task_of(spec)
        ids = torch.zeros(1, 256, dtype=torch.long, device="meta")
        with eight_ranks(sequence) as mesh, Sent() as sent:
            model, _ = wrap_blocks(spec, task, mesh.layout, mesh)
            task.loss_sum(model.train(), {"input_ids": ids, "targets": ids}).backward()
        results.append(sent.count)
    a_block = {"all_gather_into_tensor": 4 + 2, "reduce_scatter_tensor": 4}
    assert results[1] - results[0] == (a_block if sequence else {"all_reduce": 4})


def test_deepspeed_has_none():
    shows(ENGINES["deepspeed"].refusal(DIVIDED) or "", "sequence parallelism")
