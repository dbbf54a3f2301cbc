"""A run of each layout that is saved, and resumed in every other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.support.optim.muon import finely
from tests.support.pool import Pools
from tests.support.training import LLAMA, TRAIN_BATCH, Case, build, data_rank_of, shares, task_of

# nothing drops: what is dropped depends on the micro-batches, and those on the layout
MODEL = LLAMA | {"num_hidden_layers": 4, "attention_dropout": 0.0}
ONE, TWO, FOUR = (Case("mesh", world_size=size, micro_batch=1, model=MODEL) for size in (1, 2, 4))
LAYOUTS = {
    "one process": replace(ONE, zero_stage=0),
    "`deepspeed` ZeRO-0 on 2": replace(TWO, engine="deepspeed", zero_stage=0),
    "`deepspeed` ZeRO-1 on 4": replace(FOUR, engine="deepspeed", zero_stage=1),
    "`deepspeed` ZeRO-2 on 1": replace(ONE, engine="deepspeed", zero_stage=2),
    "`deepspeed` ZeRO-3 on 2": replace(TWO, engine="deepspeed", zero_stage=3),
    "`deepspeed` ZeRO-3, all on the host, on 2": replace(
        TWO, engine="deepspeed", zero_stage=3, offload_optimizer="cpu", offload_param="cpu"
    ),
    "`deepspeed` 2-way tensor x ZeRO-2 on 4": replace(FOUR, engine="deepspeed", tensor=2),
    "`deepspeed` 2 stages x ZeRO-1 on 4": replace(
        FOUR, engine="deepspeed", pipeline=2, zero_stage=1
    ),
    "`accelerate` DDP on 4": replace(FOUR, engine="accelerate", zero_stage=0),
    "`accelerate` FSDP on 2": replace(TWO, engine="accelerate", zero_stage=3),
    "`mesh` ZeRO-2 on 2": TWO,
    "`mesh` HSDP on 4": replace(FOUR, replicate=2, zero_stage=3),
    "`mesh` 4 stages": replace(FOUR, pipeline=4, zero_stage=0),
    "`mesh` 2 folded stages x ZeRO-2 on 4": replace(FOUR, pipeline=2, schedule="ZBVZeroBubble"),
    "`mesh` 2-way tensor x ZeRO-2 on 4": replace(FOUR, tensor=2),
    "`mesh` 2 stages x 2-way tensor x ZeRO-3 on 8": replace(
        FOUR, world_size=8, pipeline=2, tensor=2, zero_stage=3
    ),
    "`mesh` 2 stages x HSDP on 8": replace(
        FOUR, world_size=8, pipeline=2, replicate=2, zero_stage=3
    ),
}
Losses = tuple[float, float]


def save(case: Case, folder: Path) -> Losses:
    """Two steps and a checkpoint; the losses of the two that follow. Runs on each rank.

    Saves a second time, beside those two steps: both checkpoints are to be the same, byte for byte.
    """
    from trainer import checkpoint
    from trainer.checkpoint.manifest import read_manifest
    from trainer.state import RunState

    engine, ranks = started(case)
    advance(engine, case, 0)
    state = RunState(step=2, samples=2 * TRAIN_BATCH, engine=engine.scalars())
    path = checkpoint.save(
        folder, state, engine.state_tensors(), {}, checkpoint.ModelFolder(), ranks
    )

    def write(entries: Any, apart: Any) -> None:
        checkpoint.save(folder / "beside", state, entries, {}, checkpoint.ModelFolder(), apart)

    with checkpoint.Background(ranks.on_host()) as background:
        background.save(engine.state_tensors(), write)
        losses = advance(engine, case, 2)
    assert read_manifest(folder / "beside" / path.name) == read_manifest(path)
    engine.close()
    return losses


def resume(case: Case, folders: dict[str, Path]) -> dict[str, Losses]:
    """Return the losses of the same two steps from each checkpoint. Runs on each rank."""
    from trainer import checkpoint

    engine, ranks = started(case, seed=77)
    results = {}
    for name, folder in folders.items():
        path, _ = checkpoint.newest(folder)
        assert path is not None
        engine.restore(checkpoint.read_description(path)["position"]["engine"])
        assert checkpoint.load(path, engine.state_tensors(), ranks).samples == 2 * TRAIN_BATCH
        results[name] = advance(engine, case, 2)
    engine.close()
    return results


def started(case: Case, seed: int = 5) -> Any:
    import torch.distributed as dist

    from trainer.distributed.ranks import Ranks

    rank = dist.get_rank()
    return build(case, rank, values_seed=seed), Ranks(rank, case.world_size)


def advance(engine: Any, case: Case, first: int) -> Losses:
    from trainer.optim.lr_schedules import Update

    task, rank = task_of(engine.job.spec), engine.job.machine.ranks.rank
    losses = []
    for step in (first, first + 1):
        batches = [task.collate(share) for share in shares(case, step, data_rank_of(case, rank))]
        losses.append(float(engine.step(step, batches, Update(1e-2)).loss()))
    return losses[0], losses[1]


def all_to_all(
    pools: Pools, folder: Path, pairs: set[tuple[str, str]], cases: dict[str, Case] = LAYOUTS
) -> dict[str, dict[str, float]]:
    """Return by [from][to] the largest relative error of a loss, against a run in `to` alone."""
    folders = {name: folder / str(index) for index, name in enumerate(cases)}
    used = {name for pair in pairs for name in pair}
    # one pool is alive at a time
    by_size = sorted(
        ((n, case) for n, case in cases.items() if n in used), key=lambda item: item[1].world_size
    )
    whole = {
        name: pools[case.world_size].run(finely, train=save, case=case, folder=folders[name])[0]
        for name, case in by_size
    }
    table: dict[str, dict[str, float]] = {name: {} for name in cases}
    for after, case in by_size:
        wanted = {before: folders[before] for before in cases if (before, after) in pairs}
        arguments: dict[str, Any] = {"train": resume, "case": case, "folders": wanted}
        for losses in pools[case.world_size].run(finely, **arguments):
            for before, result in losses.items():
                error = max(abs(a - b) / abs(b) for a, b in zip(result, whole[after], strict=True))
                table[before][after] = max(error, table[before].get(after, 0.0))
    return table


def ring(names: list[str], step: int) -> set[tuple[str, str]]:
    """Pair each layout once as the one before, and once as the one after."""
    return {(name, names[(index + step) % len(names)]) for index, name in enumerate(names)}
