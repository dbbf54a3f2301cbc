"""From a module on the meta device to one with values, a unit at a time (contract 4).

No more than one unit is whole at any moment when `place` takes each away as it comes (ZeRO-3, FSDP).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from trainer.errors import ConfigError, Problem
from trainer.models.parts import own_part
from trainer.models.spec import ModelSpec, NoWeights, units
from trainer.seeding import seeded_init


def materialise(
    root: nn.Module,
    spec: ModelSpec,
    *,
    seed: int,
    device: torch.device,
    dtype: torch.dtype,
    home: torch.device | None = None,
    place: Callable[[nn.Module, list[nn.Parameter]], None] = lambda module, parameters: None,
) -> None:
    """Give every parameter and buffer of `root` its value: pretrained where there is one, else initial.

    Initial values depend on `seed` and the module's name alone. Of a parameter that is a DTensor this process keeps
    its own part, and reads no more than that of a pretrained one. `home` is where parameters live if not on `device`.
    `place` is called with each unit and its new parameters, in order; afterwards they may be empty shards.
    Raises ConfigError if a pretrained model lacks a parameter or has it in another shape.
    """
    made: dict[nn.Parameter, nn.Parameter] = {}  # from meta to real: a tied parameter is made once
    missing: list[Problem] = []
    for unit in units(root, spec.blocks):
        whole: dict[nn.Parameter, nn.Parameter] = {}  # those of this unit, from meta to the value
        for name, module in unit:
            _allocate(name, module, spec, made, whole, missing)
        for name, _ in unit:
            with torch.no_grad(), seeded_init(seed, name):
                spec.initialise(root, name)
        own = {value: _own(value, meta, home or device, dtype) for meta, value in whole.items()}
        made |= {meta: own[value] for meta, value in whole.items()}
        for name, module in unit:
            module._parameters.update({k: own[value] for k, value in module._parameters.items() if value in own})
            for key, buffer in module._buffers.items():
                if buffer is not None:
                    if buffer.is_floating_point() and bool(buffer.isnan().any()):
                        missing.append(_uninitialised(spec, f"{name}.{key}"))
                    module._buffers[key] = buffer.to(device)
        place(unit[-1][1], list(own.values()))
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
    if value is None and not isinstance(spec.weights, NoWeights):
        missing.append(Problem(f"{spec.name}: {name}", "absent from the weights", "every parameter of the model"))
    elif value is not None and value.shape != meta.shape:
        missing.append(Problem(f"{spec.name}: {name}", f"shape {tuple(value.shape)}", f"{tuple(meta.shape)}"))
        value = None
    dtype = meta.dtype if meta.dtype.is_floating_point else torch.float32
    # what is pretrained stays mapped from its file until it is known how much of it this process keeps
    data = torch.empty(meta.shape, dtype=dtype) if value is None else value
    parameter = nn.Parameter(data, requires_grad=meta.requires_grad)
    # transformers' initialisers leave a tensor with this mark alone
    parameter._is_hf_initialized = value is not None  # type: ignore[attr-defined]
    return parameter


def _own(value: nn.Parameter, meta: nn.Parameter, home: torch.device, dtype: torch.dtype) -> nn.Parameter:
    """What this process keeps of a value; of a DTensor the part that its placements give it."""
    if isinstance(meta, DTensor):
        part = own_part(value.detach(), meta)
        local = part.to(home, dtype, copy=True, memory_format=torch.contiguous_format)
        kept: torch.Tensor = DTensor.from_local(
            local, meta.device_mesh, meta.placements, run_check=False, shape=meta.shape, stride=meta.stride()
        )
        parameter = nn.Parameter(kept, requires_grad=value.requires_grad)
    else:
        parameter = value
        parameter.data = value.data.to(home, dtype)
    # a tied parameter keeps its first module's values: by its second it may be an empty shard
    parameter._is_hf_initialized = True  # type: ignore[attr-defined]
    return parameter


def _buffer(name: str, meta: torch.Tensor, spec: ModelSpec) -> torch.Tensor:
    value = spec.weights.read(name)
    if value is not None:
        return value
    # poison: a buffer that nothing fills must not pass for one that was meant to be zero
    return torch.full_like(meta, torch.nan if meta.is_floating_point() else 0, device="cpu")


def _uninitialised(spec: ModelSpec, name: str) -> Problem:
    return Problem(
        f"{spec.name}: buffer {name}",
        "the model's own initialisation leaves it empty when it is built on the meta device",
        "a buffer that `_init_weights` fills, or one that is stored with the weights",
    )
