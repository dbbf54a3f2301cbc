"""ZeRO-3 with a second copy of the weights among few ranks (hpZ): its state, and what it refuses.

That it trains as one process does is in tests/conformance, and what it sends in tests/budgets.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.layouts import EXPERTS, SECOND, TWO_EXPERTS
from tests.support.messages import raises, shows
from tests.support.training import Case, layout_of, spec_of
from trainer.config import RuntimeFacts, load
from trainer.engines import ENGINES
from trainer.errors import ConfigError
from trainer.layout import SECONDARY
from trainer.run.compose import Composed, compose

MESH = replace(SECOND, engine="mesh")
PLAIN = replace(MESH, more={})


def composed(*overrides: str, config: str = "zero3", machines: int = 1) -> Composed:
    facts = RuntimeFacts(4, 64, 100, True, "cpu", 4 // machines)
    batch = "train_batch_size=64", "gradient_accumulation_steps=auto"
    return compose(load(config, [*batch, *overrides]), facts)


def evaluated_and_saved(case: Case, folder: Path) -> tuple[str, list[str]]:
    """Take a step, evaluate and save; return the checkpoint, and parameters in no own shard.

    Runs on each rank.
    """
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor

    from tests.support.training import TRAIN_BATCH, build, collated, data_rank_of, shares, task_of
    from trainer import checkpoint
    from trainer.distributed.ranks import Ranks
    from trainer.optim.lr_schedules import Update
    from trainer.state import RunState

    rank = dist.get_rank()
    engine, task = build(case, rank), task_of(spec_of(case.model), case)
    batches = [collated(task, share) for share in shares(case, 0, data_rank_of(case, rank))]
    engine.step(0, batches, Update(1e-2))
    engine.evaluate(batches)
    [module] = engine.modules
    strange = [
        name
        for name, parameter in module.named_parameters()
        if not isinstance(parameter, DTensor) or parameter.device_mesh.shape != (4,)
    ]
    state = RunState(step=1, samples=TRAIN_BATCH, engine=engine.scalars())
    ranks = Ranks(rank, case.world_size)
    path = checkpoint.save(
        folder, state, engine.state_tensors(), {}, checkpoint.ModelFolder(), ranks
    )
    engine.close()
    return str(path), strange


def files_of(folder: str) -> dict[str, bytes]:
    root = Path(folder)
    paths = [path for path in root.rglob("*") if path.suffix in (".safetensors", ".bin", ".pt")]
    return {str(path.relative_to(root)): path.read_bytes() for path in paths}


@pytest.mark.parametrize("engine", ["mesh", "accelerate"])
def test_what_is_saved_after_an_evaluation_is_as_without_a_second_copy(pools, tmp_path, engine):
    results = {}
    for name, case in {"second": MESH, "plain": PLAIN}.items():
        case = replace(case, engine=engine)
        saved = pools[4].run(evaluated_and_saved, case=case, folder=tmp_path / name)
        results[name] = files_of(saved[0][0])
        if name == "second":
            assert [strange for _, strange in saved] == [[]] * 4
    assert results["plain"] and results["second"] == results["plain"]


def loss_of_other_weights(case: Case) -> list[float]:
    """Evaluate, write zeros to all weights, evaluate again. Runs on each rank."""
    import torch.distributed as dist

    from tests.support.checkpoint_pieces import InMemory
    from tests.support.training import build, collated, data_rank_of, shares, task_of

    rank = dist.get_rank()
    engine, task = build(case, rank), task_of(spec_of(case.model), case)
    batches = [collated(task, share) for share in shares(case, 0, data_rank_of(case, rank))]
    losses = []
    for _ in range(2):
        sums, targets = engine.evaluate(batches)
        losses.append(float(sums[0] / targets))
        for entry in engine.state_tensors():
            entry.write(InMemory(torch.zeros(entry.shape, dtype=entry.dtype)))
    engine.close()
    return losses


def test_an_evaluation_computes_with_weights_that_were_written_after_another(pools: Any) -> None:
    from math import log

    from tests.support.training import VOCABULARY

    for before, after in pools[4].run(loss_of_other_weights, case=MESH):
        assert abs(before - log(VOCABULARY)) > 1e-4
        assert after == pytest.approx(log(VOCABULARY), abs=1e-6)


def groups_of_units(case: Case) -> tuple[int, set[tuple[int, ...]]]:
    """Return how many groups units are gathered among again, and their ranks. On each rank."""
    import torch.distributed as dist
    from torch.distributed.fsdp import FSDPModule

    from tests.support.training import build

    engine = build(case, dist.get_rank())
    states = [m._get_fsdp_state() for m in engine.modules[0].modules() if isinstance(m, FSDPModule)]
    meshes = [group.post_forward_mesh_info for s in states for group in s._fsdp_param_groups]
    groups = [mesh.shard_process_group for mesh in meshes if mesh is not None]
    few = {group.group_name: dist.get_process_group_ranks(group) for group in groups}
    engine.close()
    return len(few), {tuple(ranks) for ranks in few.values()}


@pytest.mark.parametrize("engine", ["mesh", "accelerate"])
def test_all_units_are_gathered_again_in_one_group_of_neighbours(pools, engine):
    result = pools[4].run(groups_of_units, case=replace(MESH, engine=engine))
    assert result == [(1, {(0, 1)})] * 2 + [(1, {(2, 3)})] * 2


@pytest.mark.parametrize("size", ["0", "1", "auto"])
def test_without_a_size_there_is_no_second_copy(size):
    layout = composed(f"{SECONDARY}={size}").layout
    assert layout == composed().layout and "hpZ" not in layout.describe()


def test_a_size_is_for_zero_3():
    assert composed(f"{SECONDARY}=2").layout.regathered == 2
    other = composed(f"{SECONDARY}=2", config="zero2")
    assert other.layout.secondary_shard == 1
    shows("\n".join(other.config.notes), SECONDARY, "no effect", "stage is 2")


def test_all_ranks_shard_where_each_machine_has_a_second_copy():
    of_machines = composed("trainer.engine=mesh", machines=2).layout
    assert (of_machines.replicate, of_machines.shard) == (2, 2)
    layout = composed("trainer.engine=mesh", f"{SECONDARY}=2", machines=2).layout
    assert (layout.shard, layout.regathered) == (4, 2)


def test_all_ranks_of_a_shard_are_gathered_as_without_a_second_copy():
    layout = composed(f"{SECONDARY}=4").layout
    assert layout.regathered == 0 and ENGINES["mesh"].refusal(layout) is None


@pytest.mark.parametrize("size", [3, 8])
def test_ranks_that_a_copy_does_not_divide_are_an_error(size):
    with raises(
        ConfigError, f"{SECONDARY}: {size} for 4 ranks", "a divisor of 4", "GPUs of a node"
    ):
        composed(f"{SECONDARY}={size}")


@pytest.mark.parametrize("size", [2, 4])
def test_auto_leaves_it_to_an_engine_that_has_it(size):
    job = composed(f"{SECONDARY}={size}")
    assert job.engine()[0] == "accelerate"
    with raises(ConfigError, "engine deepspeed", "hpZ", 'trainer.engine to "mesh"'):
        job.engine("deepspeed")


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"world_size": 8, "tensor": 2}, "tensor_parallel.autotp_size"),
        ({"float8": "rowwise", "precision": "bfloat16"}, "trainer.float8"),
    ],
)
def test_what_fsdp_cannot_divide_again_is_refused(change, key):
    layout = layout_of(replace(MESH, **change))
    shows(ENGINES["mesh"].refusal(layout), "second copy", SECONDARY, key)
    assert "second copy" not in str(ENGINES["mesh"].refusal(replace(layout, secondary_shard=1)))


def test_few_experts_in_a_block_are_refused_unless_ranks_divide_them() -> None:
    few = replace(MESH, model=TWO_EXPERTS)
    with raises(ConfigError, f"{SECONDARY}: 2", "experts", "trainer.mesh.shard"):
        ENGINES["mesh"].check(spec_of(few.model), layout_of(few))
    ENGINES["mesh"].check(spec_of(few.model), layout_of(replace(few, more={})))
    ENGINES["mesh"].check(spec_of(EXPERTS), layout_of(replace(few, model=EXPERTS, expert=2)))
