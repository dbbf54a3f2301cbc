"""The parity certificate: it passes for what is right, and catches and names every planted fault."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from launch.processes import environment_of, free_port
from tests.commands import ROOT, run
from tests.training import GPT2
from trainer.errors import ConfigError
from trainer.models.shrink import shrink_model
from trainer.verify.shrink import shrink, smallest_world

CONFIGS = sorted((ROOT / "ds_configs").glob("*.json"))


def config(folder: Path, engine: str, stage: int, stages: int = 1, tensor: int = 1, **trainer: Any) -> str:
    """GPT-2: dropout in three places, tied, biases; in so many pipeline stages, on so many tensor ranks."""
    content = {
        "train_batch_size": 64,
        "gradient_clipping": 0.1,
        "zero_optimization": {"stage": stage},
        "pipeline": {"stages": stages},
        "tensor_parallel": {"autotp_size": tensor},
        "gradient_accumulation_steps": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5, "warmup_max_lr": "auto"}},
        "trainer": {"engine": engine, "model": {"config": GPT2 | {"n_layer": 6}}, **trainer},
    }
    path = folder / "config.json"
    path.write_text(json.dumps(content))
    return str(path)


# The faults. Each is a patch that is in force while every rank certifies.


def step_of(engine: str) -> Any:
    from trainer.engines.deepspeed import DeepSpeedEngine
    from trainer.engines.torch_engine import TorchEngine

    return DeepSpeedEngine if engine == "deepspeed" else TorchEngine


def with_step(engine: str, change: Callable[..., Any]) -> Any:
    """`change(self, batches, update)` gives what the real step is called with."""
    kind = step_of(engine)
    real = kind.step

    def step(self, number, batches, update, observe=None):
        return real(self, number, *change(self, batches, update), observe)

    return mock.patch.object(kind, "step", step)


def scaled_by_accumulation(engine: str) -> Any:
    import torch

    from trainer.tasks.task import Trainee

    real = Trainee.forward

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, loss):
            return loss.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient * 2

    return mock.patch.object(Trainee, "forward", lambda self, batch: Twice.apply(real(self, batch)))


def dropped_micro_batch(engine: str) -> Any:
    return with_step(engine, lambda self, batches, update: ([batches[0]] * len(batches), update))


def wrong_rate(engine: str) -> Any:
    return with_step(
        engine, lambda self, batches, update: (batches, replace(update, learning_rate=update.learning_rate * 0.9))
    )


def lost_reduction(engine: str) -> Any:
    from torch.nn.parallel import DistributedDataParallel

    real = DistributedDataParallel.forward

    def forward(self, *args, **kwargs):
        with self.no_sync():
            return real(self, *args, **kwargs)

    return mock.patch.object(DistributedDataParallel, "forward", forward)


def norm_of_one_rank(engine: str) -> Any:
    from trainer.engines import torch_engine

    real = torch_engine.TorchEngine._clip_and_norm

    def alone(self):
        with mock.patch.object(torch_engine.dist, "all_reduce", lambda *args, **kwargs: None):
            return real(self)

    return mock.patch.object(torch_engine.TorchEngine, "_clip_and_norm", alone)


def untied_embedding(engine: str) -> Any:
    import torch

    from trainer.engines import mesh

    real = mesh.Trainee

    def untie(model, task):
        head = model.get_output_embeddings()
        head.weight = torch.nn.Parameter(head.weight.detach().clone())
        return real(model, task)

    return mock.patch.object(mesh, "Trainee", untie)


def dropout_not_replayed(engine: str) -> Any:
    from trainer.parallel import recompute

    real = recompute.checkpoint

    def forgetful(*args, **kwargs):
        return real(*args, **{**kwargs, "preserve_rng_state": False})

    return mock.patch.object(recompute, "checkpoint", forgetful)


def norm_of_one_stage(engine: str) -> Any:
    return norm_of_one_rank(engine)


def tied_tables_apart(engine: str) -> Any:
    from trainer.parallel.replicate import Copies

    return mock.patch.object(Copies, "reduce", lambda self: None)


def tied_tables_of_pipeline_module_apart(engine: str) -> Any:
    from deepspeed.runtime.pipe.engine import PipelineEngine
    from deepspeed.runtime.pipe.schedule import ReduceTiedGrads

    return mock.patch.dict(PipelineEngine._INSTRUCTION_MAP, {ReduceTiedGrads: lambda self: None})


def tied_table_counted_twice(engine: str) -> Any:
    from trainer.engines import deepspeed_pipeline

    return mock.patch.object(deepspeed_pipeline, "is_copy", lambda parameter: False)


def zero_bubble_with_resharding(engine: str) -> Any:
    """The product that is refused: ZeRO-2 is asked for, and FSDP frees the parameters after each forward pass."""
    from trainer.parallel import shard

    real = shard.fully_shard
    return mock.patch.object(
        shard, "fully_shard", lambda module, **options: real(module, **{**options, "reshard_after_forward": True})
    )


def part_of_a_norms_gradient(engine: str) -> Any:
    """Norms of queries and keys see the heads of one rank; their gradients are a part, until they are added up."""
    from trainer.parallel import replicate

    return mock.patch.object(replicate, "add_up", lambda *arguments: None)


def replicated_counted_twice(engine: str) -> Any:
    from trainer.parallel.replicate import Copies

    return mock.patch.object(Copies, "_share", lambda self, name, parameter, coordinate: 1.0)


QWEN3 = {"model_type": "qwen3", "num_hidden_layers": 2, "tie_word_embeddings": True}

# fault -> (engine, ZeRO stage, what the trainer section adds, the check that fails first)
FAULTS: dict[Callable[[str], Any], tuple[str, int, dict[str, Any], str]] = {
    scaled_by_accumulation: ("deepspeed", 2, {}, "gradient"),
    dropped_micro_batch: ("deepspeed", 3, {}, "loss"),
    wrong_rate: ("deepspeed", 1, {}, "weight"),
    lost_reduction: ("mesh", 0, {}, "gradient"),
    norm_of_one_rank: ("mesh", 3, {}, "norm"),
    untied_embedding: ("mesh", 0, {}, "loss"),
    dropout_not_replayed: ("mesh", 2, {"activation_checkpointing": "full"}, "gradient"),
    norm_of_one_stage: ("mesh", 1, {"stages": 2}, "norm"),
    tied_tables_apart: ("mesh", 0, {"stages": 2}, "gradient"),
    tied_tables_of_pipeline_module_apart: ("deepspeed", 1, {"stages": 2}, "gradient"),
    tied_table_counted_twice: ("deepspeed", 0, {"stages": 2}, "norm"),
    part_of_a_norms_gradient: ("mesh", 2, {"tensor": 2, "model": {"config": QWEN3}}, "gradient"),
    replicated_counted_twice: ("mesh", 2, {"tensor": 2, "model": {"config": QWEN3}}, "norm"),
    zero_bubble_with_resharding: ("mesh", 2, {"stages": 2, "pipeline_schedule": "ZBVZeroBubble"}, "gradient"),
}


def certified(
    path: str, world_size: int, fault: str | None = None, overrides: Sequence[str] = ()
) -> tuple[bool, str, str]:
    """Runs on each rank: whether it passed, the first check that failed, and the table."""
    import contextlib

    import torch.distributed as dist

    from trainer.ranks import Ranks
    from trainer.verify.certificate import certify, table

    small = shrink(path, list(overrides), world_size)
    planted = globals()[fault](small.config.trainer.engine) if fault else contextlib.nullcontext()
    with planted:
        certificate = certify(small, Ranks(dist.get_rank(), world_size))
    first = certificate.first_failure
    return certificate.passed, first.check if first else "", table(certificate)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_planted_fault_is_caught_and_named(pools, tmp_path, fault):
    engine, stage, trainer, check = FAULTS[fault]
    path = config(tmp_path, engine, stage, **trainer)
    for passed, _, table in pools[2].run(certified, path=path, world_size=2):
        assert passed, table
    for passed, first, table in pools[2].run(certified, path=path, world_size=2, fault=fault.__name__):
        assert not passed
        assert first == check, table
        assert f"FAIL: first apart at step 0, on rank 0: {check}" in table, table
        assert fault is not untied_embedding or "lm_head.weight (only here)" in table


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
    size = shrink(path, overrides, None).layout.world_size
    for passed, _, table in pools[size].run(certified, path=path, world_size=size, overrides=overrides):
        assert passed, table


def test_the_command(tmp_path):
    output = tmp_path / "certificate.json"
    command = [sys.executable, ROOT / "launch" / "verify.py", "--config", config(tmp_path, "auto", 2)]
    result = run(*command, "--output", output)
    assert result.code == 0, result.output
    assert result.output.rstrip().endswith(f"PASS: trains as one process does\nwritten to {output}")
    certificate = json.loads(output.read_text())
    assert certificate["passed"] is True
    assert [finding["check"] for finding in certificate["findings"]][:4] == ["loss", "gradient", "norm", "weight"]
    wrong = run(*command, "zero_optimization.stag=2")
    assert wrong.code == 64
    assert 'Did you mean "zero_optimization.stage"?' in wrong.output or 'Did you mean "stage"?' in wrong.output


def test_a_failure_ends_with_76(tmp_path):
    script = tmp_path / "faulty.py"
    script.write_text(
        f"import runpy, sys\nsys.path.insert(0, {str(ROOT)!r})\n"
        "import trainer.verify.certificate as certificate\n"
        "certificate.TOLERANCES['gradient'] = -1.0\n"
        f"sys.argv[0] = {str(ROOT / 'launch' / 'verify.py')!r}\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    arguments = ["--config", config(tmp_path, "mesh", 0), "--output", str(tmp_path / "c.json")]
    result = run(sys.executable, script, *arguments, **environment_of(0, 1, free_port()))
    assert result.code == 76, result.output
    assert "FAIL: first apart at step 0, on rank 0: gradient " in result.output


@pytest.mark.parametrize(
    ("stage", "mesh", "world_size"),
    [(0, {}, 2), (3, {}, 2), (3, {"replicate": 2, "shard": -1}, 4), (3, {"replicate": -1, "shard": 4}, 8)],
)
def test_the_smallest_world_has_every_axis(tmp_path, stage, mesh, world_size):
    from trainer.config import load

    assert smallest_world(load(config(tmp_path, "auto", stage, mesh=mesh))) == world_size


def test_a_mesh_that_needs_more_processes_than_there_are_names_the_way_out(tmp_path):
    with pytest.raises(ConfigError) as caught:
        shrink(config(tmp_path, "auto", 3, mesh={"replicate": 4, "shard": 8}), [], None)
    assert str(caught.value) == (
        "--world-size: no number of processes up to 8 fits its mesh; expected one that does. "
        "Override trainer.mesh with smaller sizes"
    )


def test_shrinking_keeps_what_a_model_is():
    from types import SimpleNamespace

    from trainer.models import huggingface

    def architecture(**values: Any) -> Any:
        options = SimpleNamespace(
            name_or_path=None, config=values, revision=None, trust_remote_code=False, attention=None
        )
        return huggingface.read_config(options)

    small = shrink_model(
        architecture(
            model_type="gemma2", hidden_size=2304, num_hidden_layers=26, num_attention_heads=8, num_key_value_heads=4
        )
    )
    assert set(small.layer_types) == {"sliding_attention", "full_attention"}
    assert (small.num_attention_heads, small.num_key_value_heads, small.hidden_size) == (4, 2, 32)
    assert small.final_logit_softcapping == 30.0
    moe = shrink_model(architecture(model_type="qwen3_moe", num_experts=128, attention_dropout=0.25))
    assert (moe.num_experts, moe.num_experts_per_tok, moe.attention_dropout) == (4, 2, 0.25)
