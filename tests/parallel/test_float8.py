"""float8 products, emulated on the CPU: against torchao in one process, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.support.commands import run, write_job
from tests.support.messages import raises
from tests.support.training import (
    LLAMA,
    Case,
    assert_same,
    layout_of,
    resume_by_engine,
    spec_in,
    spec_of,
    train_by_engine,
    train_plainly,
)
from trainer.engines.deepspeed.engine import KIND as DEEPSPEED
from trainer.engines.torch.mesh import refusal
from trainer.errors import ConfigError
from trainer.parallel import float8
from trainer.storage import installed

needs_torchao = pytest.mark.skipif(not installed("torchao"), reason="torchao is not installed")
CASE = Case("mesh", zero_stage=3, float8="tensorwise")


def small(run: Callable[..., Any], **arguments: Any) -> Any:
    """Run with layers of any multiple of 16 in float8. Runs on each rank of a pool."""
    with patch.object(float8, "LEAST", 16):
        return run(**arguments)


def plainly(case: Case) -> Any:
    """Train in one process with the blocks' layers as torchao converts them."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    from trainer.models import materialise

    given = materialise.materialise
    config = Float8LinearConfig.from_recipe_name(case.float8)

    def converted(model: Any, *more: Any, **named: Any) -> None:
        given(model, *more, **named)
        convert_to_float8_training(
            model,
            config=replace(config, emulate=True),
            module_filter_fn=lambda module, name: ".layers." in name,
        )

    with patch.object(materialise, "materialise", converted):
        return train_plainly(case)


@needs_torchao
@pytest.mark.parametrize("kind", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("name", ["mesh", "accelerate"])
def test_trains_as_torchao_does_in_one_process(pools, name, kind):
    """Within 2 in a thousand: a last bit of float32 may decide how a factor is rounded."""
    case = replace(CASE, engine=name, float8=kind)
    reference = plainly(case)
    exact = train_plainly(case)
    assert max(abs(a - b) for a, b in zip(reference.losses, exact.losses, strict=True)) > 1e-4
    for outcome in pools[2].run(small, run=train_by_engine, case=case):
        assert_same(outcome, reference, 2e-3)


@needs_torchao
def test_a_checkpoint_goes_on_bit_for_bit(pools, tmp_path: Path) -> None:
    cases = {"before": CASE, "after": CASE}
    for losses, weights in pools[2].run(small, run=resume_by_engine, **cases, folder=tmp_path):
        assert losses[0] == losses[1]
        assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[1])


@needs_torchao
@pytest.mark.more
@pytest.mark.parametrize("sequence", [False, True])
def test_split_layers_compute_the_same_compiled(pools, sequence):
    more = {"tensor_parallel": {"sequence_parallel": True}} if sequence else {}
    model = LLAMA | {"attention_dropout": 0.0, "num_hidden_layers": 1}
    split = replace(CASE, float8="rowwise", tensor=2, zero_stage=2, model=model, more=more)
    cases = split, replace(split, compile="blocks"), replace(split, float8="none")
    here, compiled, plain = (pools[2].run(small, run=train_by_engine, case=case) for case in cases)
    assert here[0].losses != plain[0].losses
    assert_same(compiled[0], here[0], 2e-3)


def test_what_cannot_have_it_is_refused() -> None:
    assert refusal(layout_of(replace(CASE, float8="none"))) is None
    with patch.object(float8, "installed", lambda package: False):
        assert "pip install 'meshloom[float8]'" in str(refusal(layout_of(CASE)))
    with patch.object(float8, "installed", lambda package: True):
        assert refusal(layout_of(CASE)) is None
        for case in (replace(CASE, zero_stage=0), replace(CASE, offload_optimizer="cpu")):
            assert "that ZeRO shards" in str(refusal(layout_of(case)))
        split = replace(CASE, world_size=4, tensor=2)
        assert "rowwise" in str(refusal(layout_of(split)))
        assert refusal(layout_of(replace(split, float8="rowwise"))) is None
    assert "the mesh engine does" in str(DEEPSPEED.refusal(layout_of(CASE)))


def test_weights_that_ranks_share_unevenly_are_refused_where_they_are_gathered_in_float8() -> None:
    """gloo ended the process, and NCCL would gather too much or too little."""
    spec, three = spec_of(LLAMA), replace(layout_of(CASE), shard=3)
    with patch.object(float8, "LEAST", 16):
        with raises(ConfigError, "32 rows", "3 ranks", "rowwise"):
            float8.check(spec, three)
        float8.check(spec, replace(three, float8="rowwise"))
        float8.check(spec, layout_of(CASE))


SPLIT = "tensor_parallel.autotp_size=2", "trainer.model.config.attention_dropout=0"


@needs_torchao
@pytest.mark.more
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("tensorwise", ()),
        ("rowwise", ()),
        ("rowwise", SPLIT),
        ("rowwise", (*SPLIT, "tensor_parallel.sequence_parallel=true")),
    ],
    ids=["tensorwise", "rowwise", "tensor", "sequence"],
)
def test_it_is_certified(tmp_path: Path, kind: str, words: tuple[str, ...]) -> None:
    """Beside torchao in one process; the tolerance is for a factor on the edge of a rounding."""
    words = "--config", write_job(tmp_path), "trainer.engine=mesh", f"trainer.float8={kind}", *words
    result = run("meshloom", "verify", *words, "--output", tmp_path / "certificate.json")
    assert result.code == 0, result.output
    assert "float8 emulated" in result.output and f"float8 {kind}" in result.output


def test_a_model_without_large_layers_is_refused_and_small_ones_stay() -> None:
    spec = spec_of({**LLAMA, "num_hidden_layers": 1})
    with raises(ConfigError, "trained linear"):
        float8.check(spec, layout_of(CASE))
    lora = replace(CASE, adapter={"r": 4})
    with patch.object(float8, "LEAST", 16), pytest.raises(ConfigError, match="expected trained"):
        float8.check(spec_in(lora, None), layout_of(lora))
    with patch.object(float8, "LEAST", 32):
        result = float8.layers(spec.build(), spec, layout_of(CASE))
    names = {name.rpartition(".")[2] for name in result}
    assert names == {"q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    with patch.object(float8, "LEAST", 16):  # no part of another is a multiple
        split = layout_of(replace(CASE, world_size=4, tensor=2, float8="rowwise"))
        result = float8.layers(spec.build(), spec, split)
    names = {name.rpartition(".")[2] for name in result}
    assert names == {"q_proj", "o_proj"}
