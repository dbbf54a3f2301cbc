"""PyTorch's optimizers over the local shards of DTensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch.optim.sgd import sgd

from trainer.distributed.dtensor import local


class OnShards(torch.optim.Optimizer):
    """A base of a class of `torch.optim` whose kernels get this process's shards.

    The updates are by element, and state is sharded as its parameter is. DTensor's own dispatch of
    a list takes time, wants one mesh, and has no fused SGD or Adagrad.
    """

    kernels_read_all: ClassVar[bool] = True
    """True if no gradient is read but by the class's own kernels."""

    def _init_group(self, group: dict[str, object], *lists: list[torch.Tensor]) -> object:
        result = super()._init_group(group, *lists)  # type: ignore[misc]
        for tensors in lists:
            tensors[:] = [local(tensor) for tensor in tensors]
        return result


class SGD(OnShards, torch.optim.SGD):
    """SGD without dampening, whose momentum starts at 0, which makes the same first step.

    PyTorch's has none before: its fused kernel would leave it undefined in a step that it skips.
    """

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Take a step; `torch.optim.SGD.step` stores each momentum by its tensor in the kernel."""
        chosen = "weight_decay", "momentum", "lr", "dampening", "nesterov", "maximize"
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            buffers: list[torch.Tensor | None] = [None] * len(parameters)
            if group["momentum"] != 0:
                for parameter in parameters:
                    if "momentum_buffer" not in self.state[parameter]:
                        zeros = torch.zeros_like(parameter)
                        self.state[parameter]["momentum_buffer"] = zeros
                buffers = [local(self.state[p]["momentum_buffer"]) for p in parameters]
            sgd(
                [local(parameter) for parameter in parameters],
                [local(parameter.grad) for parameter in parameters],
                buffers,
                foreach=group["foreach"],
                fused=group["fused"],
                found_inf=getattr(self, "found_inf", None),
                grad_scale=getattr(self, "grad_scale", None),
                **{name: group[name] for name in chosen},
            )


def on_shards(library: str, params: Mapping[str, object]) -> type[torch.optim.Optimizer]:
    """Return a class of `torch.optim`, by its public name, over local shards if it can be."""
    name = library.rpartition(".")[2]
    if name == "SGD":
        return torch.optim.SGD if params.get("dampening") else SGD
    return type(name, (OnShards, getattr(torch.optim, name)), {})
