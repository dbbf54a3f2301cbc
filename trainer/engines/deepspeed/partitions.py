"""The partition of a parameter that a rank has under ZeRO-3."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as functional
from deepspeed.runtime.swap_tensor.partitioned_param_swapper import PartitionedParamStatus
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch.distributed.tensor import DTensor

from trainer.distributed.dtensor import own_rows

ZeroParameter = Any
"""A parameter, to which ZeRO-3 has added `ds_tensor`, its partition, and more."""


def is_apart(parameter: ZeroParameter) -> bool:
    """Return True if each rank has its partition alone, in memory, and not quantized."""
    own = parameter.ds_tensor
    apart = parameter.ds_status == ZeroParamStatus.NOT_AVAILABLE
    here = own.status == PartitionedParamStatus.AVAILABLE
    return apart and here and not hasattr(own, "ds_quant_scale")


def partition_of(parameter: ZeroParameter, value: torch.Tensor) -> torch.Tensor:
    """Return this rank's partition under ZeRO-3 of whole values, in float32, zeros at its end."""
    start = start_of(parameter)
    return padded(parameter, value.flatten()[start : start + parameter.ds_tensor.ds_numel])


def padded(parameter: ZeroParameter, own: torch.Tensor) -> torch.Tensor:
    """Return this rank's values under ZeRO-3 in float32, with zeros to its partition's end."""
    value = own.to(parameter.device, torch.float32)
    return functional.pad(value, (0, parameter.ds_tensor.ds_numel - len(value)))


def start_of(parameter: ZeroParameter) -> int:
    """Return where this rank's partition under ZeRO-3 begins in the flat parameter, in values."""
    return int(parameter.ds_tensor.ds_numel) * dist.get_rank(parameter.ds_process_group)


def rows_of_partition(like: torch.Tensor) -> range:
    """Return the rows of a parameter in which this rank's partition under ZeRO-3 is.

    Of a DTensor, that of experts over several ranks, the rows of this rank's experts.
    """
    if isinstance(like, DTensor) or not like.numel():
        return own_rows(like)
    own = -(-like.numel() // dist.get_world_size())
    each = like[0].numel()
    start = own * dist.get_rank()
    length = len(like)
    return range(min(start // each, length), min(-(-(start + own) // each), length))
