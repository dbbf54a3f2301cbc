"""Give a module on the meta device its values, a unit at a time.

No more than one unit is whole at any time if `after_unit` shards each as it comes (ZeRO-3).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from trainer.distributed.dtensor import own_rows, own_shard
from trainer.distributed.initial_values import initialising
from trainer.errors import ConfigError, Problem
from trainer.models.names import tensors_of, units
from trainer.models.patches import has_values, mark_values
from trainer.models.spec import ModelSpec, NoWeights

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Placement:
    """The device and dtype of a model's tensors."""

    device: torch.device = CPU
    dtype: torch.dtype = torch.float32
    storage: torch.device | None = None
    """The device of parameters, if it is not that of buffers."""
    base_dtype: torch.dtype | None = None
    """The dtype of parameters that checkpoints leave out, if it differs."""
    plain: bool = False
    """True if a process keeps its shard of a DTensor as a plain tensor."""


class StoredForm(Protocol):
    """How a weight is kept as bytes."""

    @property
    def like(self) -> torch.Tensor:
        """A tensor on the meta device with the shape that the weight is read in."""

    def stored(self, value: torch.Tensor) -> torch.Tensor:
        """Return the bytes of a weight, uint8."""


@runtime_checkable
class Stores(Protocol):
    """A module that keeps weights in a form of its own, as bytes."""

    @property
    def forms(self) -> Mapping[str, StoredForm]:
        """The forms of these parameters, by their names in the module."""


def materialise(
    root: nn.Module,
    spec: ModelSpec,
    *,
    seed: int,
    placement: Placement = Placement(),
    after_unit: Callable[[nn.Module, list[nn.Parameter]], None] = lambda module, parameters: None,
    rows: Callable[[torch.Tensor], range] = own_rows,
) -> None:
    """Give every parameter and buffer of `root` its pretrained value, else its initial value.

    Initial values depend on `seed` and the module's name alone. Of a DTensor parameter, this
    process keeps its own shard, reads no more than that of a pretrained one, and draws little more
    of a large one. `after_unit` is called with each unit and its new parameters, in order; they may
    be empty shards afterwards. `rows` returns the rows that this process keeps of a parameter on
    the meta device: the others may lack their initial values. A parameter of another model that
    has its values stays as it is. Raises ConfigError if the pretrained weights lack a parameter or
    have it in another shape, or if nothing fills a tensor.
    """
    named = root.named_parameters(remove_duplicate=False) if placement.base_dtype else ()
    base = {parameter for name, parameter in named if name in spec.training.unsaved}
    values = _Values(spec, rows, placement.device)
    for unit in units(root, spec.blocks):
        for name, module in unit:
            values.allocate(name, module)
        for name, module in unit:
            with torch.no_grad(), initialising(seed, name, values.rows(module)):
                values.initialise(root, name, module)
        own: dict[nn.Parameter, nn.Parameter] = {}  # whole value -> the part that is kept
        for meta, value in values.whole.items():
            dtype = (placement.base_dtype if meta in base else None) or placement.dtype
            if not meta.is_floating_point():  # bytes of a quantised weight
                dtype = meta.dtype
            own[value] = values.made[meta] = _own(value, meta, placement, dtype)
        values.whole.clear()
        for _, module in unit:
            parameters = module._parameters.items()
            module._parameters.update({k: own[value] for k, value in parameters if value in own})
            buffers = [(key, b) for key, b in module._buffers.items() if b is not None]
            module._buffers.update((key, b.to(placement.device)) for key, b in buffers)
        after_unit(unit[-1][1], list(own.values()))
    if values.missing:
        raise ConfigError(*values.missing)


def on_host(spec: ModelSpec, seed: int = 0) -> nn.Module:
    """Build a model with its values, whole, on the CPU in float32."""
    model = spec.build()
    materialise(model, spec, seed=seed)
    return model


