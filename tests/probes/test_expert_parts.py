"""Whether experts can be spread over ranks: what is unsupported, and a planted fault."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest

from tests.support.conformance.sweep import NEEDED, families
from tests.support.layouts import EXPERTS, SHARED, TIED, family
from tests.support.messages import shows
from tests.support.parallel.routed import DEEPSEEK, GPT_OSS, SPREAD
from tests.support.training import layout_of, spec_in
from trainer.errors import ConfigError
from trainer.models.names import expert_stacks
from trainer.parallel.probes import expert_parts
from trainer.parallel.splits import expert_ranks


def checked(model: dict[str, Any], **axes: Any) -> str:
    """Return why the experts of a model can't be divided; empty if they can."""
    case = replace(SPREAD, model=model, **axes)
    try:
        expert_parts.check(spec_in(case), layout_of(case))
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.first("qwen3_moe")
@pytest.mark.parametrize(
    "model",
    [EXPERTS, SHARED, DEEPSEEK, GPT_OSS, family("mixtral", num_local_experts=4)],
    ids=["qwen3_moe", "shared experts", "deepseek_v3", "gpt_oss", "mixtral"],
)
def test_experts_are_divided(model):
    assert checked(model) == ""


@pytest.mark.whole
def test_nearly_every_family_with_experts_is_accepted():
    """The numbers of docs/experts.md; a family without experts, or that is no decoder, is none."""
    results = {}
    for name in families():
        case = replace(SPREAD, model={"model_type": name, **NEEDED.get(name, {})})
        with contextlib.suppress(ConfigError):
            spec = spec_in(case)
            if expert_stacks(spec.build(), spec.blocks):
                results[name] = checked(case.model)
    refused = {name for name, reason in results.items() if reason}
    assert (len(results), refused) == (56, {"flex_olmo", "laguna"})  # 7 experts; no tiny copy runs


@pytest.mark.parametrize(
    ("model", "axes", "keys"),
    [
        (TIED, {}, ("no layer", "in one module", "a mixture of experts")),
        (
            EXPERTS | {"num_experts": 6},
            {"world_size": 4, "expert": 4},
            ("6 experts = 1 x 4 + 2", "expected a multiple of 4"),
        ),
    ],
    ids=["dense", "number"],
)
def test_a_model_is_refused_with_the_reason(model, axes, keys):
    result = checked(model, **axes)
    assert result.startswith("expert_parallel.autoep_size: ")
    shows(result, *keys, "Remove expert_parallel")


def test_what_is_computed_otherwise_is_found():
    lost = expert_ranks._routed
    with patch.object(expert_ranks, "_routed", lambda *given: lost(*given) * 0.5):
        result = checked(EXPERTS)
    shows(result, "model.layers.*.mlp.experts computes something")
