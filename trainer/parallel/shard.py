"""FSDP2 over `shard`, or `replicate` x `shard` (HSDP): units are gathered and reduced at once.

Each block is a unit; so are the tables of embeddings, and the last norm with the head. The root has
what is left, with tables that are tied to the head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.nn.parameter import UninitializedParameter

from trainer.distributed.dtensor import local
from trainer.errors import ConfigError, NumericsError, Problem, named_line
from trainer.layout import Layout
from trainer.models.cut import of_tokens, owns_parameters, runs_outside
from trainer.models.materialise import on_host
from trainer.models.names import outermost
from trainer.models.spec import ModelSpec, Trial
from trainer.parallel.patches import sharding_by
from trainer.parallel.splits.vocabulary import looks_up
from trainer.tasks.task import ModelWithLoss


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
    layout: Layout, mesh: DeviceMesh | None, device: str, reduction: torch.dtype
) -> dict[str, Any]:
    """Return FSDP's options for a unit, gathered around its forward and its backward pass.

    ZeRO-2 keeps it gathered in between, ZeRO-3 does not (arXiv 2304.11277, section 3.3.1).
    """
    return {
        "mesh": mesh,
        "reshard_after_forward": layout.zero_stage == 3,
        "mp_policy": policy_of(layout, reduction),
        "offload_policy": offload_of(layout, device),
        "shard_placement_fn": partial(placement, layout.shard),
    }


def placement(ranks: int, parameter: nn.Parameter) -> Shard | None:
    """Return the dimension along which FSDP divides a parameter; None for the first.

    Parts of the first are filled up to one size. Where this adds a quarter or more, as for a stack
    of 8 experts on 64 ranks, another dimension is divided.
    """
    sizes = local(parameter).shape
    if len(sizes) < 3 or -(-sizes[0] // ranks) * ranks < 1.25 * sizes[0]:
        return None
    return next((Shard(dim) for dim, size in enumerate(sizes) if size % ranks == 0), None)


def apply(
    module: ModelWithLoss,
    spec: ModelSpec,
    ends: Ends,
    options: dict[str, Any],
    wrap_rest: Callable[[nn.Module], Any] | None = None,
) -> None:
    """Make units of a model with its loss. Raises NumericsError if a block is none.

    `wrap_rest`: another library's way to make units of the blocks and of what is none by then.
    """
    _wrap_ends(module.model, ends, options)
    if wrap_rest is not None:
        with sharding_by(options["shard_placement_fn"]):
            wrap_rest(module)
    else:
        for name in spec.blocks:
            fully_shard(module.model.get_submodule(name), **options)
        fully_shard(module, **options)
    check_units(module, spec)
    root: Any = module
    root.set_reshard_after_forward(False, recurse=False)
    prefetch(module, spec, ends)


def _wrap_ends(model: nn.Module, ends: Ends, options: dict[str, Any]) -> None:
    """Make units of the tables, and of the last norm with the head, where this stage has them.

    The backward pass needs no table, and begins with the head: neither is gathered for it.
    """
    modules = dict(model.named_modules())  # a stand-in of a stage may be for several
    for names, more in (ends.tables, {}), (ends.head, {"reshard_after_forward": False}):
        unit = [modules[name] for name in names if name in modules]
        unit = [module for module in unit if any(True for _ in module.parameters())]
        if not unit:
            continue
        first: Any = unit[0]
        fully_shard(unit if len(unit) > 1 else first, **{**options, **more})
        if names is ends.tables and all(map(looks_up, unit)):
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


def ends_of(spec: ModelSpec, layout: Layout) -> tuple[Ends, tuple[str, ...]]:
    """Find the ends of a model on its tiny copy, with a note if they are not fit to be units.

    There are none if the two share a parameter: the root has it.
    """
    if layout.zero_stage == 0 or spec.tiny.copy is None:
        return Ends(), ()
    reason = "the model uses their weights elsewhere"
    try:
        small = spec.tiny.copy()
        trial, model = small.tiny.input or of_tokens(small), on_host(small).eval()
        called, _, output = runs_outside(model, small, trial)
        own = {name: model.get_submodule(name) for name in called}
        own = {name: module for name, module in own.items() if owns_parameters(module)}
        ends = Ends(
            tuple(n for n in own if called[n] == ["before"] and isinstance(own[n], nn.Embedding)),
            tuple(outermost([name for name in own if called[name] == ["after"]])),
        )
        ties = [(_end(ends, alias), _end(ends, name)) for alias, name in spec.tied.items()]
        if any(one != other for one, other in ties):
            return Ends(), ()
        if _are_units(small, trial, ends, output):
            return ends, ()
    except Exception as error:  # whatever a module's own code raises, as where a weight is empty
        reason = f"{reason} ({named_line(error, 80)})"
    return Ends(), (f"FSDP: embedding and head are in the unit of the root: {reason}",)


def _end(ends: Ends, name: str) -> int | None:
    """Return the index of the end that has a parameter, or None."""
    starts = [tuple(f"{module}." for module in end) for end in ends]
    return next((index for index, own in enumerate(starts) if name.startswith(own)), None)


def _are_units(spec: ModelSpec, trial: Trial, ends: Ends, expected: torch.Tensor) -> bool:
    """Return True if the ends' weights are needed only while each runs, and the head sees all.

    Outside, a weight has another dtype, as that of a shard is. FSDP reduces the unit of the head
    when the gradient of its input is there: so nothing may pass by its first module.
    """
    model = on_host(spec).eval()
    rest = [p for name, p in model.named_parameters() if _end(ends, name) != 1]
    _have_weights_while_running(model, (*ends.tables, *ends.head), dtype=torch.float64)
    if ends.head:
        first = model.get_submodule(ends.head[0])
        first.register_forward_hook(lambda module, inputs, found: found.detach().requires_grad_())
    output = trial.output(model)
    if ends.head:
        output.sum().backward()
    return torch.equal(output, expected) and not any(p.grad is not None for p in rest)


def check_shardable(spec: ModelSpec, layout: Layout) -> None:
    """Raise ConfigError for a model that FSDP2 can't gather block by block."""
    if layout.zero_stage == 0:
        return
    blocks = tuple(f"{block}." for block in spec.blocks)
    shared = [
        f"{alias} is one with {name}"
        for alias, name in spec.tied.items()
        if alias.startswith(blocks) or name.startswith(blocks)
    ]
    expected, stages = "blocks that share nothing", ""
    if not spec.blocks:
        reason, expected = "no blocks were found", "a model of repeated blocks"
        stages = " (stages 1 and 2)"
    elif shared:
        reason = shared[0]
    elif spec.tiny.input and _uses_weights_outside(spec, spec.tiny.input):
        reason = "a block's weight is used outside it"
    else:
        return
    place = f"zero_optimization.stage: {spec.name}"
    seen = f"FSDP2 shards block by block, and {reason}"
    hint = f'Set zero_optimization.stage to 0, or trainer.engine to "deepspeed"{stages}.'
    raise ConfigError(Problem(place, seen, expected, hint))


