"""Patches of PyTorch's modules, in place: each says its reason and when it can go.

`tests/parallel/test_parallel_patches.py` fails once one of them is no longer needed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import _fully_shard as fsdp_units
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo
from torch.nn.modules.batchnorm import _NormBase

from trainer.distributed.dtensor import local

COUNTS = re.compile(r"((^|_)heads?|^all_head_size|^(embed|inner)_dim|^(hidden|embed)_size)$")
"""The names of what `divide_heads` divides."""


def replace_forward(module: nn.Module, forward: Callable[..., object]) -> None:
    """Replace the forward of a module within its hooks; no parameter changes its name.

    PyTorch 2.15: `checkpoint_wrapper` and `SyncBatchNorm.convert_sync_batchnorm` replace modules;
    the first renames parameters, and both come too late for FSDP, which refers to modules. Can go
    when PyTorch wraps a forward in place.
    """
    module.forward = forward  # type: ignore[method-assign,assignment]


def prepare_compiler() -> None:
    """Set `torch.compile` up for blocks that are compiled one by one; for the whole process.

    PyTorch 2.15: random numbers are others than uncompiled ones; DDP splits each graph, and can't
    where a block is recomputed; a number of a layer makes a graph for each; and 8 variants of a
    block (kinds, shapes, modes) are the most. Can go when `torch.compile` takes these as arguments.
    """
    import torch._dynamo.config
    import torch._inductor.config

    torch._inductor.config.fallback_random = True
    dynamo: Any = torch._dynamo.config
    dynamo.optimize_ddp = False
    dynamo.allow_unspec_int_on_nn_module = True
    dynamo.recompile_limit = max(dynamo.recompile_limit, 64)


@contextmanager
def steady_buckets() -> Iterator[None]:
    """Let DDP that is built in here keep one order of gradients, from the last parameter on.

    PyTorch 2.15: DDP orders them again after its first step, and over three or more ranks the order
    decides how a sum is rounded: a resumed run would differ. So a head that is registered first is
    reduced late. Can go when DDP takes an order.
    """
    kind: Any = nn.parallel.DistributedDataParallel
    plain = kind._ddp_init_helper

    def build(
        replica: Any, given: list[object], sparse: list[bool], names: Any, *more: object
    ) -> None:
        last = len(given) - 1
        names = {last - index: name for index, name in names.items()}
        plain(replica, given[::-1], sparse[::-1], names, *more)
        replica.reducer._push_all_rebuilt_params()
        replica.reducer._rebuild_buckets()

    with mock.patch.object(kind, "_ddp_init_helper", build):
        yield


def keep_last_statistics(module: _NormBase) -> None:
    """Make the running statistics of a norm those of its last forward pass alone.

    PyTorch 2.15: a norm returns its batch's statistics in no other way. Can go when it does.
    """
    module.momentum = 1.0


@contextmanager
def has_rows(table: nn.Embedding, rows: torch.Tensor, padding: int | None) -> Iterator[None]:
    """Let a table look up among these rows of it, of which `padding` gets no gradient.

    PyTorch 2.15: DTensor looks up a part of a table with the whole table's `padding_idx`, and a
    family's own table can't scale what it gives. Can go when both can.
    """
    whole = table._parameters["weight"], table.padding_idx
    vars(table)["padding_idx"] = padding
    table._parameters["weight"] = rows  # type: ignore[assignment]
    try:
        yield
    finally:
        table._parameters["weight"], vars(table)["padding_idx"] = whole


def divide_heads(attention: nn.Module, size: int) -> None:
    """Let a module of attention count the heads, and their widths together, that a rank has.

    transformers 5.24: families without a tensor plan make views by these numbers. Can go when they
    make them by the shape.
    """
    for key, value in vars(attention).items():
        if COUNTS.search(key) and type(value) is int and value % size == 0:
            vars(attention)[key] = value // size


@contextmanager
def has_local_parameters(module: nn.Module) -> Iterator[None]:
    """Let a module have this rank's parts of its parameters as tensors.

    PyTorch 2.15: the code of a model can't compute with a DTensor and a tensor together. Can go
    when it can.
    """
    whole = dict(module._parameters)
    parts = {key: local(value) for key, value in module.named_parameters(recurse=False)}
    module._parameters.update(parts)  # type: ignore[arg-type]
    try:
        yield
    finally:
        module._parameters.update(whole)


def sharding_by(
    of_all: Mapping[str, object], root: nn.Module, of_root: Mapping[str, object]
) -> AbstractContextManager[object]:
    """Give the FSDP2 units that another library makes these options, and the `root` more.

    Accelerate 1.15: it passes no placement, and a few experts are filled up to one for each rank;
    its one policy rounds all that a batch has; it ignores modules, not parameters. Can go when its
    plugin takes a `shard_placement_fn`, `ignored_params` and a policy for the root.
    """
    plain: Any = fsdp.fully_shard

    def chosen(module: nn.Module, **options: object) -> object:
        more = of_root if module is root else {}
        return plain(module, **{**options, **of_all, **more})

    return mock.patch.object(fsdp, "fully_shard", chosen)


@contextmanager
def resharding_over(mesh: DeviceMesh | None) -> Iterator[None]:
    """Let FSDP2 units that are made in here, and resharded to fewer ranks, share this mesh.

    PyTorch 2.15: each unit makes groups of its own, a communicator each, by a call that all ranks
    have to make: pipeline stages with other units would hang. Can go when `fully_shard` takes the
    mesh to reshard to.
    """
    if mesh is None:
        yield
        return
    plain = fsdp_units._get_post_forward_mesh_info
    shared = HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)

    def chosen(reshard: bool | int, whole: FSDPMeshInfo) -> FSDPMeshInfo | None:
        return plain(reshard, whole) if isinstance(reshard, bool) else shared

    with mock.patch.object(fsdp_units, "_get_post_forward_mesh_info", chosen):
        yield


@contextmanager
def has_experts(experts: nn.Module, count: int) -> Iterator[None]:
    """Let a module of experts have this rank's part of its parameters, of `count` experts.

    transformers 5.24: its own expert parallelism sets the same attributes, and loads a model
    whole on each rank. Can go when it splits a model on the meta device.
    """
    other = {name: vars(experts).get(name) for name in ("num_experts", "_is_expert_parallel")}
    vars(experts).update(num_experts=count, _is_expert_parallel=True)
    try:
        with has_local_parameters(experts):
            yield
    finally:
        vars(experts).update(other)
