"""One rank of a simulated cluster: a fake process group, fake tensors and patched libraries.

A tensor has a shape, a dtype and a storage size, but no values. A value read on the host is 1 or
True.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes

from trainer.distributed.context_ranks import ContextRanks
from trainer.distributed.dtensor import coordinate_in
from trainer.distributed.ranks import Ranks
from trainer.engines import owners
from trainer.models.cut import StageBoundary, StageInput, cut, kept_for_the_head
from trainer.models.spec import ModelSpec
from trainer.parallel import gradients, parallel_mesh
from trainer.parallel.splits import expert_ranks
from trainer.parallel.splits.expert_ranks import SplitSizes
from trainer.probes.dispatch_modes import HostReads
from trainer.tasks.attention import Attention
from trainer.tasks.kernels import kernel_chooser
from trainer.tasks.mixers import Mixers, run_by_document
from trainer.tools.planner.fakes.messages import place
from trainer.tools.planner.fakes.replicas_by_buckets import BucketedReplica
from trainer.tools.planner.routing import share_of_tokens

T = TypeVar("T")
aten = torch.ops.aten


MUON = "deepspeed.runtime.zero.muon.muon_optimizer"
"""DeepSpeed's Muon, which is unsupported here, and takes seconds to import in each process."""


class PretendRanks(Ranks):
    """A group of ranks in which every peer is taken to have the same values as this one."""

    def on_host(self) -> Ranks:
        return self

    def gather(self, value: T) -> list[T]:
        return [value] * self.world_size

    def send(self, source: int, value: T) -> T:
        return value

    def _least(self, number: int) -> int:
        return number

    def on_first(self, work: Callable[[], T]) -> T:
        with _disable_current_modes():  # with values and unrecorded: trials run on the host
            return work()

    await_first = on_own = on_first


def real(function: Callable[..., T]) -> Callable[..., T]:
    """Wrap `function` so that tensors made in it have values."""
    return unset_fake_temporarily()(function)  # type: ignore[no-any-return]


@contextmanager
def pretending(
    rank: int,
    world_size: int,
    local_world_size: int,
    *,
    deepspeed: Callable[[], torch.Tensor] | None = None,
) -> Iterator[PretendRanks]:
    """Act as rank `rank` of `world_size`, with `local_world_size` ranks in a node, on fake tensors.

    `deepspeed`: if that is the engine, makes the hidden state that the rank's stage receives for a
    micro-batch; with it, DeepSpeed is patched too. Raises RuntimeError if a process group exists
    already.
    """
    if dist.is_initialized():
        raise RuntimeError("a process that is one of several can't pretend to be another")
    environment = {
        "RANK": rank,
        "LOCAL_RANK": rank % local_world_size,
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": local_world_size,
        "LOCAL_SIZE": local_world_size,
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": 1,
        "OMP_NUM_THREADS": 1,  # else Accelerate sets more, which a forked process does not have
    }
    written = {key: str(value) for key, value in environment.items()}
    muon = SimpleNamespace(MuonWithAuxAdam=type("Muon", (), {}))
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, written))
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
        stack.callback(dist.destroy_process_group)
        stack.enter_context(mock.patch.dict(sys.modules, {MUON: muon}))
        for owner, name, value in _replacements(deepspeed):
            stack.enter_context(mock.patch.object(owner, name, value))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(HostReads(place))
        yield PretendRanks(rank, world_size)


def _replacements(
    deepspeed: Callable[[], torch.Tensor] | None,
) -> Iterator[tuple[object, str, object]]:
    """Yield owner, name and replacement of each function whose result depends on values."""
    for name in ("__init__", "__getitem__", "_flatten", "__hash__", "__eq__"):
        yield DeviceMesh, name, real(getattr(DeviceMesh, name))
    yield DeviceMesh, "mesh", property(real(vars(DeviceMesh)["mesh"].fget))
    for function in (
        init_device_mesh,
        parallel_mesh.expert_mesh,
        parallel_mesh.secondary_mesh,
        parallel_mesh.ranks_along,
        gradients.ends,
        coordinate_in,
    ):
        yield from _everywhere(function, real(function))
    yield expert_ranks, "split_sizes", partial(_even, expert_ranks.split_sizes)
    yield from _everywhere(kernel_chooser, _kernels)
    yield from _everywhere(run_by_document, partial(_by_document, run_by_document))
    if deepspeed is not None:
        yield from _in_deepspeed(deepspeed)
    tables = _TiedTables()
    yield from _everywhere(cut, tables.cut)
    yield from _everywhere(gradients.on_both, tables.on_both)
    yield from _everywhere(nn.parallel.DistributedDataParallel, BucketedReplica)
    own_stage = lambda local, mesh: dict.fromkeys(local, mesh.rank("pipeline"))  # noqa: E731
    yield from _everywhere(owners.owning_stages, own_stage)
    # it draws until all values are within bounds
    yield nn.init, "_no_grad_trunc_normal_", lambda tensor, *_, **__: tensor
    yield nn.Module, "_apply", _apply
    yield dist, "all_gather_object", _all_gather_object
    yield dist, "broadcast_object_list", lambda objects, *_, **__: None
    yield dist, "barrier", lambda *_, **__: None


def _even(
    read: Any, ours: torch.Tensor, theirs: torch.Tensor, chosen: torch.Tensor, experts: int
) -> SplitSizes:
    """Return the sizes of a layer's exchanges that are expected for a uniform router, rounded up.

    The host reads as it would.
    """
    ranks = len(read(ours, theirs, chosen, experts).sent)
    rows = math.ceil(len(chosen) * share_of_tokens(experts, chosen.shape[1], ranks))
    return SplitSizes([rows] * ranks, [rows] * ranks, chosen.numel())


