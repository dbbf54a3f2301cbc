"""The state of PyTorch's optimizers over whole or sharded (DTensor) parameters, as whole tensors by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from trainer.engines.engine import Observer
from trainer.engines.homes import Kind, homes, owners, place_of, tell
from trainer.models.parts import gather, own_part
from trainer.parallel.mesh import Grid
from trainer.parallel.replicate import local
from trainer.ranks import Ranks
from trainer.state import WEIGHT, Parts, Piece
from trainer.tasks.task import bare_name


class TorchState:
    """Reads and writes parameters, buffers and optimizer state of the stages that this rank holds."""

    def __init__(
        self, modules: Sequence[nn.Module], optimizer: torch.optim.Optimizer, ranks: Ranks, grid: Grid
    ) -> None:
        self._named: dict[str, list[nn.Parameter]] = {}
        """By Hugging Face name; twice where the first and the last pipeline stage, on this rank, share a table."""
        self._buffers: dict[str, list[torch.Tensor]] = {}
        for module in modules:
            for name, parameter in module.named_parameters():
                self._named.setdefault(bare_name(name), []).append(parameter)
            for name, buffer in _persistent_buffers(module):
                self._buffers.setdefault(bare_name(name), []).append(buffer)
        self._optimizer = optimizer
        self._ranks = ranks
        self._grid = grid

    def pieces(self) -> list[Piece]:
        """Every parameter's weight, then its optimizer state; then persistent buffers. Collective."""
        self._make_states()
        held: dict[Kind, list[torch.Tensor]] = {}
        for name, parameters in self._named.items():
            held[_kind(name, WEIGHT, parameters[0])] = list(parameters)
            states = [self._optimizer.state.get(parameter, {}) for parameter in parameters]
            parts = sorted(k for k, v in states[0].items() if torch.is_tensor(v) and v.shape == parameters[0].shape)
            held |= {_kind(name, part, states[0][part]): [state[part] for state in states] for part in parts}
        held |= {_kind(name, WEIGHT, buffers[0]): list(buffers) for name, buffers in self._buffers.items()}
        found = homes(held, self._grid)
        owner = owners(found, self._ranks, self._grid)
        place = place_of(self._grid)
        return [self._piece(kind, held.get(kind, []), home == place, owner[kind[0]]) for kind, home in found.items()]

    def gradients(self, observe: Observer) -> None:
        """Tell `observe` every gradient, whole, on every rank. Collective."""
        found = {name: whole(p[0].grad).float() for name, p in self._named.items() if p[0].grad is not None}
        tell(found, self._grid, observe)

    def scalars(self) -> dict[str, float]:
        # all are equal, and each is a wait for the device
        return {"optimizer_step": next((float(s["step"]) for s in self._optimizer.state.values() if "step" in s), 0.0)}

    def restore(self, scalars: Mapping[str, float]) -> None:
        self._make_states()
        for state in self._optimizer.state.values():
            if "step" in state:
                state["step"].fill_(scalars["optimizer_step"])

    def _piece(self, kind: Kind, held: list[torch.Tensor], home: bool, owner: int) -> Piece:
        def read() -> torch.Tensor | None:
            if self._grid.mesh.device_type == "cpu":
                return assemble(own(), self._ranks)
            if not home:
                return None
            # by all: NCCL has a communicator for them, and would make one for each pair that sends
            value = whole(held[0])
            return value.detach() if owner == self._ranks.rank else None

        def write(value: torch.Tensor) -> None:
            for tensor in held:
                _keep_own(tensor, value)

        def own() -> torch.Tensor | None:
            sends = home and (isinstance(held[0], DTensor) or owner == self._ranks.rank)
            return local(held[0]).detach() if sends else None

        def assemble(part: torch.Tensor | None, ranks: Ranks) -> torch.Tensor | None:
            like = held[0] if held else None
            return gather(part, like, owner, ranks) if part is not None and isinstance(like, DTensor) else part

        return Piece(*kind, owner, read, write, Parts(own, assemble))

    def _make_states(self) -> None:
        """Have the optimizer make its moments without moving a weight: a step at rate 0 with zero gradients."""
        groups = self._optimizer.param_groups
        if all(self._optimizer.state.get(p) for group in groups for p in group["params"]):
            return
        rates = [group["lr"] for group in groups]
        kept = [(p, p.grad) for group in groups for p in group["params"]]
        for group in groups:
            group["lr"] = 0.0
        for parameter, _ in kept:
            parameter.grad = torch.zeros_like(parameter)
        self._optimizer.step()
        for parameter, gradient in kept:
            parameter.grad = gradient
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate
        for state in self._optimizer.state.values():
            if "step" in state:
                state["step"].zero_()


def _kind(name: str, part: str, tensor: torch.Tensor) -> Kind:
    return name, part, tuple(tensor.shape), tensor.dtype


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor, on every rank that holds a part. Collective."""
    if not isinstance(tensor, DTensor):
        return tensor
    # what is offloaded is gathered on the device, where the group can send
    on_device = cast(DTensor, tensor.to(tensor.device_mesh.device_type))
    return on_device.full_tensor()


def _keep_own(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Copy this rank's part of `value`, which every rank has, into `tensor`."""
    with torch.no_grad():
        if isinstance(tensor, DTensor):
            value = own_part(value, tensor)
        local(tensor).copy_(value)


def _persistent_buffers(root: nn.Module) -> list[tuple[str, torch.Tensor]]:
    named = dict(root.named_buffers())
    transient = {
        f"{name}.{key}".lstrip(".")
        for name, module in root.named_modules()
        for key in module._non_persistent_buffers_set
    }
    return [(name, buffer) for name, buffer in named.items() if name not in transient]
