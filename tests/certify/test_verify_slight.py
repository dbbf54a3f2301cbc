"""Slight faults over the layouts: each moves numbers by a little, or in one place."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest

from tests.support.certify.certifying import BALANCED, SPREAD, config
from tests.support.certify.faults.planting import around, in_blocks_of_the_run
from tests.support.pool import machine_here
from tests.support.training import GPT2 as SMALL

LLAMA = {"model_type": "llama", "num_hidden_layers": 4, "vocab_size": 61, "num_key_value_heads": 2}
ROWS = {"data": {"sequence_length": 28}, "model": {"config": LLAMA}}
GPT2 = {**SMALL, "n_positions": 128}


def on_module(name: str, change: Callable[[Any], Any]) -> Any:
    """`change(output)` replaces the output of a module of the run."""

    def hook(module: Any, inputs: Any, output: Any) -> Any:
        return (change(output[0]), *output[1:]) if isinstance(output, tuple) else change(output)

    def register(model: Any, spec: Any) -> None:
        with contextlib.suppress(AttributeError):  # a stage has a part of the blocks
            model.get_submodule(name).register_forward_hook(hook)

    return in_blocks_of_the_run(register)


def half_of_the_smoothing() -> Any:
    from trainer.recipes.causal_lm.task import CausalLM

    def half(real, self, spec, smoothing, alpha):
        return real(self, spec, smoothing / 2, alpha)

    return around(CausalLM, "regularised", half)


def noise_by_the_width() -> Any:
    from trainer.recipes.causal_lm.embedding_noise import EmbeddingNoise

    def start(real, self, lengths, ranks=None):
        return real(self, lengths.max().expand_as(lengths), ranks)

    return around(EmbeddingNoise, "start", start)


def limit_of_a_thousandth_more() -> Any:
    from trainer.parallel.gradients import GradientNorm

    return around(GradientNorm, "clip", lambda real, self, limit: real(self, limit * 1.001))


def no_decay_at_all() -> Any:
    from trainer.engines.torch.engine import TorchEngine

    real = TorchEngine.step

    def step(self, *given):
        for group in self._optimizer.param_groups:
            group["weight_decay"] = 0.0
        return real(self, *given)

    return mock.patch.object(TorchEngine, "step", step)


def eps_ten_times() -> Any:
    from trainer.engines.torch.engine import TorchEngine

    real = TorchEngine.step

    def step(self, *given):
        for group in self._optimizer.param_groups:
            group["eps"] = 1e-7
        return real(self, *given)

    return mock.patch.object(TorchEngine, "step", step)


def tied_gradient_a_thousandth_less() -> Any:
    from trainer.parallel.gradients import GradientSync

    def less(real, self):
        real(self)
        for copies in self._tied.values():
            for parameter in copies:
                parameter.grad *= 0.999

    return around(GradientSync, "reduce", less)


def one_seed_of_the_last_stage() -> Any:
    import torch.distributed as dist

    from trainer.parallel.forward_backward import Dropout

    def start(real, self, seed, micro_batch):
        return real(self, seed + (dist.get_rank() == 1 and micro_batch == 2), micro_batch)

    return around(Dropout, "start", start)


def split_sum_a_thousandth_less() -> Any:
    return on_module("model.layers.1.self_attn.o_proj", lambda out: out * 0.999)


def last_token_of_a_part_is_dropped() -> Any:
    from trainer.recipes.causal_lm.task import CausalLM

    def own(real, self, batch, name):
        result = real(self, batch, name)
        if name == "targets" and self._context and result.shape[1] > 8:
            result = result.clone()
            result[:, -1] = -100
        return result

    return around(CausalLM, "_own", own)


def experts_a_hundredth_less_on_rank_1() -> Any:
    import torch.distributed as dist

    return on_module(
        "model.layers.1.mlp.experts", lambda out: out * (1 - 0.01 * (dist.get_rank() == 1))
    )


def one_norm_is_not_reduced() -> Any:
    import torch.distributed as dist

    from trainer.parallel.gradients import GradientNorm

    def clip(real, self, limit):
        from trainer.distributed.dtensor import local

        small = [p for p, _ in self._parameters if p.ndim == 1 and p.grad is not None]
        if dist.get_rank() == 1:
            local(small[0].grad).mul_(1.01)
        return real(self, limit)

    return around(GradientNorm, "clip", clip)


def computed_in_float32() -> Any:
    import torch

    from trainer.parallel import shard

    policy = torch.distributed.fsdp.MixedPrecisionPolicy()
    return mock.patch.object(shard, "policy_of", lambda *given: policy)


def biases_stay() -> Any:
    from trainer.parallel.splits.expert_loads import ExpertLoads

    return mock.patch.object(ExpertLoads, "move", lambda self, *given: None)


def no_dropout_in_adapters() -> Any:
    from trainer.models.finetuning import lora

    real = lora._peft_config

    def other(*given: Any) -> Any:
        result = real(*given)
        result.lora_dropout = 0.0
        return result

    return mock.patch.object(lora, "_peft_config", other)


def rate_of_a_group_a_hundredth_more() -> Any:
    from trainer.models.finetuning import tuned

    real = tuned.Tuning

    def other(lr_multiplier=1.0, weight_decay=None):
        return real(lr_multiplier * 1.01, weight_decay)

    return mock.patch.object(tuned, "Tuning", other)


def positions_go_on_in_long_rows() -> Any:
    from trainer.recipes.causal_lm import task as causal_lm

    def documents(real, lengths, row):
        import torch

        result = real(lengths, row)
        if row <= 64:
            return result
        return result._replace(positions=torch.arange(row).expand_as(result.positions))

    return around(causal_lm, "documents_of", documents)


def frozen_but_for_one() -> Any:
    from trainer.models.finetuning import frozen

    real = frozen._holding
    return mock.patch.object(
        frozen, "_holding", lambda spec, names: real(spec, dict.fromkeys(sorted(names)[1:]))
    )


@dataclass(frozen=True)
class Slight:
    check: str
    trainer: dict[str, Any] = field(default_factory=dict)
    stage: int = 2
    precisions: tuple[str, ...] = ("float32", "bfloat16")
    size: int = 2
    overrides: tuple[str, ...] = ()


STAGES = {"stages": 2}
LORA = {"adapter": {"r": 4, "dropout": 0.3}, "data": {"sequence_length": 28}}
FLOAT32 = ("float32",)
FAULTS: dict[Callable[[], Any], Slight] = {
    half_of_the_smoothing: Slight("option", ROWS | {"label_smoothing": 0.05}),
    noise_by_the_width: Slight("output", ROWS | {"neftune_alpha": 5.0}),
    limit_of_a_thousandth_more: Slight("moment", ROWS),
    no_decay_at_all: Slight("option", ROWS, overrides=("optimizer.params.weight_decay=0.001",)),
    eps_ten_times: Slight("update", ROWS),
    tied_gradient_a_thousandth_less: Slight(
        "gradient", STAGES | {"data": {"sequence_length": 28}}, precisions=FLOAT32
    ),
    one_seed_of_the_last_stage: Slight("output", STAGES | {"data": {"sequence_length": 28}}),
    split_sum_a_thousandth_less: Slight("output", {"tensor": 2, **ROWS}, precisions=FLOAT32),
    last_token_of_a_part_is_dropped: Slight("loss", {"context": 2, **ROWS}),
    experts_a_hundredth_less_on_rank_1: Slight(
        "output", SPREAD | {"data": {"sequence_length": 28}}, 3, FLOAT32
    ),
    one_norm_is_not_reduced: Slight("resumed state", ROWS, 0, FLOAT32),
    computed_in_float32: Slight("option", ROWS, precisions=("bfloat16",)),
    biases_stay: Slight("option", BALANCED),
    no_dropout_in_adapters: Slight("option", LORA),
    rate_of_a_group_a_hundredth_more: Slight(
        "update", ROWS | {"parameter_groups": [{"names": "*.mlp.*", "lr_multiplier": 0.5}]}
    ),
    positions_go_on_in_long_rows: Slight(
        "output",
        {"model": {"config": GPT2}, "data": {"sequence_length": 96, "documents": "pack"}},
    ),
    frozen_but_for_one: Slight("gradient", ROWS | {"freeze": ["*.layers.0.*"]}),
}


def certified(
    path: str, size: int, overrides: list[str], precision: str, fault: str
) -> tuple[bool, list[str], str]:
    """Runs on each rank of a pool: the checks at start are left out."""
    from trainer.certify import certificate as module
    from trainer.certify.tiny_run import tiny_run

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(module, "checked", lambda spec, *_: (spec, ())))
        stack.enter_context(globals()[fault]())
        certificate = module.certify(tiny_run(path, overrides, size, precision), machine_here())
    failed = [finding.check for finding in certificate.findings if not finding.passed]
    return certificate.passed, failed, module.table(certificate)


@pytest.mark.more
@pytest.mark.parametrize(
    ("fault", "precision"),
    [
        pytest.param(fault, precision, id=f"{fault.__name__}, {precision}")
        for fault, planted in FAULTS.items()
        for precision in planted.precisions
    ],
)
def test_a_slight_fault_is_caught(pools, tmp_path, fault, precision):
    planted = FAULTS[fault]
    trainer = planted.trainer
    if "adapter" in trainer:  # its weights are not read
        from transformers import GPT2Config

        GPT2Config(**GPT2).save_pretrained(tmp_path / "base")
        trainer = trainer | {"model": {"name_or_path": str(tmp_path / "base")}}
    path = config(tmp_path, "mesh", planted.stage, **trainer)
    low = precision == "bfloat16"
    overrides = [*planted.overrides, *(["bf16.enabled=true"] if low else [])]
    given = {
        "path": path,
        "size": planted.size,
        "overrides": overrides,
        "precision": "config" if low else "float32",
        "fault": fault.__name__,
    }
    for passed, failed, table in pools[planted.size].run(certified, **given):
        assert not passed, table
        assert planted.check in failed, table
