"""PyTorch shows the symptoms for which modules are changed in place: one that fails can go."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from tests.support.messages import shows
from tests.support.training import LLAMA, Case, resume_by_engine
from trainer.parallel import patches


def test_pytorchs_checkpoint_wrapper_renames_parameters():
    model = nn.Sequential(nn.Linear(2, 2))
    names = [name for name, _ in model.named_parameters()]
    block = model[0]
    patches.replace_forward(block, lambda given: nn.Linear.forward(block, given))
    model(torch.ones(1, 2))
    assert [name for name, _ in model.named_parameters()] == names
    model[0] = checkpoint_wrapper(model[0])
    assert [name for name, _ in model.named_parameters()] != names


def error_of_synchronised_batch_norm() -> str:
    """Runs on each rank."""
    plain = nn.Sequential(nn.BatchNorm1d(2))
    synchronised = nn.SyncBatchNorm.convert_sync_batchnorm(plain)
    assert synchronised[0].weight is plain[0].weight
    assert type(synchronised[0]) is nn.SyncBatchNorm
    with pytest.raises(ValueError) as caught:
        synchronised(torch.ones(2, 2))
    return str(caught.value)


def test_pytorchs_synchronised_batch_norm_is_another_module_and_for_gpus(pools):
    [error] = pools[1].run(error_of_synchronised_batch_norm)
    shows(error, "input tensor")


def test_a_norms_statistics_are_those_of_its_last_batch_by_its_momentum_alone():
    plain, last = nn.BatchNorm1d(2), nn.BatchNorm1d(2)
    patches.keep_last_statistics(last)
    batch = torch.tensor([[1.0, 2.0], [3.0, 6.0]])
    for norm in (plain, last):
        norm(batch)
    assert torch.equal(last.running_mean, batch.mean(0))
    assert not torch.equal(plain.running_mean, batch.mean(0))


def gradients_of_ddp(steady: bool) -> list[torch.Tensor]:
    """Three times those of the same batch. Runs on each rank."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    with patches.steady_buckets() if steady else nullcontext():
        replica = nn.parallel.DistributedDataParallel(module)
    torch.manual_seed(torch.distributed.get_rank())
    batch, result = torch.randn(6, 4), []
    for _ in range(3):
        module.zero_grad()
        replica(batch).square().sum().backward()
        result.append(torch.cat([p.grad.flatten() for p in module.parameters()]))
    return result


def test_pytorchs_ddp_sums_in_another_order_after_its_first_step(pools: Any) -> None:
    first, second, third = pools[4].run(gradients_of_ddp, steady=False)[0]
    assert not torch.equal(first, second) and torch.equal(second, third)
    plain = nn.parallel.DistributedDataParallel._ddp_init_helper
    first, second, third = pools[4].run(gradients_of_ddp, steady=True)[0]
    assert torch.equal(first, second) and torch.equal(second, third)
    assert nn.parallel.DistributedDataParallel._ddp_init_helper is plain


@pytest.mark.parametrize("engine", ["mesh", "accelerate"])
def test_a_resumed_run_of_four_replicas_has_the_same_bits(
    pools: Any, tmp_path: Path, engine: str
) -> None:
    case = Case(engine=engine, zero_stage=0, world_size=4, micro_batch=1, model=LLAMA)
    for losses, weights in pools[4].run(resume_by_engine, before=case, after=case, folder=tmp_path):
        assert losses[0] == losses[1]
        assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_accelerates_plugin_has_no_placement_of_shards():
    from accelerate import FullyShardedDataParallelPlugin

    fields = FullyShardedDataParallelPlugin.__dataclass_fields__
    assert not [name for name in fields if "placement" in name]


def groups_gathered_again(shared: bool) -> int:
    """Count the groups among which two units are gathered again. Runs on each rank."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copy", "part"))
    whole = init_device_mesh("cpu", (dist.get_world_size(),))
    units = [nn.Linear(4, 4), nn.Linear(4, 4)]
    with patches.resharding_over(mesh if shared else None):
        for unit in units:
            fully_shard(unit, mesh=whole, reshard_after_forward=2)
    groups = [unit._get_fsdp_state()._fsdp_param_groups[0] for unit in units]  # type: ignore[operator]
    return len({group.post_forward_mesh_info.shard_process_group.group_name for group in groups})


def test_pytorchs_units_make_groups_of_their_own_to_be_gathered_again(pools: Any) -> None:
    assert pools[4].run(groups_gathered_again, shared=False) == [2] * 4
    assert pools[4].run(groups_gathered_again, shared=True) == [1] * 4
