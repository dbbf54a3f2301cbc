"""Graphs of `trainer.compile`: one for all equal blocks, and no break in any."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.training import LLAMA, spec_of
from trainer.layout import Recompute
from trainer.models.materialise import materialise
from trainer.parallel import compilation
from trainer.parallel.forward_backward import Dropout
from trainer.parallel.recompute import activation_checkpointing
from trainer.recipes.causal_lm.task import CausalLM

SIZES = {key: LLAMA[key] for key in LLAMA if key not in ("model_type", "tie_word_embeddings")}
SIZES |= {"num_hidden_layers": 4, "head_dim": 8, "pad_token_id": 0}
EXPERTS = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
KINDS = ["sliding_attention", "full_attention"] * 2
MODELS: dict[str, tuple[dict[str, Any], int]] = {
    # a model, and its kinds of blocks
    "llama": ({"model_type": "llama", **SIZES}, 1),
    "qwen3_moe": ({"model_type": "qwen3_moe", **SIZES, **EXPERTS}, 1),
    "sliding windows": ({"model_type": "mistral", **SIZES, "sliding_window": 4}, 1),
    "windows in turn": (
        {"model_type": "gemma3_text", **SIZES, "sliding_window": 4, "layer_types": KINDS},
        2,
    ),
    "blocks that know their number": (
        {"model_type": "smollm3", **SIZES, "no_rope_layers": [1, 1, 1, 1]},
        1,
    ),
    "every fourth block without positions": ({"model_type": "smollm3", **SIZES}, 2),
}
MODES = [Recompute(), Recompute("full"), Recompute("selective"), Recompute("selective", 2)]


def steps(model: dict[str, Any], recompute: Recompute, compiled: bool) -> list[Any]:
    """Return loss and gradients of two steps of one shape, with dropout on."""
    spec = spec_of(model)
    task = CausalLM.of(spec)
    built = task.prepare(spec.build()).train()
    activation_checkpointing.apply(built, spec, recompute)
    if compiled:
        compilation.apply(built, spec, trial=True)
    dropout = Dropout(built, spec)
    materialise(built, spec, seed=5)
    results = []
    for step in range(2):
        dropout.start(7, step)
        ids = torch.randint(1, 60, (2, 12), generator=torch.Generator().manual_seed(step))
        loss = task.loss_sum(built, {"input_ids": ids, "targets": ids})
        loss.backward()
        results += [loss.detach(), *(p.grad.clone() for p in built.parameters())]
        built.zero_grad()
    return results


@pytest.mark.first("llama-selective")
@pytest.mark.parametrize("recompute", MODES, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_equal_blocks_share_one_graph_that_computes_the_same(name, recompute):
    from torch._dynamo.utils import counters

    model, kinds = MODELS[name]
    expected = steps(model, recompute, compiled=False)
    torch.compiler.reset()
    counters.clear()
    result = steps(model, recompute, compiled=True)
    loss = 1  # of a chunk of logits
    assert counters["stats"]["unique_graphs"] == kinds + loss
    assert not counters["graph_break"]
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(result, expected, strict=True))
