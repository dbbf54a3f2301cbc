"""`trainer.parameter_groups`: rates and weight decays by name, the same in every engine."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch

from tests.support.layouts import DATA, HSDP, LLAMA_4, SPLIT, STAGES, STAGES_4, by_engine
from tests.support.messages import raises, shows
from tests.support.pool import machine_here
from tests.support.training import (
    LLAMA,
    Case,
    assert_same,
    resume_by_engine,
    spec_in,
    spec_of,
    train_by_engine,
    train_plainly,
)
from trainer.config.sections.model_and_data import ParameterGroup
from trainer.config.validate import validate
from trainer.errors import ConfigError
from trainer.models.finetuning.tuned import tuned
from trainer.optim.decay import spared

GROUPS = (
    {"names": ["*.q_proj.*", "model.layers.2.*"], "lr_multiplier": 0.1},
    {"names": "model.embed_tokens.*", "lr_multiplier": 3.0, "weight_decay": 0.0},
    {"names": "*norm*", "weight_decay": 0.3},
)
"""A matrix of each block, a whole block, a tied table, and a parameter that is not decayed."""
LAYOUTS = {
    "ddp": replace(DATA, zero_stage=0, groups=GROUPS),
    "zero1": replace(DATA, zero_stage=1, groups=GROUPS),
    "zero2": replace(DATA, zero_stage=2, groups=GROUPS),
    "zero3": replace(DATA, zero_stage=3, groups=GROUPS),
    "zero3, all on the host": replace(
        DATA, offload_optimizer="cpu", offload_param="cpu", zero_stage=3, groups=GROUPS
    ),
    "pipeline": replace(STAGES, groups=GROUPS),
    "tensor": replace(SPLIT, groups=GROUPS),
    "hsdp": replace(HSDP, zero_stage=3, groups=GROUPS),
    "pipeline x zero2": replace(STAGES_4, zero_stage=2, groups=GROUPS),
}
CASES = by_engine(LAYOUTS)
STOPPED = [
    ("deepspeed-zero2", "mesh-zero3"),
    ("mesh-zero3", "deepspeed-zero3"),
    ("mesh-zero3", "mesh-zero3"),
]


@pytest.mark.first("deepspeed-zero2", "mesh-zero3")
@pytest.mark.parametrize("name", CASES)
def test_each_group_is_trained_as_in_one_process(pools, name):
    case = CASES[name]
    reference = train_plainly(case)
    for outcome in pools[case.world_size].run(train_by_engine, case=case):
        assert_same(outcome, reference, 2e-6)


@pytest.mark.more
@pytest.mark.parametrize(("before", "after"), STOPPED, ids=["-".join(pair) for pair in STOPPED])
def test_a_resumed_run_goes_on_with_them(pools, tmp_path, before, after):
    cases = {"before": CASES[before], "after": CASES[after]}
    for losses, weights in pools[2].run(resume_by_engine, **cases, folder=tmp_path):
        assert losses[0] == pytest.approx(losses[1], rel=0 if before == after else 2e-6)
        tolerance = 0 if before == after else 2e-6
        assert all(
            torch.allclose(weights[0][name], weights[1][name], rtol=0, atol=tolerance)
            for name in weights[1]
        )


def certified(path: str, world_size: int, planted: bool = False) -> tuple[bool, str]:
    """Runs on each rank of a pool. The fault: the schedule's rate for all."""
    import contextlib

    from trainer.certify.certificate import certify, table
    from trainer.certify.tiny_run import tiny_run

    def one_rate(groups, update):
        for group in groups:
            group["lr"] = update.learning_rate

    fault = mock.patch("trainer.engines.normalise.set_update", one_rate)
    with fault if planted else contextlib.nullcontext():
        certificate = certify(tiny_run(path, [], world_size), machine_here())
    return certificate.passed, table(certificate)


@pytest.mark.more
@pytest.mark.parametrize(("engine", "stage"), [("mesh", 3), ("deepspeed", 2)])
def test_they_are_certified_and_a_fault_is_caught(pools, tmp_path, engine, stage):
    from tests.support.certify.certifying import config

    groups = [
        {"names": "*.wte.*", "weight_decay": 0.0},
        {"names": "transformer.h.[0-3].*", "lr_multiplier": 0.2},
    ]
    path = config(tmp_path, engine, stage, parameter_groups=groups)
    for passed, table in pools[2].run(certified, path=path, world_size=2):
        assert passed, table
    if engine == "mesh":
        for passed, table in pools[2].run(certified, path=path, world_size=2, planted=True):
            assert not passed
            assert "update" in table.splitlines()[-1], table


# Without processes


def groups_of(*groups: dict) -> list[ParameterGroup]:
    return [ParameterGroup(**group) for group in groups]


def test_the_first_group_that_matches_counts_and_a_tied_parameter_has_any_of_its_names():
    groups = groups_of(
        {"names": "lm_head.weight", "lr_multiplier": 2}, {"names": "*", "weight_decay": 0.5}
    )
    spec = tuned(spec_of(LLAMA), groups)
    assert spec.training.tuned["model.embed_tokens.weight"] == (2, None)
    assert {own for name, own in spec.training.tuned.items() if "embed" not in name} == {(1, 0.5)}
    shows(spec.notes[-2], "1 parameters (0.0", "2 x", "learning rate")
    own = {name for name, tuning in spec.training.tuned.items() if tuning.weight_decay}
    assert set(spared("norms_and_biases", spec)) == own


def test_each_block_of_a_tiny_copy_has_what_one_of_the_model_has():
    groups = groups_of({"names": "model.layers.[0-7].mlp.*", "lr_multiplier": 0.5})
    spec = tuned(spec_of(LLAMA_4 | {"num_hidden_layers": 12}), groups)
    assert {name.split(".")[2] for name in spec.tiny.copy(3).training.tuned} == {"0", "1"}


@pytest.mark.parametrize(
    ("groups", "keys"),
    [
        ([{"names": ["*norm*", "model.embd_tokens.*"], "weight_decay": 0}],
         ('trainer.parameter_groups[0].names: "model.embd_tokens.*"', "matches no parameter")),
        ([{"names": "*", "lr_multiplier": 2}, {"names": "*norm*", "weight_decay": 0}],
         ("trainer.parameter_groups[1].names: earlier groups", "all that matches")),
    ],
)  # fmt: skip
def test_what_fits_no_model_is_an_error(groups, keys):
    with raises(ConfigError, *keys):
        tuned(spec_of(LLAMA), groups_of(*groups))


def test_what_is_frozen_matches_nothing():
    with pytest.raises(ConfigError, match="matches no parameter"):
        spec_in(
            Case(
                freeze=("model.embed_tokens.*",), groups=({"names": "*embed*", "lr_multiplier": 2},)
            )
        )


def test_a_group_that_says_nothing_is_an_error():
    _, problems = validate(
        {"parameter_groups": [{"names": "*norm*"}, {"names": "*", "lr_multiplier": 0}]}
    )
    assert "trainer.parameter_groups[1].lr_multiplier" in str(problems[0])
    _, problems = validate({"parameter_groups": [{"names": "*norm*"}]})
    shows(problems[0], "lr_multiplier", "weight_decay")
