"""FSDP2 over `shard`, or `replicate` x `shard` (HSDP): units are gathered and reduced at once.

Each block is a unit; so are the tables of embeddings, and the last norm with the head. The root has
what is left, with tables that are tied to the head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.utils._pytree import tree_map

from trainer.distributed.dtensor import local
from trainer.errors import ConfigError, NumericsError, Problem
from trainer.layout import SECONDARY, Layout
from trainer.models.finetuning.quantised.quantised_base import quantised_weights
from trainer.models.names import expert_stacks
from trainer.models.spec import ModelSpec
from trainer.parallel.patches import sharding_by
from trainer.parallel.splits.vocabulary import looks_up
from trainer.tasks.task import ModelWithLoss

FsdpOptions = dict[str, Any]
"""Keyword arguments of PyTorch's `fully_shard`."""

KEEPS_BYTES = "2.15"
"""The first version of PyTorch that was seen to gather bytes as they are under mixed precision."""


class Ends(NamedTuple):
    """The modules before and after the blocks that are units, by name, in the order of calls."""

    tables: tuple[str, ...] = ()
    """Tables of embeddings."""
    head: tuple[str, ...] = ()
    """All that the last block's output goes through: a norm, and the head."""


def policy_of(layout: Layout, reduction: torch.dtype) -> fsdp.MixedPrecisionPolicy:
    """Return FSDP's policy: compute in the layout's precision, reduce in `reduction`."""
    precision = getattr(torch, layout.precision)
    if precision == reduction == torch.float32:
        return fsdp.MixedPrecisionPolicy()
    return fsdp.MixedPrecisionPolicy(param_dtype=precision, reduce_dtype=reduction)


def offload_of(layout: Layout, device: str) -> fsdp.OffloadPolicy:
    """Return FSDP2's policy, one for weights, gradients and optimizer state together."""
    if not layout.offloads:
        return fsdp.OffloadPolicy()
    return fsdp.CPUOffloadPolicy(pin_memory=device != "cpu")


def options_of(
    layout: Layout,
    mesh: DeviceMesh | None,
    device: str,
    reduction: torch.dtype,
    ignored: set[nn.Parameter],
) -> FsdpOptions:
    """Return FSDP's options for a unit, gathered around its forward and its backward pass.

    ZeRO-2 keeps it gathered in between, ZeRO-3 does not (arXiv 2304.11277, section 3.3.1), or
    divides it among fewer ranks (hpZ). The parameters `ignored` are not sharded: each rank keeps
    them whole.
    """
    return {
        "mesh": mesh,
        "reshard_after_forward": layout.regathered or layout.zero_stage == 3,
        "mp_policy": policy_of(layout, reduction),
        "offload_policy": offload_of(layout, device),
        "shard_placement_fn": partial(placement, layout.shard),
        "ignored_params": ignored,
    }


def kept_whole(model: nn.Module, spec: ModelSpec, layout: Layout) -> set[nn.Parameter]:
    """Return the weights of an adapter's base if every rank keeps all of them, as below ZeRO-3.

    FSDP would hold its shard and the gathered copy at once, and gather it for each micro-batch.
    """
    if layout.zero_stage == 3 or layout.offloads:
        return set()
    named = model.named_parameters(remove_duplicate=False)
    return {p for name, p in named if name in spec.training.unsaved and not p.requires_grad}


def check_bytes(module: nn.Module, options: FsdpOptions) -> None:
    """Raise ConfigError if FSDP would cast quantised weights, which are bytes, as it gathers."""
    casts = options["mp_policy"].param_dtype is not None and torch.__version__ < KEEPS_BYTES
    gathered = quantised_weights(module).values()
    ignored = options.get("ignored_params", set())
    if casts and any(weight.data not in ignored for weight in gathered):
        actual = f"FSDP of PyTorch {torch.__version__} casts bytes that it gathers"
        hint = "Take the engine deepspeed, or ZeRO-2 of the engine mesh."
        expected = f"PyTorch {KEEPS_BYTES} or later"
        raise ConfigError(Problem("trainer.adapter.quantize", actual, expected, hint))


