"""Whole tensors gathered from shards on devices, a buffer at a time, as in a save."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch


def gathered(
    sizes: tuple[int, ...], names: tuple[str, ...], shape: tuple[int, ...], buffer: int
) -> list[int]:
    """Return the owners that got a whole tensor cut over a mesh. Runs on each rank."""
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    from trainer.distributed.dtensor import gather_by_device

    torch.manual_seed(0)
    layer = nn.Sequential(
        nn.Linear(shape[1], shape[0], bias=True), nn.Linear(shape[0], shape[1], bias=False)
    )
    expected = {name: p.detach().clone() for name, p in layer.named_parameters()}
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    if "tensor" in names:
        parallelize_module(layer, mesh["tensor"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(layer, mesh=mesh[tuple(name for name in names if name != "tensor")])
    whole = []
    for owner in range(dist.get_world_size()):
        for name, parameter in layer.named_parameters():
            with patch("trainer.distributed.dtensor.BUFFER_BYTES", buffer):
                value = gather_by_device(parameter, owner, dist.get_rank())
            if value is not None:
                assert torch.equal(value, expected[name]), name
                whole.append(owner)
    return whole


MESHES = {
    "shard": ((4,), ("shard",)),
    "HSDP": ((2, 2), ("replicate", "shard")),
    "shard x tensor": ((2, 2), ("shard", "tensor")),
}


@pytest.mark.parametrize("buffer", [24, 1 << 20])
@pytest.mark.parametrize("name", MESHES)
def test_the_owner_has_the_whole_on_its_host(pools, name, buffer):
    sizes, names = MESHES[name]
    # ten rows over four ranks are 3 + 3 + 3 + 1, and six over four leave one rank without any
    for shape in ((10, 6), (6, 10)):
        found = pools[4].run(gathered, sizes=sizes, names=names, shape=shape, buffer=buffer)
        assert found == [[rank] * 3 for rank in range(4)]
