"""The certificate in 16 bits: what rounding hides in a step shows over many rows, and in what adds
up.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

from tests.support.certify.certifying import config
from tests.support.certify.faults.planting import around
from tests.support.commands import ROOT
from tests.support.pool import machine_here
from trainer.certify.comparisons.steps import compare_outputs
from trainer.certify.one_process.expected import Expected, Rounding
from trainer.certify.one_process.repeated import Computed, rounding_of_float32


def scaled_by(factor: float) -> Any:
    from trainer.tasks.task import ModelWithLoss

    real = ModelWithLoss.forward

    class More(torch.autograd.Function):
        @staticmethod
        def forward(ctx, loss):
            return loss.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient * factor

    return mock.patch.object(
        ModelWithLoss, "forward", lambda self, batch: More.apply(real(self, batch))
    )


def scaled_by_a_hundredth() -> Any:
    return scaled_by(1.01)


def scaled_by_three_thousandths() -> Any:
    """As much as a scale may be off that is rounded to bfloat16; that of these steps is by 2e-4."""
    return scaled_by(1.003)


def reduced_in_16_bits() -> Any:
    from trainer.parallel import shard

    policy = torch.distributed.fsdp.MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16
    )
    return mock.patch.object(shard, "policy_of", lambda *given: policy)


def added_up_in_16_bits() -> Any:
    from trainer.parallel.forward_backward import GradientAccumulation

    def rounded(p: Any) -> None:
        p.grad.copy_(p.grad.bfloat16())

    def rounding(real, self, seed, batches, scale):
        hooks = [
            p.register_post_accumulate_grad_hook(rounded)
            for module in self.modules
            for p in module.parameters()
        ]
        result = real(self, seed, batches, scale)
        for hook in hooks:
            hook.remove()
        return result

    return around(GradientAccumulation, "train", rounding)


def certified(
    path: str, world_size: int, overrides: list[str], fault: str | None
) -> tuple[bool, str]:
    """Runs on each rank of a pool."""
    from trainer.certify.certificate import certify, table
    from trainer.certify.tiny_run import tiny_run

    small = tiny_run(path, overrides, world_size, "config")
    with globals()[fault]() if fault else contextlib.nullcontext():
        certificate = certify(small, machine_here())
    return certificate.passed, table(certificate)


FAULTS: dict[Callable[[], Any], tuple[int, str]] = {
    scaled_by_a_hundredth: (2, "projection"),
    scaled_by_three_thousandths: (2, "projection"),
    reduced_in_16_bits: (2, "sum"),
    added_up_in_16_bits: (3, "sum"),
}
BF16 = ["bf16.enabled=true"]
QWEN3 = {"model_type": "qwen3", "num_hidden_layers": 4, "vocab_size": 61}


@pytest.mark.more
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_that_rounding_would_hide_is_caught(pools, tmp_path, fault):
    stage, check = FAULTS[fault]
    model = {"config": QWEN3 | {"tie_word_embeddings": True}}
    path = config(tmp_path, "mesh", stage, model=model)
    for passed, table in pools[2].run(
        certified, path=path, world_size=2, overrides=BF16, fault=fault.__name__
    ):
        assert not passed
        assert " FAIL " in next(
            line for line in table.splitlines() if line.startswith(f"{check} ")
        ), table


ADDED_UP = ["data_types.grad_accum_dtype=fp32", "communication_data_type=fp32"]
SHIPPED = {"zero2": 2, "fsdp": 2, "pipeline_zero3": 2, "tensor_zero2": 2, "zero3": 2, "hsdp": 4}


@pytest.mark.more
@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        pytest.param("zero2", ADDED_UP, id="zero2, in float32"),
        *(pytest.param(name, [], id=name) for name in SHIPPED),
    ],
)
def test_what_ships_raises_no_alarm(pools, name, overrides):
    """DeepSpeed adds gradients up in bfloat16 unless both keys say float32, and is then held to
    it.
    """
    path, size = str(ROOT / "ds_configs" / f"{name}.json"), SHIPPED[name]
    run = {"path": path, "world_size": size, "overrides": [*BF16, *overrides], "fault": None}
    for passed, table in pools[size].run(certified, **run):
        assert passed, table
        tolerance = next(line for line in table.splitlines() if line.startswith("sum ")).split()[2]
        assert (tolerance == "1e-05") == (bool(overrides) or name not in ("zero2", "zero3")), table


def test_what_a_loss_is_multiplied_by_is_not_rounded_to_16_bits():
    """1 / 896 is off by 2e-3 in bfloat16, and with it every gradient of the step."""
    from trainer.tasks.losses.cross_entropy import linear_cross_entropy

    torch.manual_seed(0)
    hidden, weight = torch.randn(64, 32), torch.randn(48, 32)
    targets, result = torch.randint(48, (64,)), []
    for dtype in (torch.float32, torch.bfloat16):
        leaf = hidden.to(dtype, copy=True).requires_grad_()
        (linear_cross_entropy(leaf, weight.to(dtype), None, targets) / 896).backward()
        result.append(leaf.grad.double().flatten())
    exact, low = result
    assert abs(float(low @ exact / (exact @ exact)) - 1) < 5e-4


@pytest.mark.parametrize("loss", [-2.0, 0.0, 2.0])
def test_the_rounding_of_a_step_is_measured_whatever_its_loss_is(loss):
    model = torch.nn.Linear(8, 8)

    def compute(of, parts):
        weight = of.weight.detach().double()
        moved = float((weight - model.weight.detach()).abs().sum())
        return Computed(loss + moved, {"weight": weight}, {})

    rounding = rounding_of_float32(model, compute, (), compute(model, ()))
    assert 0 < rounding.norm < 1e-5 and rounding.gradients["weight"] > 0
    assert rounding.loss > 0


HEAD = (0, 0, "head")


def expected(outputs: torch.Tensor, rounding: float) -> Expected:
    measured = Rounding(0.0, 0.0, {}, {HEAD: rounding}, 2**-8)
    return Expected(0.0, 0.0, {}, {}, 1, measured, {HEAD: outputs})


@pytest.mark.parametrize(
    ("feature", "difference", "passes"),
    [(0, 0.03, True), (0, 0.08, False), (1, 0.03, True), (1, 0.08, False)],
    ids=["small, rounded", "small, wrong", "large, rounded", "large, wrong"],
)
def test_a_small_output_may_be_off_by_as_much_as_a_large_one(feature, difference, passes):
    """A logit that is small by chance is rounded as the others are, though relatively by more."""
    values = torch.tensor([0.05, 1.0, -1.0])
    exact = torch.stack([values, values.square()])
    values[feature] += difference
    ours = {HEAD: torch.stack([values, values.square()])}
    result = compare_outputs(0, ours, expected(exact, 0.02), 0)
    assert result.passed == passes, result
