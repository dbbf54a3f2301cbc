"""The state of PyTorch's optimizers over whole or sharded (DTensor) parameters, as whole tensors by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from trainer.engines.engine import Observer, owners
from trainer.ranks import Ranks
from trainer.state import WEIGHT, Piece


class TorchState:
    """Reads and writes parameters, buffers and optimizer state; `named` are the parameters by Hugging Face name."""

    def __init__(
        self,
        named: Sequence[tuple[str, nn.Parameter]],
        buffers: Sequence[tuple[str, torch.Tensor]],
        optimizer: torch.optim.Optimizer,
        ranks: Ranks,
    ) -> None:
        self._named = named
        self._buffers = buffers
        self._optimizer = optimizer
        self._ranks = ranks

    def pieces(self) -> list[Piece]:
        """Every parameter's weight, then its optimizer state; then persistent buffers."""
        self._make_states()
        found = []
        ranks = owners([p.numel() for _, p in self._named], self._ranks.world_size)
        for owner, (name, parameter) in zip(ranks, self._named, strict=True):
            found.append(self._piece(name, WEIGHT, parameter, owner))
            state = self._optimizer.state.get(parameter, {})
            parts = sorted(k for k, v in state.items() if torch.is_tensor(v) and v.shape == parameter.shape)
            found += [self._piece(name, part, state[part], owner) for part in parts]
        return found + [self._piece(name, WEIGHT, buffer, 0) for name, buffer in self._buffers]

    def gradients(self, observe: Observer) -> None:
        """Tell `observe` every gradient, whole. Collective."""
        for name, parameter in self._named:
            if parameter.grad is not None:
                observe(name, whole(parameter.grad).float())

    def scalars(self) -> dict[str, float]:
        # all are equal, and each is a wait for the device
        return {"optimizer_step": next((float(s["step"]) for s in self._optimizer.state.values() if "step" in s), 0.0)}

    def restore(self, scalars: Mapping[str, float]) -> None:
        self._make_states()
        for state in self._optimizer.state.values():
            if "step" in state:
                state["step"].fill_(scalars["optimizer_step"])

    def _piece(self, name: str, part: str, tensor: torch.Tensor, owner: int) -> Piece:
        def read() -> torch.Tensor | None:
            value = whole(tensor)  # on every rank: gathering is collective
            return value.detach() if owner == self._ranks.rank else None

        return Piece(name, part, tuple(tensor.shape), tensor.dtype, owner, read, lambda value: _keep_own(tensor, value))

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


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _keep_own(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Copy this rank's part of `value`, which every rank has, into `tensor`."""
    with torch.no_grad():
        if isinstance(tensor, DTensor):
            value = distribute_tensor(
                value.to(tensor.device), tensor.device_mesh, tensor.placements, src_data_rank=None
            ).to_local()
        local(tensor).copy_(value)
