"""The float32 masters with which 16-bit training under DeepSpeed starts."""

from __future__ import annotations

import pytest
import torch

from tests.support.training import LLAMA, Case

HOST = {"offload_optimizer": "cpu"}
MASTERS = [
    *(Case(precision="bfloat16", zero_stage=stage) for stage in (0, 1, 2, 3)),
    Case(precision="float16", zero_stage=2),
    Case(precision="float16", zero_stage=3),
    Case(precision="bfloat16", zero_stage=2, tensor=2, model={**LLAMA, "attention_dropout": 0.0}),
    Case(precision="bfloat16", zero_stage=1, pipeline=2),
    Case(precision="bfloat16", zero_stage=2, **HOST),
    Case(precision="bfloat16", zero_stage=3, **HOST, offload_param="cpu"),
]


def label(case: Case) -> str:
    return (
        f"{case.precision}, zero{case.zero_stage}, {case.offload_optimizer}, "
        f"{case.model['model_type']}"
    )


def masters_at_start(case: Case) -> dict[str, torch.Tensor]:
    """Runs on each rank."""
    import torch.distributed as dist

    from tests.support.training import allow_float16, build, whole_weights

    allow_float16(case)
    engine = build(case, dist.get_rank())
    result = whole_weights(engine, case)
    engine.close()
    return result


@pytest.mark.first("bfloat16, zero3, none, llama, 1 x 1", "float16, zero3, none, llama, 1 x 1")
@pytest.mark.parametrize(
    "case", MASTERS, ids=lambda case: f"{label(case)}, {case.tensor} x {case.pipeline}"
)
def test_masters_start_from_the_float32_values(pools, case):
    """The masters are the float32 values, bit for bit, not what rounding leaves of them."""
    from tests.support.training import spec_of
    from trainer.models.materialise import materialise

    spec = spec_of(case.model)
    model = spec.build()
    materialise(model, spec, seed=5)
    wanted = dict(model.named_parameters())
    for result in pools[case.world_size].run(masters_at_start, case=case):
        assert result.keys() == wanted.keys()
        assert [
            name for name, value in wanted.items() if not torch.equal(result[name], value.detach())
        ] == []
