"""The activations that a block keeps for its backward pass, by mode and layout, against a formula.

A step is simulated for two depths on fake ranks, and what another block adds to the peak is counted
but for weights, gradients and the optimizer's state: so that what an earlier block did not free in
the backward pass counts, too.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.counted import workload
from tests.support.training import task_of
from trainer.config.sections.adapter import AdapterSection
from trainer.layout import Layout
from trainer.models.finetuning.lora import adapted
from trainer.models.finetuning.lora_weights import made_up
from trainer.tools.planner.simulate import Workload, simulate_all

pytestmark = pytest.mark.skipif(
    torch.__version__ < "2.15", reason="fake tensors of PyTorch 2.10 have no messages"
)

HIDDEN, HEADS, WIDTH, INNER = 512, 8, 64, 1536
QUERIES, KEYS = HEADS * WIDTH, HEADS * WIDTH // 2
LENGTH = 65_536
DEPTHS = 2, 4
MODEL: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS // 2,
    "head_dim": WIDTH,
    "tie_word_embeddings": False,
}
HALF = {"precision": "bfloat16", "zero_stage": 3, "shard": 8}
LAYOUTS: dict[str, dict[str, Any]] = {
    "zero3": HALF,
    "tensor": {**HALF, "tensor": 4},
    "tensor, sequence parallel": {**HALF, "tensor": 4, "sequence_parallel": True},
    "context": {**HALF, "context": 2},
    "experts": {**HALF, "expert": 4},
}
MODES = "none", "selective", "full"
EXPERTS = {
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 256,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    f"{name}, {mode}": (name, mode, {}) for name in LAYOUTS for mode in MODES if name != "experts"
}
CASES |= {
    f"{name} of experts, full": (name, "full", EXPERTS)
    for name in ("tensor", "tensor, sequence parallel", "experts")
}
CASES |= {
    f"{name} of adapters, selective": (name, "selective", {}) for name in ("zero3", "context")
}
RANK = 16


def kept(layout: Layout, adapted: bool) -> float:
    """Return the bytes of a Llama's block for one token of a rank, in bfloat16.

    Of a norm: its input in float32, what is multiplied by its weight, and its output. Of attention:
    queries, keys, values, its output, and a float32 of each head. Of the MLP: four tensors of its
    inner width, by `selective` two; which keeps no norm, and the hidden state three times: as the
    block gets it, after attention's sum over ranks, and after the MLP's; and what context parallel
    ranks exchanged. Adapters add what their first matrix gives, to each of seven layers.
    """
    whole = 1 if layout.sequence_parallel else layout.tensor  # times as much
    heads = 2 * (2 * QUERIES + 2 * KEYS) + 4 * HEADS
    if layout.recompute.mode == "full":
        states, inside = 2 * HIDDEN, 0
    elif layout.recompute.mode == "selective":
        exchanged = 2 * (2 * QUERIES + 2 * KEYS) if layout.context > 1 else 0
        states, inside = 3 * 2 * HIDDEN, heads + exchanged + 2 * 2 * INNER
    else:
        states, inside = 2 * (4 + 2 + 2) * HIDDEN, heads + 4 * 2 * INNER
    adapters = 7 * 2 * RANK if adapted else 0
    return (states * whole + inside) / layout.tensor + adapters


def of_blocks(jobs: list[Workload]) -> list[float]:
    """Return what a block adds to each job's peak, in bytes for one token of a rank."""
    traces = simulate_all([(job, 0) for job in jobs], 8)
    peaks = [
        sum(peak.by_kind[kind] for kind in ("activations", "temporaries"))
        for peak in (trace.peak("step 2") for trace in traces)
    ]
    pairs = zip(peaks[::2], peaks[1::2], jobs[::2], strict=True)
    return [
        (deep - shallow) / (DEPTHS[1] - DEPTHS[0]) / (LENGTH / job.layout.context)
        for shallow, deep, job in pairs
    ]


def job(name: str, blocks: int) -> Workload:
    layout, mode, more = CASES[name]
    model = MODEL | more | {"num_hidden_layers": blocks}
    work = workload(model=model, length=LENGTH, recompute=mode, **LAYOUTS[layout])
    if "adapters" not in name:
        return work
    spec = adapted(work.spec.with_weights(made_up(work.spec)), AdapterSection(r=RANK, alpha=RANK))
    return replace(work, spec=spec, task=task_of(spec))


@pytest.fixture(scope="module")
def measured(request: pytest.FixtureRequest) -> dict[str, float]:
    items = [item for item in request.session.items if item.path == request.path]
    names = list(dict.fromkeys(item.callspec.params["name"] for item in items))
    return dict(zip(names, of_blocks([job(n, d) for n in names for d in DEPTHS]), strict=True))


@pytest.mark.first("tensor, sequence parallel, selective", "zero3 of adapters, selective")
@pytest.mark.parametrize("name", CASES)
def test_a_block_keeps_what_the_formula_says(measured, name):
    formula = kept(job(name, DEPTHS[0]).layout, "adapters" in name)
    assert 0.9 * formula <= measured[name] <= 1.1 * formula
