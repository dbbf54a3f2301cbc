"""Give a module on the meta device its values, a unit at a time (contract 4).

No more than one unit is whole at any time if `after_unit` shards each as it comes (ZeRO-3).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from trainer.distributed.dtensor import own_shard
from trainer.distributed.seeding import seeded_init
from trainer.errors import ConfigError, Problem
from trainer.models.spec import ModelSpec, NoWeights, units


def materialise(
    root: nn.Module,
    spec: ModelSpec,
    *,
    seed: int,
    device: torch.device,
    dtype: torch.dtype,
    storage: torch.device | None = None,
    base_dtype: torch.dtype | None = None,
    after_unit: Callable[[nn.Module, list[nn.Parameter]], None] = lambda module, parameters: None,
) -> None:
    """Give every parameter and buffer of `root` its value: pretrained where there is one, else
    initial.

    Initial values depend on `seed` and the module's name alone. Of a DTensor parameter, this
    process keeps its own shard, and reads no more than that of a pretrained one. Parameters live on
    `storage`, or on `device` if that is None. `base_dtype` is the dtype of those that checkpoints
    leave out. `after_unit` is called with each unit and its new parameters, in order; they may be
    empty shards afterwards. Raises ConfigError if the pretrained weights lack a parameter or have
    it in another shape.
    """
    made: dict[nn.Parameter, nn.Parameter] = {}  # meta -> real: a tied parameter is made once
    missing: list[Problem] = []
    named = root.named_parameters(remove_duplicate=False) if base_dtype else ()
    base = {parameter for name, parameter in named if name in spec.training.unsaved}
    for unit in units(root, spec.blocks):
        whole: dict[nn.Parameter, nn.Parameter] = {}  # parameters of this unit, meta -> value
        for name, module in unit:
            _allocate(name, module, spec, made, whole, missing)
        for name, module in unit:
            held = {**module._parameters, **module._buffers}
            before = {key: tensor._version for key, tensor in held.items() if tensor is not None}
            with torch.no_grad(), seeded_init(seed, name):
                spec.initialise(root, name)
                for key, version in before.items():
                    _fill_untouched(
                        f"{name}.{key}".lstrip("."), module, key, held[key], version, spec, missing
                    )
        own = {
            value: _own(
                value, meta, storage or device, base_dtype if base_dtype and meta in base else dtype
            )
            for meta, value in whole.items()
        }
        made |= {meta: own[value] for meta, value in whole.items()}
        for _, module in unit:
            module._parameters.update(
                {k: own[value] for k, value in module._parameters.items() if value in own}
            )
            module._buffers.update(
                {key: b.to(device) for key, b in module._buffers.items() if b is not None}
            )
        after_unit(unit[-1][1], list(own.values()))
    if missing:
        raise ConfigError(*missing)


def _allocate(
    name: str,
    module: nn.Module,
    spec: ModelSpec,
    made: dict[nn.Parameter, nn.Parameter],
    whole: dict[nn.Parameter, nn.Parameter],
    missing: list[Problem],
) -> None:
    for key, parameter in module._parameters.items():
        if parameter is None:
            continue
        if parameter not in made and parameter not in whole:
            whole[parameter] = _filled(f"{name}.{key}".lstrip("."), parameter, spec, missing)
        module._parameters[key] = made[parameter] if parameter in made else whole[parameter]
    for key, buffer in module._buffers.items():
        if buffer is not None and buffer.is_meta:
            module._buffers[key] = _buffer(f"{name}.{key}".lstrip("."), buffer, spec)


def _filled(name: str, meta: nn.Parameter, spec: ModelSpec, missing: list[Problem]) -> nn.Parameter:
    value = spec.weights.read(name)
    if (
        value is None
        and not isinstance(spec.weights, NoWeights)
        and name not in spec.training.fresh
    ):
        missing.append(
            Problem(
                f"{spec.name}: {name}", "absent from the weights", "every parameter of the model"
            )
        )
    elif value is not None and value.shape != meta.shape:
        missing.append(
            Problem(f"{spec.name}: {name}", f"shape {tuple(value.shape)}", f"{tuple(meta.shape)}")
        )
        value = None
    dtype = meta.dtype if meta.dtype.is_floating_point else torch.float32
    # a pretrained value stays mapped from its file until it is known which part this process keeps
    data = torch.empty(meta.shape, dtype=dtype) if value is None else value
    parameter = nn.Parameter(data, requires_grad=meta.requires_grad)
    # transformers' initialisers leave a tensor with this mark alone
    parameter._is_hf_initialized = value is not None  # type: ignore[attr-defined]
    return parameter


def _own(
    value: nn.Parameter, meta: nn.Parameter, storage: torch.device, dtype: torch.dtype
) -> nn.Parameter:
    """Return the parameter that this process keeps: of a DTensor, the shard that its placements
    give it.
    """
    if isinstance(meta, DTensor):
        # `from_local` would move offloaded parameters to the mesh's device
        kept: torch.Tensor = torch.empty_like(meta.detach(), dtype=dtype, device=storage)
        cast(DTensor, kept).to_local().copy_(own_shard(value.detach(), meta))
        parameter = nn.Parameter(kept, requires_grad=value.requires_grad)
    else:
        parameter = value
        parameter.data = value.data.to(storage, dtype)
    # a tied parameter keeps its first module's values: at the second, it may be an empty shard
    parameter._is_hf_initialized = True  # type: ignore[attr-defined]
    return parameter


def _buffer(name: str, meta: torch.Tensor, spec: ModelSpec) -> torch.Tensor:
    value = spec.weights.read(name)
    buffer = torch.zeros_like(meta, device="cpu") if value is None else value
    # transformers' initialisers leave a tensor with this mark alone
    buffer._is_hf_initialized = value is not None  # type: ignore[attr-defined]
    return buffer


def _fill_untouched(
    name: str,
    module: nn.Module,
    key: str,
    old: Any,
    version: int,
    spec: ModelSpec,
    missing: list[Problem],
) -> None:
    """Fill a tensor that the family's initialisation did not write with the constructor's value of
    it.
    """
    tensor = {**module._parameters, **module._buffers}.get(key)
    if (
        tensor is not old
        or tensor._version != version
        or getattr(tensor, "_is_hf_initialized", False)
    ):
        return
    value = spec.constructed(name)
    if value is not None and value.shape == tensor.shape and not value.is_meta:
        tensor.copy_(value)
    elif isinstance(tensor, nn.Parameter) and callable(
        reset := getattr(module, "reset_parameters", None)
    ):
        reset()
    else:
        missing.append(_uninitialised(spec, name))


def _uninitialised(spec: ModelSpec, name: str) -> Problem:
    return Problem(
        f"{spec.name}: {name}",
        "the model's own initialisation leaves it empty when it is built on the meta device",
        "a tensor that `_init_weights` fills, or one that is stored with the weights",
    )


# Tensors as a constructor makes them

SMALL = 65_536
"""The most values of a tensor that is made as the model's constructor makes it."""


def built_tensor(build: Callable[[], nn.Module], name: str) -> torch.Tensor | None:
    """Return a tensor as `build` makes it; None if it, or one it is computed from, has over SMALL
    values.
    """
    return _all(build).get(name)


@cache
def _all(build: Callable[[], nn.Module]) -> Mapping[str, torch.Tensor]:
    with torch.random.fork_rng(devices=[]), _BuiltOnHost():
        torch.default_generator.manual_seed(0)
        try:
            model = build()
        except Exception:  # small and large tensors may not go together
            return {}
    return {
        name: t.detach()
        for name, t in (*model.named_parameters(), *model.named_buffers())
        if not t.is_meta
    }


class _BuiltOnHost(TorchFunctionMode):
    """A mode in which small tensors for the meta device are made on the CPU instead."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        asked = kwargs.get("device")
        small = torch.is_tensor(result) and result.numel() <= SMALL
        on_meta = asked is not None and torch.device(asked).type == "meta"
        return func(*args, **{**kwargs, "device": "cpu"}) if on_meta and small else result