@dataclass
class _Values:
    """The values of a model, as they are made."""

    spec: ModelSpec
    own_rows: Callable[[torch.Tensor], range]
    device: torch.device
    """Where weights are brought into another form."""
    made: dict[nn.Parameter, nn.Parameter] = field(default_factory=dict)
    """Parameters of earlier units, by those on the meta device: a tied one is made once."""
    whole: dict[nn.Parameter, nn.Parameter] = field(default_factory=dict)
    """Whole parameters of the current unit, by those on the meta device."""
    missing: list[Problem] = field(default_factory=list)
    _misshapen: set[str] = field(default_factory=set)

    def allocate(self, name: str, module: nn.Module) -> None:
        """Replace a module's own tensors on the meta device by pretrained or empty ones."""
        for key, parameter in module._parameters.items():
            if parameter is None or _is_shared(parameter):
                continue
            if parameter not in self.made and parameter not in self.whole:
                form = module.forms.get(key) if isinstance(module, Stores) else None
                self.whole[parameter] = self._parameter(_joined(name, key), parameter, form)
            known = self.made if parameter in self.made else self.whole
            module._parameters[key] = known[parameter]
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                value = self._given(_joined(name, key), buffer)
                real = torch.zeros_like(buffer, device="cpu")
                if value is not None:  # a file may have it in fewer bits
                    real = value.to(buffer.dtype)
                mark_values(real, given=value is not None)
                module._buffers[key] = real

    def _parameter(self, name: str, meta: nn.Parameter, form: StoredForm | None) -> nn.Parameter:
        weights = self.spec.building.weights
        if form is not None:
            value = self._given(name, form.like)
            value = None if value is None else form.stored(value.to(self.device))
        else:
            value = self._given(name, meta)
        needed = not isinstance(weights, NoWeights) and name not in self.spec.training.fresh
        if value is None and needed and name not in self._misshapen:
            self._report(name, "absent from the weights", "every parameter of the model")
        # a pretrained value stays mapped from its file until it is known which part is kept
        data = torch.empty(meta.shape, dtype=meta.dtype) if value is None else value
        parameter = nn.Parameter(data, requires_grad=meta.requires_grad)
        mark_values(parameter, given=value is not None)
        return parameter

    def _given(self, name: str, meta: torch.Tensor) -> torch.Tensor | None:
        """Return the pretrained value; None, and reported, if it has another shape."""
        value = self.spec.building.weights.read(name)
        if value is not None and value.shape != meta.shape:
            self._report(name, f"shape {tuple(value.shape)}", f"{tuple(meta.shape)}")
            self._misshapen.add(name)
            return None
        return value

    def rows(self, module: nn.Module) -> dict[torch.Tensor, range]:
        """Return the rows that this process keeps of the module's own parameters, to be drawn."""
        own = [(meta, v) for meta, v in self.whole.items() if not has_values(v) and v.ndim]
        mine = set(map(id, module._parameters.values()))
        return {value: self.own_rows(meta) for meta, value in own if id(value) in mine}

    def initialise(self, root: nn.Module, name: str, module: nn.Module) -> None:
        """Fill the module's own tensors by the model's initialisation, else by its constructor."""
        before = {key: tensor for key, tensor in _tensors(module).items() if tensor is not None}
        versions = {key: tensor._version for key, tensor in before.items()}
        self.spec.building.initialise(root, name)
        for key, tensor in before.items():
            untouched = _tensors(module).get(key) is tensor and tensor._version == versions[key]
            if untouched and not has_values(tensor):
                self._construct(_joined(name, key), module, tensor)

    def _construct(self, name: str, module: nn.Module, tensor: torch.Tensor) -> None:
        value = self.spec.building.constructed(name)
        reset = getattr(module, "reset_parameters", None)
        if value is not None and value.shape == tensor.shape and not value.is_meta:
            tensor.copy_(value)
        elif isinstance(tensor, nn.Parameter) and callable(reset):
            reset()
        else:
            empty = "the model's own initialisation leaves it empty"
            actual = f"{empty} when it is built on the meta device"
            expected = "a tensor that `_init_weights` fills, or one that is stored with the weights"
            self._report(name, actual, expected)

    def _report(self, name: str, actual: str, expected: str) -> None:
        self.missing.append(Problem(f"{self.spec.name}: {name}", actual, expected))


def _is_shared(parameter: nn.Parameter) -> bool:
    """Return True for a parameter of another model that has been materialised."""
    return has_values(parameter) and not parameter.is_meta


def _tensors(module: nn.Module) -> dict[str, torch.Tensor | None]:
    return {**module._parameters, **module._buffers}


def _joined(module: str, key: str) -> str:
    return f"{module}.{key}".lstrip(".")


def _own(
    value: nn.Parameter, meta: nn.Parameter, placement: Placement, dtype: torch.dtype
) -> nn.Parameter:
    """Return what this process keeps of a parameter: the whole, or its shard of a DTensor."""
    storage = placement.storage or placement.device
    if isinstance(meta, DTensor):
        # `from_local` would move offloaded parameters to the mesh's device
        kept: torch.Tensor = torch.empty_like(meta.detach(), dtype=dtype, device=storage)
        cast(DTensor, kept).to_local().copy_(own_shard(value.detach(), meta))
        kept = cast(DTensor, kept).to_local() if placement.plain else kept
        parameter = nn.Parameter(kept, requires_grad=value.requires_grad)
    else:
        parameter = value
        parameter.data = value.data.to(storage, dtype)
    # a tied parameter keeps its first module's values: at the second, it may be an empty shard
    mark_values(parameter, given=True)
    return parameter


# Tensors as a constructor makes them

SMALL = 65_536
"""The most values of a tensor that is made as the model's constructor makes it."""


def built_tensor(build: Callable[[], nn.Module], name: str) -> torch.Tensor | None:
    """Return a tensor as `build` makes it; None if it has, or depends on, over SMALL values."""
    return _all(build).get(name)


@cache
def _all(build: Callable[[], nn.Module]) -> Mapping[str, torch.Tensor]:
    with torch.random.fork_rng(devices=[]), _BuiltOnHost():
        torch.default_generator.manual_seed(0)
        try:
            model = build()
        except Exception:  # small and large tensors may not go together
            return {}
    tensors = tensors_of(model)
    return {name: tensor.detach() for name, tensor in tensors.items() if not tensor.is_meta}


class _BuiltOnHost(TorchFunctionMode):
    """A mode in which small tensors for the meta device are made on the CPU instead."""

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        device = kwargs.get("device")
        on_meta = device is not None and torch.device(device).type == "meta"
        if on_meta and torch.is_tensor(result) and result.numel() <= SMALL:
            return func(*args, **{**kwargs, "device": "cpu"})
        return result