def _uses_weights_outside(spec: ModelSpec, trial: Trial) -> bool:
    """Return True if a forward pass fails when each block has its parameters only while it runs."""
    model = on_host(spec)
    _have_weights_while_running(model, spec.blocks)
    try:
        with torch.no_grad():
            trial.output(model.eval())
    except Exception:  # whatever a module's own code raises
        return True
    return False


def _have_weights_while_running(model: nn.Module, names: Iterable[str], **kind: Any) -> None:
    """Take the parameters of these modules away but while each runs: empty ones stand there.

    `kind`: options of the empty ones.
    """
    for name in names:
        unit = model.get_submodule(name)
        own = [(inner, dict(inner._parameters)) for inner in unit.modules()]
        empty = [
            (inner, {k: UninitializedParameter(**kind) for k, p in of.items() if p is not None})
            for inner, of in own
        ]

        def put(*_: Any, parts: Any) -> None:
            for inner, parameters in parts:
                inner._parameters.update(parameters)

        put(parts=empty)
        unit.register_forward_pre_hook(partial(put, parts=own))
        unit.register_forward_hook(partial(put, parts=empty))


def check_units(module: nn.Module, spec: ModelSpec) -> None:
    """Raise NumericsError unless every block is an FSDP unit: one unit would gather all at once."""
    units = {name for name, inner in module.named_modules() if isinstance(inner, fsdp.FSDPModule)}
    missing = [name for name in spec.blocks if f"model.{name}" not in units]
    if missing:
        count = f"{len(missing)} of {len(spec.blocks)} blocks"
        seen = f"{count} are no unit of their own ({missing[0]}, ...)"
        raise NumericsError(Problem("FSDP", seen, "one unit per block"))
