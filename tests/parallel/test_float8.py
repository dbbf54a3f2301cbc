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
from trainer.certify.patches import loss_in_chunks
from trainer.engines.deepspeed.engine import KIND as DEEPSPEED
from trainer.engines.torch.mesh import refusal
from trainer.errors import ConfigError
from trainer.parallel import float8
from trainer.storage import installed
from trainer.tasks.losses.cross_entropy import (
    LossOptions,
    linear_cross_entropy,
    linear_measured,
)

needs_torchao = pytest.mark.skipif(not installed("torchao"), reason="torchao is not installed")
CASE = Case("mesh", zero_stage=3, float8="tensorwise")
EVEN = LLAMA | {"vocab_size": 64}
HEAD = replace(CASE, float8="rowwise", float8_head=True, model=EVEN)
CHUNK = 16 * 64 * 4
"""The bytes of the logits of 16 tokens: half of the width, the fewest of a chunk."""


def small(run: Callable[..., Any], **arguments: Any) -> Any:
    """Run with layers of any multiple of 16 in float8. Runs on each rank of a pool."""
    with patch.object(float8, "LEAST", 16), loss_in_chunks(CHUNK):
        return run(**arguments)


def plainly(case: Case) -> Any:
    """Train in one process with the blocks' layers, and the head, as torchao converts them."""
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
        recipe = Float8LinearConfig.from_recipe_name("rowwise_with_gw_hp")
        convert_to_float8_training(
            model,
            config=replace(recipe, emulate=True, round_scales_to_power_of_2=False),
            module_filter_fn=lambda module, name: case.float8_head and name == "lm_head",
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
@pytest.mark.parametrize(
    ("engine", "stage", "changes"),
    [
        ("mesh", 1, {}),
        ("mesh", 2, {"model": EVEN | {"tie_word_embeddings": True}}),
        ("mesh", 3, {"float8": "tensorwise"}),
        ("mesh", 3, {"freeze": ("lm_head.*",)}),
        ("accelerate", 3, {}),
        ("mesh", 2, {"precision": "bfloat16"}),
    ],
    ids=["ZeRO-1", "tied", "tensorwise", "frozen", "accelerate", "bfloat16"],
)
def test_a_head_in_float8_trains_as_torchaos_does_whatever_the_chunks(
    pools, engine, stage, changes
):
    """One process has all tokens of a micro-batch in one product."""
    case = replace(HEAD, engine=engine, zero_stage=stage, **changes)
    low = case.precision != "float32"
    reference = plainly(replace(case, precision="float32"))
    without = plainly(replace(case, precision="float32", float8_head=False))
    assert max(abs(a - b) for a, b in zip(reference.losses, without.losses, strict=True)) > 1e-4
    for outcome in pools[2].run(small, run=train_by_engine, case=case):
        assert_same(outcome, reference, 2e-2 if low else 2e-3)


@needs_torchao
@pytest.mark.parametrize(
    "compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.more)]
)
def test_a_head_computes_the_same_compiled(pools, compiler):
    compiled = replace(HEAD, compile="loss", compiler=compiler)
    [here, other] = [
        pools[1].run(small, run=train_by_engine, case=replace(case, world_size=1))[0]
        for case in (HEAD, compiled)
    ]
    assert_same(other, here, 2e-3)


@needs_torchao
def test_the_numbers_of_a_head_do_not_depend_on_the_chunks_and_its_matrix_is_cast_once() -> None:
    cast = float8.head_cast(emulate=True)
    casts = list[str]()

    def counted(name: str) -> Any:
        def made(weight: torch.Tensor) -> torch.Tensor:
            casts.append(name)
            return getattr(cast, name)(weight)

        return made

    counting = replace(cast, by_row=counted("by_row"), as_one=counted("as_one"))
    weight, hidden = torch.randn(64, 32), torch.randn(40, 32, requires_grad=True)
    results = []
    for size in (CHUNK, 4 * CHUNK):
        with loss_in_chunks(size):
            loss = linear_cross_entropy(
                hidden, weight, None, torch.arange(40), LossOptions(cast=counting)
            )
            [gradient] = torch.autograd.grad(loss, hidden)
        results.append((loss.detach(), gradient))
    assert casts == ["by_row", "as_one"] * 2
    for parts, whole in zip(*results, strict=True):
        torch.testing.assert_close(parts, whole, rtol=1e-5, atol=1e-6)
    plain = linear_cross_entropy(hidden.detach(), weight, None, torch.arange(40))
    assert 1e-4 < float(abs(results[0][0] / plain - 1)) < 0.1
    with torch.no_grad():
        measured, _ = linear_measured(hidden, weight, None, torch.arange(40), counting)
    torch.testing.assert_close(measured, results[0][0])
    assert casts[4:] == ["by_row"]


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
        head = replace(split, float8="rowwise", float8_head=True)
        assert "splits the vocabulary" in str(refusal(layout_of(head)))
        assert refusal(layout_of(HEAD)) is None
    assert "the mesh engine does" in str(DEEPSPEED.refusal(layout_of(CASE)))


def test_weights_that_ranks_share_unevenly_are_refused_where_they_are_gathered_in_float8() -> None:
    """gloo ended the process, and NCCL would gather too much or too little."""
    spec, three = spec_of(LLAMA), replace(layout_of(CASE), shard=3)
    with patch.object(float8, "LEAST", 16):
        with raises(ConfigError, "32 rows", "3 ranks", "rowwise"):
            float8.check(spec, three)
        float8.check(spec, replace(three, float8="rowwise"))
        float8.check(spec, layout_of(CASE))


def test_a_head_that_cannot_multiply_in_float8_is_refused() -> None:
    layout = layout_of(HEAD)
    with patch.object(float8, "LEAST", 16):
        float8.check(spec_of(EVEN), layout)
        with raises(ConfigError, "trainer.float8_head", "vocabulary of 61", "multiples of 16"):
            float8.check(spec_of(LLAMA), layout)
        capped = spec_of(EVEN | {"model_type": "gemma2", "final_logit_softcapping": 30.0})
        with raises(ConfigError, "trainer.float8_head", "logits are more"):
            float8.check(capped, layout)


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
        ("rowwise", ("trainer.float8_head=true",)),
        ("tensorwise", ("trainer.float8_head=true", "bf16.enabled=true", "--precision", "config")),
    ],
    ids=["tensorwise", "rowwise", "tensor", "sequence", "head", "head in bfloat16"],
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