def _kernels(
    attention: Callable[[], Attention], device: torch.device, ranks: ContextRanks | None
) -> Callable[..., str]:
    """Choose the kernel by cu_seqlens if the model supports a GPU's kernels, else the mask.

    A GPU's other kernels keep as many bytes as that by cu_seqlens.
    """
    with _disable_current_modes():
        kernel = "mask" if attention().refusal else "cu_seqlens"
    return lambda *_: kernel


def _by_document(
    change: Callable[..., None], model: nn.Module, mixers: Callable[[], Mixers]
) -> None:
    """Run layers with state by document; the trial that detects them runs with values."""
    with _disable_current_modes():
        mixers()
    change(model, mixers)


class _TiedTables:
    """The tied tables that both ends of a pipeline have, derived from the cut, not by messages."""

    def __init__(self) -> None:
        self._both: set[str] = set()
        self._plain = cut  # the name is replaced here, too

    def cut(
        self, model: nn.Module, spec: ModelSpec, boundary: StageBoundary, blocks: range
    ) -> StageInput:
        kept = kept_for_the_head(spec, boundary)
        owners_kept = [name for name in spec.tied.values() if name.rpartition(".")[0] in kept]
        self._both = {f"model.{name}" for name in owners_kept}
        return self._plain(model, spec, boundary, blocks)

    def on_both(self, pair: object, names: Iterable[str]) -> list[str]:
        return sorted(self._both & set(names)) if pair is not None else []


def _in_deepspeed(hidden: Callable[[], torch.Tensor]) -> Iterator[tuple[object, str, object]]:
    from deepspeed.accelerator import get_accelerator
    from deepspeed.comm.torch import build_shm_op
    from deepspeed.ops.op_builder.builder import OpBuilder
    from deepspeed.runtime.comm import coalesced_collectives
    from deepspeed.runtime.pipe.engine import PipelineEngine
    from deepspeed.runtime.utils import CheckOverflow, is_invalid_grad_norm
    from deepspeed.runtime.zero import stage3, stage_1_and_2

    from trainer.tools.planner.fakes import patches

    yield from patches.replacements()
    yield from _everywhere(coalesced_collectives.reduce_scatter_coalesced, patches.reduce_scatter)
    yield from _everywhere(build_shm_op, lambda: None)
    yield from _everywhere(stage3.assert_ints_same_as_other_ranks, lambda values: None)
    yield from _everywhere(is_invalid_grad_norm, lambda norm: False)
    optimizers = stage3.DeepSpeedZeroOptimizer_Stage3, stage_1_and_2.DeepSpeedZeroOptimizer
    for kind in (*optimizers, CheckOverflow):
        yield kind, "has_overflow", _never(kind.has_overflow)
    yield CheckOverflow, "check_using_norm", _never(CheckOverflow.check_using_norm)
    # its own kernels write in place and allocate nothing
    yield OpBuilder, "load", lambda *_, **__: mock.MagicMock()
    yield type(get_accelerator()), "is_fp16_supported", lambda _: True  # the plan is for a GPU
    # a stage receives the shape of its input from the stage before
    yield PipelineEngine, "_recv_tensor_meta", lambda *_: hidden()
    yield PipelineEngine, "_send_tensor_meta", lambda *_: None


def _everywhere(function: object, other: object) -> Iterator[tuple[object, str, object]]:
    """Yield a replacement of `function` under each name by which a module refers to it."""
    for module in list(sys.modules.values()):
        known = getattr(module, "__dict__", {}).items()
        yield from [(module, name, other) for name, value in known if value is function]


def _never(function: Callable[..., object]) -> Callable[..., bool]:
    """Wrap `function`, which asks the other ranks, so that the answer is always False."""

    def answer(*arguments: object, **options: object) -> bool:
        function(*arguments, **options)
        return False

    return answer


def _apply(
    module: nn.Module, function: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
) -> nn.Module:
    """Run `nn.Module._apply` in place: PyTorch swaps tensors, which fails for fake ones."""
    for inner in module.modules() if recurse else [module]:
        for tensor in (*inner._parameters.values(), *inner._buffers.values()):
            if tensor is not None and (other := function(tensor.detach())) is not tensor:
                tensor.data = other
    return module


def _all_gather_object(results: list[object], value: object, group: object = None) -> None:
    results[:] = [value] * len(results)


@contextmanager
def resizes_reported(report: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """Call `report` with each storage that is resized: no dispatch mode sees that.

    FSDP frees and gathers its units by resizing. DTensor's sharding propagation is hidden from
    dispatch modes, as it makes fake tensors of the whole shape. Can go when a dispatch mode sees
    resizing, and does not see the propagation.
    """
    plain = torch.UntypedStorage.resize_
    propagate = ShardingPropagator._propagate_tensor_meta_non_cached

    def resize(storage: torch.UntypedStorage, size: int) -> object:
        resized = plain(storage, size)
        report(storage)
        return resized

    def paused(*arguments: Any, **options: Any) -> object:
        with _disable_current_modes():
            return propagate(*arguments, **options)

    with (
        mock.patch.object(torch.UntypedStorage, "resize_", resize),
        mock.patch.object(ShardingPropagator, "_propagate_tensor_meta_non_cached", paused),
    ):
        yield
