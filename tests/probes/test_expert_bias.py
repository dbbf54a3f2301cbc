"""Whether the biases of routers choose the experts: models that have none, and planted faults."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch

from tests.support.layouts import EXPERTS
from tests.support.messages import raises
from tests.support.parallel.balanced import ERNIE, GLM, MINIMAX, ONE
from tests.support.probing import ask_about
from tests.support.training import spec_in
from trainer.errors import ConfigError
from trainer.models.spec import ModelSpec
from trainer.parallel.probes import expert_bias
from trainer.parallel.splits.expert_loads import biases_of
from trainer.recipes.causal_lm.task import CausalLM


def check(spec: ModelSpec) -> None:
    """Ask whether its biases choose the experts."""
    ask_about(expert_bias.QUESTION, spec, CausalLM.of(spec), router_bias_rate=0.05)


@pytest.mark.parametrize(
    ("model", "change", "keys"),
    [
        (EXPERTS, {}, ("it has none", "chooses experts")),
        (GLM, {"adapter": {"r": 4}}, ("it has none",)),
        (ERNIE, {"freeze": ("*e_score_correction_bias",)}, ("it has none",)),
    ],
    ids=["without one", "of an adapter's base", "frozen"],
)
def test_a_model_without_a_bias_to_move_is_refused(model, change, keys):
    spec = spec_in(replace(ONE, model=model, **change))
    with raises(ConfigError, "router_bias_update_rate: ", *keys):
        check(spec)


@pytest.mark.parametrize("model", [GLM, ERNIE, MINIMAX], ids=lambda model: model["model_type"])
def test_a_bias_is_found_for_each_layer_with_experts_and_decides(model):
    spec = spec_in(replace(ONE, model=model))
    result = biases_of(spec)
    assert len(result) == (3 if model is MINIMAX else 2)
    assert all(name.endswith("e_score_correction_bias") for name in result.values())
    check(spec)


def test_a_bias_that_does_not_decide_is_refused():
    topk, refused = torch.topk, raises(ConfigError, "decide which experts")
    with mock.patch("torch.topk", lambda scores, k, **_: topk(-scores, k)), refused:
        check(spec_in(replace(ONE, model=MINIMAX)))
