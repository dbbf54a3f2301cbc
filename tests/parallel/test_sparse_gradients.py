"""Parameters that never or sometimes get a gradient train, save and resume as in one process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support.messages import shows
from tests.support.probing import layout
from tests.support.training import (
    LLAMA,
    TRAIN_BATCH,
    Case,
    build,
    data_rank_of,
    plain_optimizer,
    samples,
    shares,
    spec_of,
    task_of,
    whole_weights,
)
from trainer.engines.deepspeed import engine as deepspeed
from trainer.errors import ConfigError
from trainer.models.names import pattern_of

STILL = LLAMA | {"attention_dropout": 0.0, "num_hidden_layers": 4}
STEPS = 5
NEVER, SOMETIMES = "model.layers.0.mlp.never.weight", "model.layers.3.mlp.sometimes.weight"
USED: list[bool] = [True]
"""Decides if the next forward passes use the matrix; the last entry holds from then on."""
MESH = Case("mesh", model=STILL)
SGD = {
    "type": "SGD",
    "params": {"lr": 1e-2, "momentum": 0.9, "dampening": 0.5, "weight_decay": 0.01},
}

CASES = {
    "mesh, one process": replace(MESH, world_size=1, zero_stage=0),
    "mesh DDP": replace(MESH, zero_stage=0),
    "mesh ZeRO-2": MESH,
    "mesh ZeRO-3": replace(MESH, zero_stage=3),
    "mesh ZeRO-3, SGD": replace(MESH, zero_stage=3, optimizer=SGD),
    "mesh pipeline": replace(MESH, zero_stage=0, pipeline=2),
    "accelerate DDP": replace(MESH, engine="accelerate", zero_stage=0),
    "accelerate ZeRO-3": replace(MESH, engine="accelerate", zero_stage=3),
    **{
        f"deepspeed ZeRO-{stage}": replace(MESH, engine="deepspeed", zero_stage=stage)
        for stage in range(4)
    },
    "deepspeed ZeRO-2, SGD": replace(
        MESH, engine="deepspeed", optimizer=SGD, top={"zero_allow_untested_optimizer": True}
    ),
    "deepspeed ZeRO-2, bfloat16": replace(MESH, engine="deepspeed", precision="bfloat16"),
    "deepspeed pipeline": replace(MESH, engine="deepspeed", zero_stage=0, pipeline=2),
    "deepspeed ZeRO-2, optimizer on the host": replace(
        MESH, engine="deepspeed", offload_optimizer="cpu"
    ),
}


def some(cases: dict[str, Case], *always: str) -> list[Any]:
    """The others run with --more."""
    return [pytest.param(name, marks=() if name in always else pytest.mark.whole) for name in cases]


def with_sparse(spec: Any) -> Any:
    """Add a matrix that nothing uses, and one that is used where USED says so."""

    def made() -> nn.Module:
        model = spec.build()
        layers = model.model.layers
        layers[0].mlp.never = nn.Linear(5, 3, bias=False, device="meta")
        layers[-1].mlp.sometimes = nn.Linear(32, 32, bias=False, device="meta")
        layers[-1].mlp.register_forward_hook(
            lambda module, given, output: (
                output + module.sometimes(given[0]) if next_used() else output
            )
        )
        return model

    tiny_copy = spec.tiny.copy and (lambda: with_sparse(spec.tiny.copy()))
    return replace(
        spec.built_by(made),
        tiny=replace(spec.tiny, copy=tiny_copy),
        training=replace(spec.training, sparse=(pattern_of(SOMETIMES),)),
    )


def next_used() -> bool:
    return USED.pop(0) if len(USED) > 1 else USED[0]


def used_at(step: int, rank: int) -> list[bool]:
    return [step in (1, 3)]


def used_on(step: int, rank: int) -> list[bool]:
    return [True]


def advance(
    engine: Any, case: Case, first: int, last: int, used: Any = used_at, after: Any = None
) -> None:
    from trainer.optim.lr_schedules import Update

    task, rank = task_of(engine.job.spec), engine.job.machine.ranks.rank
    for step in range(first, last):
        USED[:] = used(step, data_rank_of(case, rank))
        batches = [task.collate(share) for share in shares(case, step, data_rank_of(case, rank))]
        engine.step(step, batches, Update(1e-2))
        if after is not None:
            after(step + 1)
    USED[:] = [True]


def state_of(engine: Any, case: Case) -> dict[tuple[str, str], torch.Tensor]:
    """Return all of the state, whole."""
    ranks = engine.job.machine.ranks
    return {(entry.name, entry.key): entry.read(ranks) for entry in engine.state_tensors()}


def with_and_without_saves(case: Case, folder: Path, change: Any = with_sparse) -> list[list[str]]:
    """Return what differs from a run without saves: [saving at each step, resumed midway]."""
    import torch.distributed as dist

    from trainer import checkpoint
    from trainer.distributed.ranks import Ranks
    from trainer.state import RunState

    rank = dist.get_rank()
    ranks = Ranks(rank, case.world_size)
    # DeepSpeed then updates by the gradient of the step before where there is none, and keeps it in
    # no checkpoint: models like that are refused
    carries = case.engine == "deepspeed" and (
        case.zero_stage == 3 or case.offload_optimizer == "cpu"
    )
    used = used_on if carries else used_at

    def start(seed: int = 5) -> Any:
        engine = build(case, rank, values_seed=seed, change=change)
        return engine

    engine = start()
    advance(engine, case, 0, STEPS, used)
    wanted = state_of(engine, case)
    engine.close()

    engine = start()

    def save(step: int) -> None:
        state = RunState(step=step, samples=step * TRAIN_BATCH, engine=engine.scalars())
        checkpoint.save(folder, state, engine.state_tensors(), {}, checkpoint.ModelFolder(), ranks)

    save(0)
    advance(engine, case, 0, STEPS, used, after=save)
    results = [differences(state_of(engine, case), wanted)]
    engine.close()
    for middle in (1, 2):
        engine = start(seed=77)
        path = folder / f"step-{middle:06d}"
        engine.restore(checkpoint.read_description(path)["position"]["engine"])
        checkpoint.load(path, engine.state_tensors(), ranks)
        advance(engine, case, middle, STEPS, used)
        results.append(differences(state_of(engine, case), wanted))
        engine.close()
    return results


def by_ranks(step: int, rank: int) -> list[bool]:
    """Uses: none, data rank 0 in one of two micro-batches, others in the other, all, none."""
    return [[False], [rank == 0, False], [False, rank > 0], [True], [False]][step]


def trained(case: Case) -> dict[str, torch.Tensor]:
    """Return weights after STEPS steps in which the data ranks differ. Runs on each rank."""
    import torch.distributed as dist

    engine = build(case, dist.get_rank(), change=with_sparse)
    advance(engine, case, 0, STEPS, by_ranks)
    weights = whole_weights(engine, case)
    engine.close()
    return weights


def trained_plainly(case: Case) -> dict[str, torch.Tensor]:
    """Return the same from plain PyTorch on the global batch."""
    from trainer.models.materialise import materialise

    spec = with_sparse(spec_of(case.model))
    model, task = spec.build(), task_of(spec)
    materialise(model, spec, seed=5)
    optimizer = plain_optimizer(case, model)
    for step in range(STEPS):
        counted = sum(int((s["targets"] != -100).sum()) for s in samples(step))
        for data_rank in range(case.data_ranks):
            USED[:] = by_ranks(step, data_rank)
            for batch in map(task.collate, shares(case, step, data_rank)):
                logits = model(input_ids=batch["input_ids"]).logits.flatten(0, 1)
                loss = F.cross_entropy(
                    logits, batch["targets"].flatten(), reduction="sum", ignore_index=-100
                )
                (loss / counted).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), case.clip)
        optimizer.step()
        optimizer.zero_grad()
    USED[:] = [True]
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


UNLIKE = {
    **{
        name: CASES[name]
        for name in CASES
        if name.startswith(("mesh", "accelerate")) and "SGD" not in name
    },
    "mesh HSDP": replace(MESH, world_size=4, replicate=2, zero_stage=3, micro_batch=1),
    "mesh pipeline x DDP": replace(MESH, world_size=4, zero_stage=0, pipeline=2),
    "mesh pipeline x ZeRO-3": replace(MESH, world_size=4, zero_stage=3, pipeline=2),
    "mesh ZeRO-3, bfloat16": replace(MESH, zero_stage=3, precision="bfloat16"),
    "mesh ZeRO-3, offloaded": replace(
        MESH, zero_stage=3, offload_optimizer="cpu", offload_param="cpu"
    ),
}


@pytest.mark.first("mesh DDP")
@pytest.mark.parametrize("name", some(UNLIKE, "mesh DDP", "mesh HSDP", "accelerate DDP"))
def test_a_gradient_on_one_rank_alone_is_that_of_one_process(pools, name):
    case = UNLIKE[name]
    wanted = trained_plainly(case)
    for weights in pools[case.world_size].run(trained, case=case):
        assert torch.equal(weights[NEVER], wanted[NEVER])
        for key, weight in wanted.items():
            error = (weights[key].reshape(weight.shape) - weight).norm() / weight.norm()
            assert error < (3e-2 if case.precision == "bfloat16" else 1e-5), (
                f"{key}: {float(error):.1e}"
            )


def differences(ours: dict[Any, torch.Tensor], theirs: dict[Any, torch.Tensor]) -> list[str]:
    """Return the names of tensors that are not the same, bit for bit."""
    keys = sorted(ours.keys() | theirs.keys())
    return [
        ".".join(key)
        for key in keys
        if not (key in ours and key in theirs and torch.equal(ours[key], theirs[key]))
    ]


def with_frozen(spec: Any) -> Any:
    """Add a matrix that is used and not trained."""

    def made() -> nn.Module:
        model = spec.build()
        model.model.layers[0].mlp.up_proj.weight.requires_grad_(False)
        return model

    return spec.built_by(made)


@pytest.mark.more
@pytest.mark.parametrize(
    "name", some(CASES, "mesh ZeRO-3, SGD", "mesh pipeline", "deepspeed ZeRO-0", "deepspeed ZeRO-3")
)
def test_neither_a_save_nor_a_resume_changes_training(pools, tmp_path, name):
    case = CASES[name]
    for result in pools[case.world_size].run(with_and_without_saves, case=case, folder=tmp_path):
        assert result == [[], [], []]


def test_deepspeed_refuses_what_it_would_decay():
    spec = with_sparse(spec_of(STILL))
    with pytest.raises(ConfigError) as caught:
        deepspeed.check(spec, layout())
    shows(
        caught.value,
        "engine deepspeed: llama",
        "model.layers.*.mlp.sometimes.weight",
        "trainer.engine",
    )


@pytest.mark.first("mesh ZeRO-3")
@pytest.mark.parametrize("name", some(CASES, "mesh ZeRO-3", "deepspeed ZeRO-2, bfloat16"))
def test_what_is_frozen_is_saved_and_loaded(pools, tmp_path, name):
    case = CASES[name]
    for result in pools[case.world_size].run(
        with_and_without_saves, case=case, folder=tmp_path, change=with_frozen
    ):
        assert result == [[], [], []]
