"""The parity certificate: it passes for what is right, and catches and names every planted
fault.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.certify.certifying import BALANCED, DEEPSEEK, MISTRAL, SPREAD, certified, config
from tests.support.certify.faults import (
    attention,
    documents,
    experts,
    gradients,
    randomness,
    samples,
    saving,
    updates,
)
from tests.support.commands import ROOT, run
from tests.support.messages import shows
from tests.support.training import GPT2
from trainer.certify.tiny_run import smallest_world, tiny_run
from trainer.errors import ConfigError
from trainer.parallel import checks
from trainer.supervise.world import environment_of, free_port

CONFIGS = sorted((ROOT / "ds_configs").glob("*.json"))
QWEN3 = {"model_type": "qwen3", "num_hidden_layers": 2, "tie_word_embeddings": True}
TABLE = "transformer.wte.weight"


@dataclass(frozen=True)
class Planted:
    """Where a fault is planted, and what the certificate is to say of it."""

    engine: str
    stage: int
    check: str
    where: str = ""
    step: int = 0
    rank: int = 0
    size: int = 2
    trainer: dict[str, Any] = field(default_factory=dict)


STAGES = {"stages": 2}
BIAS = "mlp.gate.e_score_correction_bias"
TENSOR = {"tensor": 2, "model": {"config": QWEN3}}
LARGE = {"model": {"config": GPT2 | {"vocab_size": 5000, "n_positions": 128}}}
LLAMA = {
    "model": {"config": {"model_type": "llama", "num_hidden_layers": 4, "num_key_value_heads": 2}}
}
ROWS = {"context": 2, **LLAMA}
ONE_HEAD = MISTRAL | {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 1}
OF_ROWS = {
    attention.kv_heads_of_the_neighbour: ("output", 0, {}),
    attention.keys_in_the_order_of_groups: (
        "output",
        0,
        {"model": {"config": ONE_HEAD | {"num_key_value_heads": 1}}},
    ),
    attention.positions_of_each_rank: ("output", 1, {}),
    attention.window_within_a_rank: ("output", 1, {"model": {"config": MISTRAL}}),
    attention.border_of_documents_ignored: ("output", 1, {"data": {"documents": "pack"}}),
    attention.weighed_by_its_own_targets: ("gradient", 0, {}),
}
"""The check that finds it, the first rank, and more of the config."""
LFM2 = {
    **{"model_type": "lfm2", "num_hidden_layers": 3, "vocab_size": 61},
    "layer_types": ["conv", "full_attention", "conv"],
}
MAMBA2 = {"model_type": "mamba2", "num_hidden_layers": 2, "vocab_size": 61}
PACKED = {"data": {"documents": "pack"}}
OF_DOCUMENTS: dict[Callable[[str], Any], Planted] = {
    documents.state_reset_at_a_ranks_border: Planted(
        "mesh", 2, "output", "model.layers.0.conv", rank=1, trainer={"model": {"config": LFM2}}
    ),
    documents.border_ignored_on_the_second_rank: Planted(
        "deepspeed",
        2,
        "output",
        "model.layers.0.conv",
        step=1,
        rank=1,
        trainer={"model": {"config": LFM2}, **PACKED},
    ),
    documents.gradient_of_the_state_not_sent_back: Planted(
        "mesh", 3, "gradient", "backbone.layers.1.norm", trainer={"model": {"config": MAMBA2}}
    ),
    documents.tokens_of_one_place_later: Planted(
        "accelerate", 2, "output", "model.layers.0.conv", trainer={"model": {"config": LFM2}}
    ),
}
"""Faults of layers with state, whose tokens two ranks share."""
PLACES = {"output": "model.layers.0.self_attn.o_proj", "gradient": "lm_head.weight"}

FAULTS: dict[Callable[[str], Any], Planted] = {
    **{
        fault: Planted("mesh", 2, check, PLACES[check], rank=rank, trainer=ROWS | more)
        for fault, (check, rank, more) in OF_ROWS.items()
    },
    gradients.scaled_by_accumulation: Planted("deepspeed", 2, "gradient", "transformer.ln_f.bias"),
    gradients.dropped_micro_batch: Planted("deepspeed", 3, "output"),
    updates.wrong_rate: Planted("deepspeed", 1, "update", TABLE, step=2),
    gradients.lost_reduction: Planted("mesh", 0, "gradient", "transformer.ln_f.bias"),
    gradients.norm_of_one_rank: Planted("mesh", 3, "norm"),
    gradients.untied_embedding: Planted("mesh", 0, "initial", "lm_head.weight (only here)"),
    gradients.dropout_not_replayed: Planted(
        "mesh", 2, "gradient", trainer={"activation_checkpointing": "full"}
    ),
    gradients.norm_of_one_stage: Planted("mesh", 1, "norm", trainer=STAGES),
    gradients.tied_tables_apart: Planted("mesh", 0, "gradient", TABLE, trainer=STAGES),
    gradients.tied_tables_of_pipeline_module_apart: Planted(
        "deepspeed", 1, "gradient", TABLE, trainer=STAGES
    ),
    gradients.tied_table_counted_twice: Planted("deepspeed", 0, "norm", trainer=STAGES),
    gradients.part_of_a_norms_gradient: Planted(
        "mesh", 2, "gradient", "model.layers.1.self_attn.k_norm.weight", trainer=TENSOR
    ),
    gradients.replicated_counted_twice: Planted("mesh", 2, "norm", trainer=TENSOR),
    gradients.zero_bubble_with_resharding: Planted(
        "mesh", 2, "gradient", trainer={**STAGES, "pipeline_schedule": "ZBVZeroBubble"}
    ),
    updates.schedule_a_step_early: Planted("mesh", 2, "update", TABLE, step=1),
    updates.decayed_norms: Planted("mesh", 2, "update", "transformer.h.0.ln_1.weight", step=2),
    updates.clipped_by_one_rank: Planted("mesh", 2, "moment", TABLE, step=2),  # the first over it
    samples.shifted_targets: Planted("mesh", 2, "loss"),
    samples.padding_counted: Planted("mesh", 2, "loss"),
    samples.truncated_sample: Planted("mesh", 2, "output"),
    samples.later_token_as_input: Planted("mesh", 2, "output"),
    samples.samples_of_another_rank: Planted("mesh", 2, "output", rank=1),
    samples.samples_in_the_order_of_epoch_0: Planted("mesh", 2, "output", step=1),
    samples.last_chunk_dropped: Planted("mesh", 2, "loss"),
    gradients.accumulation_not_divided: Planted("mesh", 2, "gradient", "transformer.ln_f.bias"),
    samples.means_of_means: Planted("mesh", 2, "held-out loss", step=3),
    randomness.same_dropout_on_all_ranks: Planted("mesh", 2, "output", rank=1),
    randomness.same_dropout_in_each_step: Planted("mesh", 2, "output", step=1),
    randomness.same_dropout_in_each_micro_batch: Planted("mesh", 2, "output"),
    randomness.dropout_while_evaluating: Planted("mesh", 2, "held-out loss", step=3),
    saving.moments_not_loaded: Planted("mesh", 2, "loaded state", f"{TABLE} (exp_avg)", step=4),
    saving.step_count_not_loaded: Planted("mesh", 2, "loaded state", "step", step=4),
    saving.stale_weight_saved: Planted(
        "mesh", 2, "loaded state", "transformer.h.1.mlp.c_fc.weight", step=4
    ),
    saving.buffers_not_saved: Planted(
        "mesh",
        2,
        "initial",
        "e_score_correction_bias (only in one process)",
        trainer={"model": {"config": DEEPSEEK}},
    ),
    gradients.tied_gradient_halved: Planted("mesh", 1, "gradient", TABLE, trainer=STAGES),
    gradients.third_micro_batch_dropped: Planted("mesh", 2, "output"),
    gradients.gradient_of_rank_2_lost: Planted("mesh", 2, "gradient", size=3),
    gradients.mean_over_the_other_axis: Planted(
        "mesh", 3, "gradient", size=6, trainer={"mesh": {"replicate": 2, "shard": -1}}
    ),
    samples.ids_of_ten_bits: Planted("mesh", 2, "output", trainer=LARGE),
    samples.rows_of_64: Planted("mesh", 2, "output", step=1, rank=1, trainer=LARGE),
    attention.window_of_one_more: Planted(
        "mesh", 2, "output", trainer={"model": {"config": MISTRAL}}
    ),
    updates.schedule_wrong_after_step_10: Planted(
        "mesh", 2, "schedule", "(0.00099 in place of 0.001)", step=11
    ),
    updates.never_clipped: Planted("mesh", 2, "moment", trainer=LARGE),
    updates.scaled_up_to_the_limit: Planted("mesh", 2, "moment", step=1, trainer=LARGE),
    updates.overflow_applied: Planted("mesh", 2, "overflow", TABLE, step=6),
    attention.wrong_kv_head: Planted(
        "mesh", 2, "output", "model.layers.1.self_attn.k_proj, micro-batch 0", trainer=LLAMA
    ),
    attention.rotary_embedding_of_the_last_stage: Planted(
        "mesh",
        1,
        "output",
        "model.layers.2.self_attn.o_proj, micro-batch 0",
        rank=1,
        trainer={**LLAMA, **STAGES},
    ),
    attention.unscaled_attention: Planted(
        "deepspeed", 3, "output", "transformer.h.1.attn, micro-batch 0"
    ),
    updates.overflow_applied_by_deepspeed: Planted("deepspeed", 2, "overflow", TABLE, step=6),
    samples.accuracy_of_the_next_target: Planted("mesh", 2, "accuracy", step=3),
    samples.tokens_of_one_rank_logged: Planted("mesh", 2, "counts"),
    experts.experts_divided_by_their_own_ranks: Planted(
        "mesh", 3, "gradient", "experts", trainer=SPREAD
    ),
    experts.replicas_of_experts_left_out: Planted(
        "mesh", 2, "gradient", "experts", size=4, trainer=SPREAD | {"mesh": {"replicate": 2}}
    ),
    experts.loads_of_one_rank: Planted("mesh", 2, "update", BIAS, trainer=BALANCED),
    experts.padding_in_the_loads: Planted("mesh", 2, "update", BIAS, trainer=BALANCED),
    experts.biases_moved_by_an_overflow: Planted(
        "mesh", 2, "overflow", BIAS, step=6, trainer=BALANCED
    ),
    experts.rows_of_the_next_expert: Planted("mesh", 2, "output", "mlp", trainer=SPREAD),
    **{
        fault: replace(planted, trainer={"context": 2, **planted.trainer})
        for fault, planted in OF_DOCUMENTS.items()
    },
}


@pytest.fixture(scope="module")
def sound() -> dict[str, str]:
    """The configs that were seen to pass without a fault."""
    return {}


OF_A_KIND = {
    gradients.norm_of_one_stage,
    gradients.tied_table_counted_twice,
    gradients.replicated_counted_twice,
    gradients.dropped_micro_batch,
    samples.padding_counted,
    samples.later_token_as_input,
    samples.samples_in_the_order_of_epoch_0,
    gradients.accumulation_not_divided,
    randomness.same_dropout_in_each_step,
    randomness.same_dropout_in_each_micro_batch,
    randomness.dropout_while_evaluating,
    saving.step_count_not_loaded,
}
"""Like another in the table: left to `--whole`."""


def sampled(faults: Iterable[Callable[[str], Any]]) -> list[Any]:
    return [
        pytest.param(f, marks=pytest.mark.whole if f in OF_A_KIND else (), id=f.__name__)
        for f in faults
    ]


def test_what_the_faults_patch_is_there():
    """A function that was renamed is found here, not in an hour."""
    for fault, planted in FAULTS.items():
        with fault(planted.engine):
            pass


@pytest.mark.more
@pytest.mark.parametrize("fault", sampled(FAULTS))
def test_a_planted_fault_is_caught_and_named(pools, tmp_path, sound, fault):
    planted = FAULTS[fault]
    path = config(tmp_path, planted.engine, planted.stage, **planted.trainer)
    if (content := f"{planted.size} {Path(path).read_text()}") not in sound:
        for passed, _, table in pools[planted.size].run(
            certified, path=path, world_size=planted.size
        ):
            assert passed, table
        sound[content] = path
    arguments = {"path": path, "world_size": planted.size, "fault": fault}
    arguments |= {"probes": fault in OF_DOCUMENTS}
    for passed, first, table in pools[planted.size].run(certified, **arguments):
        assert not passed
        assert first == planted.check, table
        where = f"at step {planted.step}, on rank {planted.rank}: {planted.check}"
        assert f"FAIL: first differs {where}" in table, table
        row = rf"^{planted.check} .*FAIL +{planted.step}\b.*{re.escape(planted.where)}"
        assert re.search(row, table, re.MULTILINE), table
        assert planted.where in table.splitlines()[-1], table


OF_OPTIMIZERS = {
    updates.no_update: ("update",),
    updates.wrong_rate: ("update",),
    updates.wrong_second_beta: ("moment",),
    updates.no_decay: ("update",),
    updates.no_bias_correction: (
        "update",
        "moment",
    ),  # planted in the step count, which may be kept by parameter
}


@pytest.mark.more
@pytest.mark.parametrize(
    "rate", [*(pytest.param(rate, marks=pytest.mark.whole) for rate in (1e-3, 1e-5)), 1e-7]
)
@pytest.mark.parametrize("fault", OF_OPTIMIZERS, ids=lambda fault: fault.__name__)
def test_a_wrong_optimizer_is_caught_at_any_learning_rate(pools, tmp_path, sound, fault, rate):
    path = config(tmp_path, "mesh", 2)
    arguments = {"path": path, "world_size": 2, "overrides": [f"optimizer.params.lr={rate}"]}
    if (content := f"{Path(path).read_text()} at {rate}") not in sound:
        for passed, _, table in pools[2].run(certified, **arguments):
            assert passed, table
        sound[content] = path
    for passed, first, table in pools[2].run(certified, fault=fault, **arguments):
        assert not passed
        assert first in OF_OPTIMIZERS[fault], table


OPT = {
    "model_type": "opt",
    "hidden_size": 32,
    "word_embed_proj_dim": 32,
    "ffn_dim": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
"""Its keys' biases have a gradient of zero, and in floating point one of rounding errors: softmax
ignores a shift.
"""
ONE_CYCLE = {"type": "OneCycle", "params": {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3}}
LINEAR = {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto", "warmup_type": "linear"}}


@pytest.mark.more
@pytest.mark.parametrize(
    ("model", "scheduler"),
    [(OPT, LINEAR), (GPT2, ONE_CYCLE)],
    ids=lambda part: part.get("model_type", part.get("type")),
)
def test_what_is_right_raises_no_alarm(pools, tmp_path, model, scheduler):
    path = Path(config(tmp_path, "mesh", 3, model={"config": model}))
    path.write_text(json.dumps(json.loads(path.read_text()) | {"scheduler": scheduler}))
    for passed, _, table in pools[2].run(certified, path=str(path), world_size=2):
        assert passed, table


@pytest.mark.more
@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_what_is_computed_again_raises_no_alarm(pools, tmp_path, recompute):
    path = config(tmp_path, "mesh", 2, activation_checkpointing=recompute)
    for passed, _, table in pools[2].run(certified, path=path, world_size=2):
        assert passed, table


MUON = {"lr": 1e-3, "adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.1}
EXPERTS = {
    **{"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "vocab_size": 61},
    **{"num_hidden_layers": 2, "hidden_size": 32, "moe_intermediate_size": 16, "head_dim": 8},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48},
}
MUON_ON: dict[str, tuple[int, str, tuple[int, int, int], dict[str, Any]]] = {
    "ZeRO-3": (2, "mesh", (3, 1, 1), {}),
    "tensor": (4, "mesh", (2, 1, 2), LLAMA),
    "pipeline": (4, "mesh", (2, 2, 1), {}),
    "experts": (2, "accelerate", (3, 1, 1), {"model": {"config": EXPERTS}}),
}
"""Ranks, the engine, the ZeRO stage, stages and tensor ranks, and more of the config."""


@pytest.mark.more
@pytest.mark.parametrize("layout", MUON_ON)
def test_muon_is_compared_with_that_of_pytorch(pools, tmp_path, layout):
    size, engine, sizes, more = MUON_ON[layout]
    path = Path(config(tmp_path, engine, *sizes, **more))
    optimizer = {"optimizer": {"type": "Muon", "params": MUON}}
    path.write_text(json.dumps(json.loads(path.read_text()) | optimizer))
    arguments = {"path": str(path), "world_size": size}
    for passed, _, table in pools[size].run(certified, **arguments):
        assert passed, table
    if layout == "ZeRO-3":
        for passed, first, table in pools[size].run(
            certified, fault=updates.shards_orthogonalised, **arguments
        ):
            assert (passed, first) == (False, "update"), table


@pytest.mark.more
def test_a_low_precision_is_allowed_its_rounding_and_no_more(pools, tmp_path):
    path = config(tmp_path, "mesh", 2)
    overrides = ["bf16.enabled=true", "optimizer.params.lr=1e-5"]
    arguments = {"path": path, "world_size": 2, "overrides": overrides, "precision": "config"}
    for passed, _, table in pools[2].run(certified, **arguments):
        assert passed, table
        assert "bfloat16" in table
    for fault, check in (
        (updates.masters_in_bfloat16, "update"),
        (gradients.dropped_micro_batch, "output"),
    ):
        for passed, first, table in pools[2].run(certified, fault=fault, **arguments):
            assert not passed
            assert first == check, table


def test_the_seeds_of_the_one_process_are_all_different():
    """So that what agrees with it draws other dropout on each data rank, in each step, micro-batch
    and block.
    """
    from trainer.certify.one_process.sample_order import seed_of

    seeds = [
        seed_of(seed_of("dropout", seed, step, rank), micro) + block
        for seed in range(3)
        for step in range(10)
        for rank in range(4)
        for micro in range(4)
        for block in range(20)
    ]
    assert len(set(seeds)) == len(seeds)


@pytest.mark.more
@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        *((path.stem, []) for path in CONFIGS),
        ("pipeline_zero1", ["trainer.engine=deepspeed"]),
        ("tensor_zero2", ["trainer.engine=deepspeed"]),
    ],
    ids=str,
)
def test_every_config_that_ships_passes(pools, name, overrides):
    path = str(ROOT / "ds_configs" / f"{name}.json")
    size = tiny_run(path, overrides, None).layout.world_size
    for passed, _, table in pools[size].run(
        certified, path=path, world_size=size, overrides=overrides
    ):
        assert passed, table


@pytest.mark.more
def test_the_command(tmp_path):
    output = tmp_path / "certificate.json"
    command = [
        sys.executable,
        ROOT / "launch" / "verify.py",
        "--config",
        config(tmp_path, "auto", 2),
    ]
    result = run(*command, "--output", output)
    assert result.code == 0, result.output
    shows(result.output.rstrip(), "PASS: trains", f"{output}")
    certificate = json.loads(output.read_text())
    assert certificate["passed"] is True
    assert certificate["config"] == json.loads(Path(command[3]).read_text())
    assert [finding["check"] for finding in certificate["findings"]][:4] == [
        "initial",
        "output",
        "loss",
        "gradient",
    ]
    probes = {one["question"]: one for one in certificate["probes"]}
    assert [*probes] == [question.name for question in checks.TABLE]
    assert not any(one["answer"] == "note" and one["applies"] for one in probes.values())
    for name in probes:
        assert re.search(rf"^{name} +(ok|note|none)\b", result.output, re.MULTILINE)
    no_gpu = run(*command, "--device", "cuda", CUDA_VISIBLE_DEVICES="")
    assert no_gpu.code == 64
    shows(no_gpu.output, "--device: cuda with 0", "GPUs", "3 processes")
    wrong = run(*command, "zero_optimization.stag=2")
    assert wrong.code == 64
    assert (
        'Did you mean "zero_optimization.stage"?' in wrong.output
        or 'Did you mean "stage"?' in wrong.output
    )


@pytest.mark.more
def test_a_failure_ends_with_76(tmp_path):
    script = tmp_path / "faulty.py"
    script.write_text(
        f"import runpy, sys\nsys.path.insert(0, {str(ROOT)!r})\n"
        "import trainer.certify.comparison as comparison\n"
        "comparison.TOLERANCES['initial'] = -1.0\n"
        f"sys.argv[0] = {str(ROOT / 'launch' / 'verify.py')!r}\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    arguments = ["--config", config(tmp_path, "mesh", 0), "--output", str(tmp_path / "c.json")]
    result = run(sys.executable, script, *arguments, **environment_of(0, 1, free_port()))
    assert result.code == 76, result.output
    shows(result.output, "FAIL: first differs", "step 0", "rank 0")


@pytest.mark.more
def test_norms_on_both_sides_of_the_limit_are_named_by_their_steps(tmp_path):
    """Once "of the first 3 steps 0 are over it" was read as none of three."""
    from trainer.certify.tiny_run import clipping

    small = tiny_run(config(tmp_path, "mesh", 0), [], 2)
    shows(clipping(small, [3.0, 1.0, 1.2]).changes[-1], "step 0, under", "1 and 2")
    for norms in ([1.0, 1.0, 1.0], [0.0, 1.0, 1.0]):  # a loss may be 0 for all samples of a step
        assert clipping(small, norms).changes[-1].endswith("it proves less")


@pytest.mark.parametrize(
    ("stage", "mesh", "world_size"),
    [
        (0, {}, 3),
        (3, {}, 3),
        (3, {"replicate": 2, "shard": -1}, 6),
        (3, {"replicate": 2, "shard": 2}, 4),
        (3, {"replicate": -1, "shard": 4}, 8),
        (3, {"shard": "node"}, 6),
    ],
)
def test_the_smallest_world_has_every_axis(tmp_path, stage, mesh, world_size):
    from trainer.config import load

    assert smallest_world(load(config(tmp_path, "auto", stage, mesh=mesh))) == world_size


@pytest.mark.parametrize(
    ("precision", "engine"),
    [
        ({}, "mesh"),
        ({"bf16": {"enabled": True}}, "deepspeed"),
        ({"fp16": {"enabled": True}}, "deepspeed"),
    ],
)
def test_the_engine_that_is_verified_is_that_of_the_run(tmp_path, precision, engine):
    """In float32 another would take a pipeline without ZeRO."""
    from trainer.certify.tiny_run import engine_of

    path = Path(config(tmp_path, "auto", 0, stages=2))
    path.write_text(json.dumps(json.loads(path.read_text()) | precision))
    small = tiny_run(str(path), [], 2)
    assert (small.layout.precision, engine_of(small, "cpu")) == ("float32", engine)


def test_a_mesh_that_needs_more_processes_than_there_are_names_the_way_out(tmp_path):
    with pytest.raises(ConfigError) as caught:
        tiny_run(config(tmp_path, "auto", 3, mesh={"replicate": 4, "shard": 8}), [], None)
    shows(caught.value, "--world-size", "8 fits", "Override trainer.mesh")


@pytest.mark.more
def test_the_example_of_a_planted_bug_names_it(tmp_path: Path) -> None:
    output = str(tmp_path / "certificate.json")
    result = run(sys.executable, "examples/planted_bug.py", "--output", output)
    assert result.code == 76, result.output
    first = r"FAIL: first differs at step 0, on rank \d: gradient transformer\.wte\.weight"
    assert re.search(first, result.output), result.output
    assert "exit code" not in result.output, result.output  # the verdict has said it
    control = run(sys.executable, "examples/planted_bug.py", "--without", "--output", output)
    assert control.code == 0, control.output
    shows(control.output, "PASS")


def test_a_run_in_bfloat16_alone_is_certified_in_float32(tmp_path):
    from trainer.config import support

    path = Path(config(tmp_path, "mesh", 1))
    low = {name: True for name in ("bf16_master_weights_and_grads", "bf16_optimizer_states")}
    content = json.loads(path.read_text())
    content |= {"bf16": {"enabled": True, **low}, "data_types": {"grad_accum_dtype": "bf16"}}
    path.write_text(json.dumps(content))
    for precision in ("float32", "config"):
        small = tiny_run(str(path), [], 2, precision)
        assert "mesh" not in support.refusals(small.config)
