"""`trainer.compile`: the same training as one process, and a sentence where it can't be."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.commands import run, write_job
from tests.support.layouts import LAYOUTS, by_engine
from tests.support.messages import raises
from tests.support.parallel.compiled import Linear, Watched, machine_of, own
from tests.support.training import (
    Case,
    assert_same,
    layout_of,
    spec_of,
    task_of,
    train_by_engine,
    train_plainly,
)
from trainer.config import RuntimeFacts, load
from trainer.engines import ENGINES
from trainer.errors import ConfigError
from trainer.parallel import compilation, float8
from trainer.run.compose import compose

CPU = torch.device("cpu")
LORA = Case(zero_stage=3, adapter={"r": 4, "dropout": 0.1})
LAID_OUT = {
    name: LAYOUTS[name]
    for name in (
        *("ddp", "ddp, gpt2, full", "zero2", "zero2, gpt2, every 2", "zero3"),
        *("zero3, gpt2, full", "zero3, gpt2, selective", "hsdp, zero3, gpt2, selective"),
        *("zero3, all on the host", "pipeline", "pipeline, gpt2, full", "pipeline, selective"),
        *("pipeline, Interleaved1F1B", "pipeline x zero3", "tensor", "tensor, qwen3"),
        *("tensor x zero2, gpt_neox, selective", "tensor x zero3, qwen3, full"),
        *("pipeline x tensor", "tensor x zero2, sequence, qwen3, selective", "context"),
        *("experts, shared", "experts over four, full", "context x experts", "pipeline x experts"),
    )
}
LAID_OUT["context, selective"] = replace(LAYOUTS["context"], recompute="selective")
LAID_OUT["zero3, lora"] = LORA
LAID_OUT["zero2, lora"] = replace(LORA, zero_stage=2)
LAID_OUT["one rank, tiled"] = Case(world_size=1, tile=8, recompute="selective")
WHOLE = ("ddp", "zero2", "one rank")
"""What DeepSpeed compiles: whole blocks, whose weights are there."""
CASES = {
    name: replace(case, compile="blocks")
    for name, case in by_engine(LAID_OUT).items()
    if case.engine != "deepspeed" or name.removeprefix("deepspeed-").startswith(WHOLE)
}
KERNELS = {
    f"mesh-{name}, kernels": replace(
        LAYOUTS[name], engine="mesh", compile="blocks", compiler="inductor"
    )
    for name in (
        *("zero3, gpt2, full", "zero3, gpt2, selective", "tensor", "context"),
        *("tensor x zero2, sequence, qwen3, selective", "experts, shared"),
    )
}
KERNELS["deepspeed-zero2, kernels"] = replace(
    LAYOUTS["zero2"], engine="deepspeed", compile="blocks", compiler="inductor"
)


@pytest.mark.more
@pytest.mark.parametrize("name", CASES | KERNELS)
def test_compiled_blocks_train_as_one_process_does(pools, name):
    case = (CASES | KERNELS)[name]
    reference = train_plainly(case)
    for outcome in pools[case.world_size].run(train_by_engine, case=case):
        assert_same(outcome, reference, 2e-6)


def parts_that_run_compiled(case: Case) -> list[str]:
    """Return the compiled parts of the first block after a step. Runs on each rank of a pool."""
    import torch.distributed as dist

    from tests.support.training import build, collated, data_rank_of, shares, spec_in, task_of
    from trainer.optim.lr_schedules import Update

    rank = dist.get_rank()
    engine = build(case, rank)
    rows = shares(case, 0, data_rank_of(case, rank))
    engine.step(0, [collated(task_of(spec_in(case), case), row) for row in rows], Update(1e-2))
    named = [pair for module in engine.modules for pair in module.named_modules()]
    forwards = {name: vars(module).get("forward") for name, module in named}
    engine.close()
    return [
        name.partition("layers.0.")[2]
        for name, forward in forwards.items()
        if isinstance(forward, compilation._Compiled)
        and "layers.0" in name
        and forward._run is not forward._function
    ]


def test_a_block_is_compiled_around_the_experts_that_ranks_divide(pools):
    case = replace(LAYOUTS["experts, shared"], engine="mesh", compile="blocks")
    for names in pools[case.world_size].run(parts_that_run_compiled, case=case):
        assert {"self_attn", "input_layernorm", "mlp.shared_expert"} < set(names)
        assert "mlp" not in names and "mlp.experts" not in names


def test_a_compiled_loss_trains_as_one_process_does(pools):
    """Where ZeRO-3 of DeepSpeed has its hooks in the blocks, which are not compiled."""
    case = Case(engine="deepspeed", zero_stage=3, compile="loss")
    reference = train_plainly(case)
    for outcome in pools[case.world_size].run(train_by_engine, case=case):
        assert_same(outcome, reference, 2e-6)


def gradient_of_the_loss(lengths: list[int]) -> torch.Tensor:
    """Return the gradient of the last of some hidden states, after those of the others."""
    model = {"vocab_size": 151_936, "hidden_size": 16, "num_attention_heads": 2}
    spec = spec_of({"model_type": "llama", "num_hidden_layers": 1, **model})
    torch._dynamo.reset()
    torch.set_num_threads(2)  # the order of a sum over logits is that of the threads
    head = task_of(spec).prepare(spec.build()).to_empty(device="cpu").get_output_embeddings()
    torch.nn.init.normal_(head.weight, generator=torch.Generator().manual_seed(0))
    compilation.apply(head, spec, blocks=False)
    for length in lengths:
        torch.manual_seed(length)
        hidden = torch.randn(length, 16, requires_grad=True)
        head(hidden, torch.randint(0, 151_936, (length,))).backward()
    torch.set_num_threads(1)
    assert hidden.grad is not None
    return hidden.grad


def test_a_compiled_loss_is_the_same_whatever_lengths_came_before(pools):
    """A resumed run begins with another length than the whole run, and has the same bits."""
    [alone], [after_another] = (
        pools[1].run(gradient_of_the_loss, lengths=lengths) for lengths in ([24], [40, 24])
    )
    assert torch.equal(alone, after_another)


@pytest.mark.parametrize(
    ("engine", "case", "words"),
    [
        ("deepspeed", Case(compile="blocks", zero_stage=3), "hooks"),
        ("deepspeed", replace(LAYOUTS["tensor"], compile="blocks"), "mesh"),
        ("deepspeed", Case(compile="blocks", recompute="offload"), "offload"),
        ("mesh", Case(compile="blocks", recompute="offload"), "offload"),
        ("accelerate", Case(compile="blocks", recompute="offload"), "offload"),
        (
            "mesh",
            replace(LAYOUTS["pipeline, InterleavedZeroBubble"], compile="blocks"),
            "waits for 11%",  # 1 of 2 x 4 + 1
        ),
        ("mesh", replace(LAYOUTS["experts, hsdp, selective"], compile="blocks"), "selective"),
        ("mesh", replace(LAYOUTS["tensor x experts"], compile="blocks"), "tensor"),
        ("deepspeed", replace(LAYOUTS["experts"], compile="blocks"), "expert parallelism"),
    ],
)
def test_what_is_not_compiled_is_refused_in_a_sentence(engine, case, words):
    layout = layout_of(case)
    assert words in (ENGINES[engine].refusal(layout) or "")
    assert ENGINES[engine].refusal(replace(layout, compile="auto")) is None


def test_the_watchdog_gives_a_graph_ten_minutes():
    watched = Watched()
    reports = compilation.Reports(machine_of(watched))
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    reports.close()
    assert watched.moved == [600.0, 0.0]
    torch.compile(lambda x: x + 2, backend="eager")(torch.ones(2))
    assert len(watched.moved) == 2


def test_a_recompilation_too_many_is_said_once(monkeypatch):
    watched = Watched()
    reports = compilation.Reports(machine_of(watched))
    monkeypatch.setattr(compilation, "BACKEND", "eager")
    torch.compiler.reset()
    spec = own(Linear)
    model = spec.build().to_empty(device="cpu")
    compilation.apply(model, spec)
    with torch._dynamo.config.patch(recompile_limit=2, automatic_dynamic_shapes=False):
        for rows in range(2, 8):
            assert model(torch.ones(rows, 4)).shape == (rows, 4)
    reports.close()
    [line] = [line for line in watched.lines if "uncompiled" in line]
    assert "more variants" in line


@pytest.mark.parametrize(
    "words",
    [
        ["trainer.compile=blocks", "zero_optimization.stage=3"],
        ["trainer.float8=rowwise", "bf16.enabled=true"],
    ],
    ids=["compile", "float8"],
)
def test_auto_chooses_an_engine_that_has_what_the_config_asks_for(tmp_path, monkeypatch, words):
    monkeypatch.setattr(float8, "installed", lambda package: True)
    facts = RuntimeFacts(2, 32, 3, True, "cuda", 2)
    path = write_job(tmp_path)
    assert compose(load(path, []), facts).engine()[0] == "deepspeed"
    assert compose(load(path, words), facts).engine()[0] == "accelerate"
    with pytest.raises(ConfigError, match="engine deepspeed"):
        compose(load(path, [*words, "trainer.engine=deepspeed"]), facts).engine()


@pytest.mark.more
def test_a_compiler_that_is_missing_is_a_sentence(monkeypatch):
    def no_compiler(*_: Any) -> None:
        raise RuntimeError("No working C++ compiler found")

    monkeypatch.setattr(compilation, "BACKEND", no_compiler)
    layout = layout_of(Case(compile="blocks"))
    with raises(ConfigError, "working C++"):
        compilation.check_compiler(layout, CPU)
    compilation.check_compiler(replace(layout, compile="auto"), CPU)


@pytest.mark.more
def test_a_run_without_a_compiler_ends_with_the_sentence(tmp_path):
    words = "--config", write_job(tmp_path), "trainer.compile=blocks"
    kept = str(tmp_path / "graphs")
    result = run(
        "meshloom", "train", *words, cold=True, CXX="/no/compiler", TORCHINDUCTOR_CACHE_DIR=kept
    )
    assert result.code == 64, result.output
    assert "trainer.compile" in result.output and "Traceback" not in result.output


@pytest.mark.more
def test_a_run_compiles_its_blocks_and_says_where_graphs_are_kept(tmp_path):
    words = "--config", write_job(tmp_path), "trainer.compile=blocks"
    kept = tmp_path / "graphs"
    result = run("meshloom", "train", *words, TORCHINDUCTOR_CACHE_DIR=str(kept))
    assert result.code == 0, result.output
    assert f"kept in {kept} (TORCHINDUCTOR_CACHE_DIR)" in result.output
    assert "uncompiled" not in result.output and "compiled blocks" in result.output
    assert [*kept.rglob("*.so")]


@pytest.mark.more
def test_a_run_is_certified_with_compiled_blocks(tmp_path):
    config = write_job(tmp_path)
    result = run("meshloom", "verify", "--config", config, "--compile", "trainer.engine=mesh")
    assert result.code == 0, result.output
    assert "compiled blocks (engine mesh)" in result.output


@pytest.mark.first("auto")
@pytest.mark.parametrize("value", ["blocks", "auto"])
def test_a_plan_compiles_nothing(tmp_path, value):
    words = "--config", write_job(tmp_path), "--gpus", "2", f"trainer.compile={value}"
    result = run("meshloom", "plan", *words, "trainer.engine=mesh")
    assert result.code == 0, result.output
    assert ("with uncompiled blocks" in result.output) == (value == "blocks")