def placement(ranks: int, parameter: nn.Parameter) -> Shard | None:
    """Return the dimension along which FSDP divides a parameter; None for the first.

    Parts of the first are filled up to one size. Where this adds a quarter or more, as for a stack
    of 8 experts on 64 ranks, another dimension is divided.
    """
    sizes = local(parameter).shape
    if len(sizes) < 3 or -(-sizes[0] // ranks) * ranks < 1.25 * sizes[0]:
        return None
    return next((Shard(dim) for dim, size in enumerate(sizes) if size % ranks == 0), None)


def refusal(layout: Layout) -> str | None:
    """Return the reason why FSDP2 can't keep a second copy of the weights in a layout, or None."""
    if layout.regathered and layout.tensor > 1:
        parts = "of matrices that tensor parallelism splits"
        hint = f"Set {SECONDARY} to 1, or tensor_parallel.autotp_size to 1."
        return f"FSDP2 keeps no second copy {parts}. {hint}"
    if layout.regathered and layout.float8 != "none":
        hint = f'Set {SECONDARY} to 1, or trainer.float8 to "none".'
        return f"FSDP2 keeps no second copy of weights that it gathers in float8. {hint}"
    return None


def check_second_copies(spec: ModelSpec, layout: Layout) -> None:
    """Raise ConfigError for a block that FSDP2 can't divide again: it does by the first dimension.

    Experts that are divided among ranks are gathered without a second copy there.
    """
    if not layout.regathered:
        return
    model = spec.build()
    stacks = expert_stacks(model, spec.blocks) if layout.expert > 1 else []
    blocks = tuple(f"{name}." for name in spec.blocks)
    divided = tuple(f"{name}." for name in stacks)
    for name, parameter in model.named_parameters():
        ours = name.startswith(blocks) and not name.startswith(divided)
        if ours and placement(layout.shard, parameter) is not None:
            rows = f"{len(parameter)} rows of {name} on {layout.shard} ranks"
            actual = f"{layout.secondary_shard}, with {rows}"
            hint = "Set it to 1, or trainer.mesh.shard to a divisor of the rows."
            expected = "weights whose rows the ranks divide"
            raise ConfigError(Problem(SECONDARY, actual, expected, hint))


def put_back(modules: Iterable[nn.Module]) -> None:
    """Give FSDP's units their own shards, where a pass without a backward pass left others."""
    for module in modules:
        for unit in _units(module):
            unit.reshard()  # type: ignore[operator]


class OneBuffer:
    """The allocator of a unit's gradients on one rank: those to reduce are those reduced.

    FSDP2 allocates the input and fills it, then allocates the output and copies the input to it: on
    one rank 8 bytes a float32 gradient, and the gradients of a unit twice in memory.
    """

    def __init__(self) -> None:
        self._filled: torch.Tensor | None = None

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return a new buffer, and the same one at the next call."""
        buffer = self._filled
        if buffer is not None:
            self._filled = None
            return buffer
        self._filled = torch.empty(size, dtype=dtype, device=device)
        return self._filled

    def __call__(self, *_: object, **__: object) -> None:
        raise NumericsError(Problem("FSDP", "a unit of one rank sends its gradients", "none sent"))


def reduce_in_one_buffer(units: Iterable[nn.Module], mesh: DeviceMesh | None) -> None:
    """Let units that one rank shards alone reduce without a copy; `mesh`: the units', None: all."""
    ranks = dist.get_world_size() if mesh is None else mesh.size(mesh.ndim - 1)
    if ranks > 1:
        return
    for unit in units:
        unit.set_custom_reduce_scatter(OneBuffer())  # type: ignore[operator]


def _units(module: nn.Module) -> set[nn.Module]:
    return {unit for unit in module.modules() if isinstance(unit, fsdp.FSDPModule)}


def apply(
    module: ModelWithLoss,
    spec: ModelSpec,
    ends: Ends,
    options: FsdpOptions,
    wrap_rest: Callable[[nn.Module], object] | None = None,
) -> None:
    """Make units of a model with its loss. Raises NumericsError if a block is none.

    Raises ConfigError for weights that FSDP would cast. `wrap_rest`: another library's way to make
    units of the blocks and of what is none by then.
    """
    check_bytes(module, options)
    divided = _units(module)  # experts, over other ranks
    policy: fsdp.MixedPrecisionPolicy = options["mp_policy"]
    # the root's input is the batch, whose numbers (a reference, a margin) are not to be rounded
    of_root = {"mp_policy": replace(policy, cast_forward_inputs=False)}
    _wrap_ends(module.model, ends, options)
    if wrap_rest is not None:
        own = "shard_placement_fn", "ignored_params", "reshard_after_forward"
        with sharding_by({key: options[key] for key in own}, module, of_root):
            wrap_rest(module)
    else:
        for name in spec.blocks:
            fully_shard(module.model.get_submodule(name), **options)
        fully_shard(module, **options | of_root)
    if policy.param_dtype is not None:
        cast = partial(_cast_inputs, policy.param_dtype)
        module.model.register_forward_pre_hook(cast, with_kwargs=True)
    check_units(module, spec)
    reduce_in_one_buffer(_units(module) - divided, options["mesh"])
    root: Any = module
    root.set_reshard_after_forward(False, recurse=False)
    prefetch(module, spec, ends)


def _cast_inputs(
    dtype: torch.dtype, model: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
) -> tuple[tuple[object, ...], dict[str, object]]:
    """Return the inputs of a model in the precision in which it computes."""

    def cast(value: object) -> object:
        is_float = torch.is_tensor(value) and value.is_floating_point()
        return value.to(dtype) if is_float else value  # type: ignore[attr-defined]

    return tree_map(cast, (args, kwargs))  # type: ignore[no-any-return]


def _wrap_ends(model: nn.Module, ends: Ends, options: FsdpOptions) -> None:
    """Make units of the tables, and of the last norm with the head, where this stage has them.

    The backward pass needs no table, and begins with the head: neither is gathered for it.
    """
    modules = dict(model.named_modules())  # a stand-in of a stage may be for several
    for names in ends.tables, ends.head:
        unit = [modules[name] for name in names if name in modules]
        unit = [module for module in unit if any(True for _ in module.parameters())]
        if not unit:
            continue
        first: Any = unit[0]
        unread = names is ends.tables and all(map(looks_up, unit))
        own = options.copy()
        if names is ends.head:
            own["reshard_after_forward"] = False
        elif unread:  # no second copy for a backward pass that needs none
            own["reshard_after_forward"] = bool(options["reshard_after_forward"])
        fully_shard(unit if len(unit) > 1 else first, **own)
        if unread:
            first.set_unshard_in_backward(False)


def prefetch(module: nn.Module, spec: ModelSpec, ends: Ends) -> None:
    """Launch the all-gather of each unit before the products of the unit before it.

    FSDP2 does so in the backward pass; in the forward pass it does after them, which hides the
    gather only while the host is ahead of the device.
    """
    modules = dict(module.named_modules())  # a stage has not all
    names = (*ends.tables[-1:], *spec.blocks, *ends.head[:1])
    order = [m for n in names for m in modules.get(f"model.{n}", nn.Module()).modules()]
    for unit, following in pairwise(unit for unit in order if isinstance(unit, fsdp.FSDPModule)):
        unit.set_modules_to_forward_prefetch([following])


def check_units(module: nn.Module, spec: ModelSpec) -> None:
    """Raise NumericsError unless every block is an FSDP unit: one unit would gather all at once."""
    units = {name for name, inner in module.named_modules() if isinstance(inner, fsdp.FSDPModule)}
    missing = [name for name in spec.blocks if f"model.{name}" not in units]
    if missing:
        count = f"{len(missing)} of {len(spec.blocks)} blocks"
        actual = f"{count} are no unit of their own ({missing[0]}, ...)"
        raise NumericsError(Problem("FSDP", actual, "one unit per block"))
