"""`trainer.freeze`: what matches stays as it is under every engine, and the rest trains as in one
process.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.layouts import (
    DATA,
    EXPERTS,
    HSDP,
    LLAMA_4,
    SPLIT_4,
    SPREAD,
    STAGES,
    STAGES_4,
    TIED,
    by_engine,
)
from tests.support.messages import raises
from tests.support.pool import machine_here
from tests.support.training import (
    GPT2,
    LLAMA,
    Case,
    assert_same,
    resume_by_engine,
    spec_of,
    train_by_engine,
    train_plainly,
)
from trainer.errors import ConfigError
from trainer.models.finetuning.frozen import frozen, stand_ins

TABLES = ("lm_head.*", "*.q_proj.*", "model.layers.0.*")
"""One with the input table; a matrix of each block; a block as a whole."""
FIRST = ("model.embed_tokens.*", "model.layers.[01].*")
"""All that the first of two stages has."""
BUT_EXPERTS = ("*embed*", "*self_attn*", "*norm*", "lm_head*")
"""All that comes before the router of the first block, and more."""
LAYOUTS = {
    "ddp": replace(DATA, zero_stage=0, freeze=TABLES),
    "zero1": replace(DATA, zero_stage=1, freeze=TABLES),
    "zero2": replace(DATA, zero_stage=2, freeze=TABLES),
    "zero3": replace(DATA, zero_stage=3, freeze=TABLES),
    "zero3, gpt2, full": replace(
        DATA, zero_stage=3, model=GPT2, recompute="full", freeze=("*.wte.*", "*.h.[01].*")
    ),
    "zero3, tiled": replace(DATA, zero_stage=3, tile=4, freeze=TABLES),
    "zero3, all on the host": replace(
        DATA, offload_optimizer="cpu", offload_param="cpu", zero_stage=3, freeze=TABLES
    ),
    "zero3, router and experts": replace(DATA, zero_stage=3, model=EXPERTS, freeze=BUT_EXPERTS),
    "zero3, experts alone": replace(SPREAD, zero_stage=3, freeze=(*BUT_EXPERTS, "*.gate.*")),
    "pipeline": replace(STAGES, freeze=TABLES),
    "pipeline, a frozen stage": replace(STAGES, freeze=FIRST),
    "pipeline, DualPipeV": replace(STAGES, schedule="DualPipeV", freeze=FIRST),
    "hsdp": replace(HSDP, zero_stage=3, freeze=TABLES),
    "pipeline x zero2, ZBVZeroBubble": replace(
        STAGES_4, zero_stage=2, schedule="ZBVZeroBubble", freeze=TABLES
    ),
    "pipeline x zero3": replace(STAGES_4, zero_stage=3, freeze=FIRST),
    "pipeline x zero2": replace(STAGES_4, zero_stage=2, freeze=TABLES),
    "tensor x zero2": replace(SPLIT_4, zero_stage=2, freeze=TABLES),
}
CASES = {
    name: case
    for name, case in by_engine(LAYOUTS).items()
    if name != "deepspeed-pipeline, a frozen stage"
}
STOPPED = {
    name: CASES[name]
    for name in ("deepspeed-zero2", "deepspeed-zero3", "mesh-zero3", "mesh-pipeline x zero2")
}


def held_in(case: Case) -> set[str]:
    return set(frozen(spec_of(case.model), case.freeze).training.frozen)


@pytest.mark.first("deepspeed-zero2", "mesh-zero3", "mesh-pipeline, a frozen stage")
@pytest.mark.parametrize("name", CASES)
def test_the_rest_trains_as_in_one_process(pools, name):
    case = CASES[name]
    reference, kept = train_plainly(case), held_in(case)
    for outcome in pools[case.world_size].run(train_by_engine, case=case):
        assert_same(outcome, reference, 2e-6)
        assert not kept & set(outcome.gradients[0])


@pytest.mark.more
@pytest.mark.parametrize("name", STOPPED)
def test_a_resumed_run_goes_on_bit_for_bit(pools, tmp_path, name):
    case = STOPPED[name]
    for losses, weights in pools[case.world_size].run(
        resume_by_engine, before=case, after=case, folder=tmp_path
    ):
        assert losses[0] == losses[1]
        assert [
            name for name in weights[1] if not torch.equal(weights[0][name], weights[1][name])
        ] == []


def state_after_a_step(case: Case) -> tuple[list[str], dict[str, bool]]:
    """What has optimizer state, and whether each weight is what it was. Runs on each rank of a
    pool.
    """
    import torch.distributed as dist

    from tests.support.training import (
        build,
        collated,
        data_rank_of,
        shares,
        spec_in,
        task_of,
        whole_weights,
    )
    from trainer.optim.lr_schedules import Update

    rank = dist.get_rank()
    engine, task = build(case, rank), task_of(spec_in(case))
    before = whole_weights(engine, case)
    engine.step(
        0,
        [collated(task, share) for share in shares(case, 0, data_rank_of(case, rank))],
        Update(1e-2),
    )
    after = whole_weights(engine, case)
    kept = sorted({entry.name for entry in engine.state_tensors() if entry.key != "weight"})
    engine.close()
    return kept, {name: torch.equal(before[name], after[name]) for name in before}


@pytest.mark.first("mesh-zero3")
@pytest.mark.parametrize("name", ["deepspeed-zero2", "deepspeed-zero3", "mesh-zero3"])
def test_what_is_frozen_stays_and_has_no_optimizer_state(pools, name):
    locked = held_in(CASES[name])
    assert len(locked) == 1 + 9 + 2  # the table; the first block; a matrix of each other block
    for kept, same in pools[2].run(state_after_a_step, case=CASES[name]):
        assert {name for name, unmoved in same.items() if unmoved} == locked
        assert set(kept) == set(same) - locked


def decayed_all_the_same(engine: str) -> Any:
    """The fault: weight decay reaches a frozen matrix."""
    from unittest import mock

    from trainer.engines.torch.engine import TorchEngine

    real = TorchEngine.step

    def step(self, *args):
        metrics = real(self, *args)
        with torch.no_grad():
            for module in self.modules:
                for parameter in module.parameters():
                    if not parameter.requires_grad:
                        parameter *= 0.999
        return metrics

    return mock.patch.object(TorchEngine, "step", step)


def certified(path: str, world_size: int, planted: bool = False) -> tuple[bool, str]:
    """Runs on each rank of a pool."""
    import contextlib

    from trainer.certify.certificate import certify, table
    from trainer.certify.tiny_run import tiny_run

    with decayed_all_the_same("mesh") if planted else contextlib.nullcontext():
        certificate = certify(tiny_run(path, [], world_size), machine_here())
    return certificate.passed, table(certificate)


@pytest.mark.more
@pytest.mark.parametrize("engine, stage", [("mesh", 3), ("deepspeed", 2)])
def test_it_is_certified_and_a_fault_is_caught(pools, tmp_path, engine, stage):
    from tests.support.certify.certifying import config

    path = config(tmp_path, engine, stage, freeze=["*.wte.*", "transformer.h.[0-3].*", "*.bias"])
    for passed, table in pools[2].run(certified, path=path, world_size=2):
        assert passed, table
    if engine == "mesh":
        for passed, table in pools[2].run(certified, path=path, world_size=2, planted=True):
            assert not passed
            assert "update" in table.splitlines()[-1], table


@pytest.mark.more
def test_what_is_held_in_16_bits_alone_is_no_alarm(pools):
    from tests.support.certify.certifying import certified as certified_in
    from tests.support.commands import ROOT

    overrides = ["trainer.engine=deepspeed", 'trainer.freeze=["*embed_tokens*","*.q_proj.*"]']
    config = {
        "path": str(ROOT / "ds_configs" / "zero3.json"),
        "world_size": 2,
        "precision": "config",
    }
    for passed, _, table in pools[2].run(certified_in, **config, overrides=overrides):
        assert passed, table


# Without processes


def test_each_block_of_a_tiny_copy_stands_for_one_of_the_model():
    assert stand_ins("FFFFTTTT", 3) == [0, 0, 4]
    assert stand_ins("FTFTFT", 3) == [0, 0, 1]
    assert stand_ins("FFTTFF", 3) == [0, 2, 4]
    assert stand_ins("AAAA", 2) == [0, 0]
    last = [f"model.layers.{i}.*" for i in range(11)]
    spec = frozen(spec_of(LLAMA | {"num_hidden_layers": 12}), ["model.embed_tokens.*", *last])
    assert {
        name.split(".")[2] for name in spec.tiny.copy(3).training.frozen if "layers" in name
    } == {"0", "1"}


def test_any_name_of_a_tied_parameter_will_do():
    assert set(frozen(spec_of(LLAMA), ["lm_head.weight"]).training.frozen) == {
        "model.embed_tokens.weight"
    }
    spec = frozen(spec_of(TIED), ["*norm*"])
    assert "trainer.freeze" in spec.notes[-1] and "7 of 29 parameters" in spec.notes[-1]


@pytest.mark.parametrize(
    "patterns, keys",
    [
        (
            ["*norm*", "model.embd_tokens.*"],
            ('trainer.freeze[1]: "model.embd_tokens.*"', "matches no parameter"),
        ),
        (["model.embd_tokens.*"], ('Did you mean "model.embed_tokens.*"',)),
        (["layers.0.self_attn.k_proj"], ("matches no parameter",)),
        (["*"], ("trainer.freeze: all 29 parameters", "left to train")),
    ],
)
def test_what_fits_no_model_is_an_error(patterns, keys):
    with raises(ConfigError, *keys):
        frozen(spec_of(LLAMA), patterns)


@pytest.mark.more
def test_deepspeed_says_that_a_stage_has_nothing_to_learn(pools):
    case = by_engine({"x": LAYOUTS["pipeline, a frozen stage"]})["deepspeed-x"]
    with raises(AssertionError, "0 is frozen"):
        pools[2].run(train_by_engine, case=case)


def test_a_model_whose_blocks_are_frozen_is_cheaper():
    from trainer.models.flops import flops_per_token

    spec = spec_of(LLAMA_4)
    cheaper = frozen(spec, ["model.layers.*"])
    blocks = sum(cheaper.training.frozen.values())
    assert flops_per_token(spec, 8) - flops_per_token(cheaper, 8) == 2 * blocks
