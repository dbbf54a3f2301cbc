"""From a module on the meta device to one with values, a unit at a time (contract 4).

No more than one unit is whole at any moment when `place` takes each away as it comes (ZeRO-3, FSDP).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from trainer.errors import ConfigError, Problem
from trainer.models.spec import ModelSpec, NoWeights, units
from trainer.seeding import seeded_init


def materialise(
    root: nn.Module,
    spec: ModelSpec,
    *,
    seed: int,
    device: torch.device,
    dtype: torch.dtype,
    place: Callable[[nn.Module, list[nn.Parameter]], None] = lambda module, parameters: None,
) -> None:
    """Give every parameter and buffer of `root` its value: pretrained where there is one, else initial.

    Initial values depend on `seed` and the module's name alone. `place` is called with each unit and its
    new parameters, in order; afterwards they may be empty shards. Raises ConfigError if a pretrained model
    lacks a parameter or has it in another shape.
    """
    made: dict[nn.Parameter, nn.Parameter] = {}  # from meta to real: a tied parameter is made once
    missing: list[Problem] = []
    for unit in units(root, spec.blocks):
        fresh: list[nn.Parameter] = []
        for name, module in unit:
            _allocate(name, module, spec, made, fresh, missing)
        for name, _ in unit:
            with torch.no_grad(), seeded_init(seed, name):
                spec.initialise(root, name)
        for parameter in fresh:
            # a tied parameter keeps its first module's values: by its second it may be an empty shard
            parameter._is_hf_initialized = True  # type: ignore[attr-defined]
            parameter.data = parameter.data.to(device, dtype)
        for name, module in unit:
            for key, buffer in module._buffers.items():
                if buffer is not None:
                    if buffer.is_floating_point() and bool(buffer.isnan().any()):
                        missing.append(_uninitialised(spec, f"{name}.{key}"))
                    module._buffers[key] = buffer.to(device)
        place(unit[-1][1], fresh)
    if missing:
        raise ConfigError(*missing)


def _allocate(
    name: str,
    module: nn.Module,
    spec: ModelSpec,
    made: dict[nn.Parameter, nn.Parameter],
    fresh: list[nn.Parameter],
    missing: list[Problem],
) -> None:
    for key, parameter in module._parameters.items():
        if parameter is None:
            continue
        if parameter not in made:
            made[parameter] = _filled(f"{name}.{key}".lstrip("."), parameter, spec, missing)
            fresh.append(made[parameter])
        module._parameters[key] = made[parameter]
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
    data = torch.empty(meta.shape, dtype=dtype) if value is None else value.to(dtype)
    parameter = nn.Parameter(data, requires_grad=meta.requires_grad)
    # transformers' initialisers leave a tensor with this mark alone
    parameter._is_hf_initialized = value is not None  # type: ignore[attr-defined]
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
