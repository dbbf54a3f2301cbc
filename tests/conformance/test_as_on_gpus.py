"""Where tensors would live on GPUs, and how much of a model is ever whole there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.support.as_on_gpus import built, gpus
from tests.support.training import LLAMA, Case, build

TWO = Case("mesh", zero_stage=3)
HSDP = replace(TWO, world_size=4, replicate=2, micro_batch=1)
CASES = {
    "ZeRO-3": TWO,
    "HSDP": HSDP,
    "offload": replace(TWO, offload_optimizer="cpu", offload_param="cpu"),
    "HSDP, offload": replace(HSDP, offload_optimizer="cpu"),
    "bfloat16, offload": replace(TWO, offload_optimizer="cpu", precision="bfloat16"),
}


def places(engine: Any) -> tuple[set[str], set[str]]:
    """Return the kinds of device of this rank's parameters, and of its buffers."""
    kept = [p for module in engine.modules for p in module.parameters()]
    parameters = {(p._local_tensor if isinstance(p, DTensor) else p).device.type for p in kept}
    return parameters, {b.device.type for module in engine.modules for b in module.buffers()}


@pytest.mark.first("ZeRO-3", "HSDP, offload")
@pytest.mark.parametrize("name", CASES)
def test_parameters_live_where_the_layout_says(name):
    case = CASES[name]
    with gpus(case.world_size):
        engine = built(case)
        assert places(engine) == (
            {"cuda"} if case.offload_optimizer == "none" else {"cpu"},
            {"cuda"},
        )
        for group in engine._optimizer.param_groups:
            assert {p.device.type for p in group["params"]} == places(engine)[0]


def meta_before_values(case: Case) -> set[tuple[bool, bool]]:
    """Return (on the meta device, sharded) of each parameter before it gets its values."""
    import torch.distributed as dist

    from trainer.parallel import apply

    actual: set[tuple[bool, bool]] = set()

    def watched(model: Any, *rest: Any) -> None:
        actual.update((p.is_meta, isinstance(p, DTensor)) for p in model.parameters())
        real(model, *rest)

    real = apply.give_values
    with (
        patch("trainer.engines.torch.mesh.give_values", watched),
        patch("trainer.engines.torch.accelerate.give_values", watched),
    ):
        build(case, dist.get_rank())
    return actual


@pytest.mark.more
@pytest.mark.parametrize("engine", ["mesh", "accelerate"])
def test_a_sharded_model_is_never_whole(pools, engine):
    for actual in pools[2].run(meta_before_values, case=replace(TWO, engine=engine)):
        assert actual == {(True, True)}


@pytest.mark.more
def test_what_is_pretrained_is_read_but_for_its_own_rows(pools, tmp_path):
    from tests.support.models.families import real
    from tests.support.training import spec_of, train_by_engine, train_plainly

    real(spec_of(LLAMA), seed=4).save_pretrained(tmp_path)
    case = replace(TWO, engine="accelerate")
    for outcome in pools[2].run(train_by_engine, case=case, path=str(tmp_path)):
        torch.testing.assert_close(
            outcome.losses, train_plainly(case, str(tmp_path)).losses, rtol=2e-6, atol=0
        )
