"""The state of PyTorch's optimizers by name, whole, over whole or sharded (DTensor) parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from trainer.distributed.dtensor import local, own_position, shard_place
from trainer.distributed.ranks import Ranks
from trainer.engines.engine import Observer
from trainer.engines.optimizer_state import OptimizerState, elsewhere
from trainer.engines.owners import Kind, persistent_buffers, report, state_tensors_of
from trainer.parallel.parallel_mesh import ParallelMesh
from trainer.state import STEP, WEIGHT, Part, Reader, StateTensor
from trainer.tasks.task import bare_name


class TorchState:
    """Reads and writes parameters, buffers and optimizer state of this rank's stages."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        optimizer: torch.optim.Optimizer,
        ranks: Ranks,
        mesh: ParallelMesh,
    ) -> None:
        self._named: dict[str, list[torch.Tensor]] = {}
        """Parameters and buffers by Hugging Face name; two of a table on first and last stage."""
        for module in modules:
            for name, tensor in (*module.named_parameters(), *persistent_buffers(module)):
                self._named.setdefault(bare_name(name), []).append(tensor)
        self._optimizer = OptimizerState(optimizer)
        self._ranks = ranks
        self._mesh = mesh

    def state_tensors(self) -> list[StateTensor]:
        """List weights, the optimizer state of each, and persistent buffers. Collective."""
        local: dict[Kind, list[torch.Tensor]] = {}
        for name, tensors in self._named.items():
            local[_kind(name, WEIGHT, tensors[0])] = tensors
            states = [self._optimizer.of(tensor) for tensor in tensors]
            for key, value in states[0].items():
                local[_kind(name, key, value)] = [state[key] for state in states if key in state]
        return state_tensors_of(local, self._mesh, self._state_tensor)

    def gradients(self, observe: Observer) -> None:
        """Implement `TrainingState.gradients`."""
        gradients = {name: tensors[0].grad for name, tensors in self._named.items()}
        present = {name: whole(g).float() for name, g in gradients.items() if g is not None}
        report(present, self._mesh, observe)

    def scalars(self) -> dict[str, float]:
        return {"optimizer_step": self._optimizer.step()}

    def restore(self, scalars: Mapping[str, float]) -> None:
        self._optimizer.common_step = scalars["optimizer_step"]

    def _state_tensor(
        self, kind: Kind, tensors: list[torch.Tensor] | None, is_source: bool, owner: int
    ) -> StateTensor:
        local = tensors or []

        def parts() -> list[Part]:
            return _parts(local[0], owner, self._ranks.rank) if is_source else []

        def write(stored: Reader) -> None:
            for tensor in local:
                _read_shard(tensor, stored)

        still = bool(local) and not local[0].requires_grad
        keep = partial(self._keep, kind[0]) if kind[1] == WEIGHT and not still else None
        return StateTensor(*kind, owner, parts, write, keep)

    def _keep(self, name: str, shapes: Mapping[str, tuple[int, ...]]) -> list[StateTensor]:
        """Implement `StateTensor.keep`."""
        if not (parameters := self._named.get(name, [])):
            return elsewhere(name, shapes)
        self._optimizer.keep(parameters, bool(shapes))
        states = [self._optimizer.of(parameter) for parameter in parameters]
        entries = []
        for key, first in states[0].items():

            def write(stored: Reader, key: str = key, first: torch.Tensor = first) -> None:
                if first.ndim == 0:
                    scalar = torch.empty((), dtype=first.dtype)
                    stored.fill(Part(scalar))
                    self._optimizer.put(parameters, key, scalar)
                else:
                    for state in states:
                        _read_shard(state[key], stored)

            if key == STEP and key not in shapes:
                self._optimizer.put(parameters, key, self._optimizer.common_step)
            else:
                kind = _kind(name, key, first)
                entries.append(StateTensor(*kind, 0, list, write))
        return entries


def _kind(name: str, key: str, tensor: torch.Tensor) -> Kind:
    return name, key, tuple(tensor.shape), tensor.dtype


def _parts(tensor: torch.Tensor, owner: int, rank: int) -> list[Part]:
    """Return what this rank writes of a tensor: its shard, or the whole if it is the owner."""
    if not isinstance(tensor, DTensor):
        return [Part(local(tensor).detach())] if rank == owner else []
    place = own_position(tensor, owner)
    return [] if place is None else [Part(local(tensor).detach(), *place)]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole of a tensor, on every rank that holds a shard. Collective."""
    if not isinstance(tensor, DTensor):
        return tensor
    # an offloaded tensor is gathered on the device, where the group can send
    on_device = cast(DTensor, tensor.to(tensor.device_mesh.device_type))
    return on_device.full_tensor()


def _read_shard(tensor: torch.Tensor, stored: Reader) -> None:
    """Read this rank's shard of a stored tensor into `tensor`, and no more of it."""
    place = shard_place(tensor) if isinstance(tensor, DTensor) else ()
    stored.fill(Part(local(tensor).detach(), *place))
