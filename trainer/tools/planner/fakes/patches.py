"""Patches of DeepSpeed 0.18 and 0.19 in a simulation: ZeRO-3's collectives without a view per rank.

Symptom: the views, thousands per parameter on a thousand ranks, take minutes. The messages and the
sizes of tensors stay those of `all_gather_coalesced` (deepspeed/runtime/zero/partition_parameters)
and `reduce_scatter_coalesced` (deepspeed/runtime/comm/coalesced_collectives). Can go when neither
loops over the ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.runtime.comm import coalesced_collectives
from deepspeed.runtime.zero import partition_parameters

CLOSURES = ("func", "_all_gather_coalesced", "_all_gather_dtype")
"""The way from a parameter's `all_gather_coalesced` to `_all_gather_dtype`, closure by closure."""


class GatheredAtOnce(partition_parameters.AllGatherCoalescedHandle):  # type: ignore[misc]
    """The handle of parameters being gathered; `partitions` is one buffer for all of them."""

    def wait(self, handle_dependency: bool = True) -> None:
        if self.complete:  # type: ignore[has-type]
            return
        self.allgather_handle.wait()
        for parameter in self.params:
            whole = self.partitions.new_empty(parameter.ds_numel)
            parameter.data = whole.view(parameter.ds_shape).to(parameter.ds_tensor.dtype)
            parameter.ds_status = partition_parameters.ZeroParamStatus.AVAILABLE
        self.complete = True


def gather(
    params: list[Any], world_size: int, rank: int, group: object, dtype: torch.dtype
) -> GatheredAtOnce:
    """Replace `_all_gather_dtype`: gather partitions by one message, into one flat buffer."""
    size = sum(parameter.ds_tensor.ds_numel for parameter in params)
    whole = torch.empty(size * world_size, dtype=dtype, device=params[0].ds_tensor.device)
    own = whole.narrow(0, size * rank, size)
    torch.cat([parameter.ds_tensor.to(dtype) for parameter in params], out=own)
    handle = partition_parameters._dist_allgather_fn(own, whole, group)
    return GatheredAtOnce(handle, params, whole, world_size)


@torch.no_grad()
def reduce_scatter(
    tensors: list[torch.Tensor], group: dist.ProcessGroup | None = None
) -> list[torch.Tensor]:
    """Replace `reduce_scatter_coalesced`; return this rank's flat part of each tensor."""
    world_size = dist.get_world_size(group)
    rank = dist.get_rank(group)
    sizes = [math.ceil(tensor.numel() / world_size) for tensor in tensors]
    whole = tensors[0].view(-1)
    if len(tensors) > 1 or whole.numel() % world_size:
        whole = whole.new_empty(sum(sizes) * world_size)
    own = whole.narrow(0, sum(sizes) * rank, sum(sizes))
    coalesced_collectives._torch_reduce_scatter_fn(whole, own, group=group)
    parts = []
    offset = 0
    for tensor, size in zip(tensors, sizes, strict=True):
        parts.append(own.narrow(0, offset, max(0, min(size, tensor.numel() - rank * size))))
        offset += size
    return parts


def replacements() -> Iterator[tuple[object, str, object]]:
    """Yield owner, name and replacement of the function that gives parameters their `gather`."""
    plain = partition_parameters.Init._convert_to_deepspeed_param

    def convert(init: object, parameter: Any) -> None:
        plain(init, parameter)
        function: Any = parameter.all_gather_coalesced
        for name in CLOSURES:
            cell = function.__closure__[function.__code__.co_freevars.index(name)]
            function = cell.cell_contents
        cell.cell_contents = gather

    yield partition_parameters.Init, "_convert_to_deepspeed_param", convert
