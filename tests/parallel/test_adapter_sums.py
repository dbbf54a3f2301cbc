"""`selective` keeps what a layer with an adapter gives, and not its terms: all else is the same."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.layouts import PARTS, SPLIT, family
from tests.support.training import (
    Case,
    assert_same,
    spec_in,
    task_of,
    train_by_engine,
    train_plainly,
)
from trainer.layout import Recompute
from trainer.models.materialise import materialise
from trainer.parallel.recompute import activation_checkpointing

GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 61}
HALF = Case(world_size=1, recompute="selective", adapter={"r": 4, "alpha": 2, "dropout": 0.1})
ONE = replace(HALF, adapter={"r": 4, "alpha": 4})
FOUR_BITS = {"quantize": {"type": "nf4"}}
CASES = {
    "a factor of a half": HALF,
    "a factor of 1": ONE,
    "every 2": replace(HALF, every=2),
    "biases": replace(HALF, model=family("qwen2")),
    "gpt2": replace(HALF, model=GPT2),
    "DoRA": replace(HALF, adapter={"r": 4, "dora": True}),
    "in tiles": replace(ONE, tile=8),
    "four bits": replace(HALF, adapter={"r": 4, **FOUR_BITS}),
    "zero3": replace(HALF, world_size=2, zero_stage=3),
    "tensor": replace(SPLIT, recompute="selective", adapter=ONE.adapter),
    "tensor, sequence": replace(SPLIT, recompute="selective", adapter=ONE.adapter, more=PARTS),
    "pipeline": replace(HALF, world_size=2, pipeline=2),
    "compiled": replace(ONE, compile="blocks"),
}
ENGINES = {"zero3": ("mesh", "accelerate", "deepspeed")}


@pytest.mark.first("tensor, sequence-mesh", "gpt2-mesh")
@pytest.mark.parametrize(
    ("name", "engine"),
    [(name, engine) for name in CASES for engine in ENGINES.get(name, ("mesh",))],
)
def test_it_trains_as_one_process_of_pefts_layers(pools, name: str, engine: str) -> None:
    case = replace(CASES[name], engine=engine)
    reference = train_plainly(case)
    for outcome in pools[case.world_size].run(train_by_engine, case=case):
        assert_same(outcome, reference, 2e-6)


class Products(TorchDispatchMode):
    """Counts the matrix products of a pass."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[bool] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> object:
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self.count[True] += 1
        return func(*args, **(kwargs or {}))


def backward_products(recompute: Recompute) -> int:
    """Return the number of products in the backward pass of a model with adapters."""
    spec = spec_in(ONE)
    task = task_of(spec)
    model = task.prepare(spec.build()).train()
    activation_checkpointing.apply(model, spec, recompute)
    materialise(model, spec, seed=0)
    ids = torch.ones(2, 12, dtype=torch.int64)
    loss = task.loss_sum(model, {"input_ids": ids, "targets": ids})
    with Products() as products:
        loss.backward()
    return products.count[True]


def test_no_product_is_computed_again() -> None:
    assert backward_products(Recompute("selective")) == backward_products(Recompute())
    assert backward_products(Recompute("full")) > backward_products(Recompute())
