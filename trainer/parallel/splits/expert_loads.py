"""Experts balanced without a loss: the biases by which a router chooses them follow their loads.

After a step the bias of an expert that fewer tokens chose than the mean rises by a rate, and that
of one that more chose falls (arXiv 2408.15664, algorithm 1; 2412.19437, section 2.1.2). All tokens
of the step count, without padding, so that the biases are the same in every layout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from trainer.distributed.autograd import in_backward
from trainer.distributed.exchange import Exchange
from trainer.errors import ConfigError, Problem
from trainer.models.names import expert_stacks, layer_of
from trainer.models.spec import ModelSpec
from trainer.parallel.parallel_mesh import ParallelMesh, holders_of
from trainer.tasks.task import Batch

KEY = "trainer.router_bias_update_rate"


def biases_of(spec: ModelSpec, built: nn.Module | None = None) -> dict[str, str]:
    """Map stacks of experts to their routers' biases: saved numbers, one for each, not learned.

    `built`: the whole model, if it is there already.
    """
    if not spec.language.idle_parameters:
        return {}
    model = spec.build() if built is None else built
    learned = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    kept = learned | spec.training.frozen.keys() | spec.training.unsaved
    sizes = {name: t.numel() for name, t in model.state_dict().items() if name not in kept}
    biases = {}
    for stack in expert_stacks(model, spec.blocks):
        count = len(next(model.get_submodule(stack).parameters()))
        layer = layer_of(stack)
        beside = f"{layer.rpartition('.')[0]}."
        inside = f"{layer}."
        for name, size in sizes.items():
            if size == count and name.startswith(beside) and not name.startswith(inside):
                biases[stack] = name
    return biases


def hold(model: nn.Module, spec: ModelSpec) -> None:
    """Make buffers of biases that are parameters, in place: whole and in float32 on each rank."""
    for name in biases_of(spec, model).values():
        owner, _, key = name.rpartition(".")
        module = model.get_submodule(owner)
        if key in module._parameters:
            value = module.get_parameter(key).detach()
            delattr(module, key)
            module.register_buffer(key, value)


class ExpertLoads:
    """The biases of this rank's routers, and how many tokens of a step chose each expert here."""

    def __init__(
        self, modules: Sequence[nn.Module], spec: ModelSpec, task: Any, mesh: ParallelMesh
    ) -> None:
        self._mesh = mesh
        self._task = task
        self._rate = mesh.layout.router_bias_rate
        self._loads: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._real = torch.empty(0)
        """1 for each token of the forward pass that runs, and 0 for padding."""
        self._group = holders_of(mesh)[0] if self._rate else None
        biases = biases_of(spec) if self._rate else {}
        for module in modules if self._rate else ():
            module.register_forward_pre_hook(self._start, with_kwargs=True)
            named = dict(module.named_modules())
            buffers = dict(module.named_buffers())
            for stack, name in biases.items():
                if (experts := named.get(f"model.{stack}")) is not None:
                    self._watch(experts, buffers[f"model.{name}"], name)

    def move(self, norm: torch.Tensor, skipped: bool) -> None:
        """Move the biases by a step's loads, but after one that was skipped. Collective."""
        if not self._loads:
            return
        loads = torch.cat([load for _, load in self._loads])
        if self._group is not None:
            dist.all_reduce(loads, group=self._group)
        moves = norm.isfinite() & (not skipped)
        sizes = [len(load) for _, load in self._loads]
        for (bias, load), total in zip(self._loads, loads.split(sizes), strict=True):
            lacks = (total.sum() - total * len(total)).sign() * moves
            bias.add_(lacks.to(bias.dtype).view_as(bias), alpha=self._rate)
            load.zero_()

    def _watch(self, experts: nn.Module, bias: torch.Tensor, name: str) -> None:
        if bias.dtype != torch.float32:
            actual = f"{name} in {bias.dtype}"
            hint = "Leave data_types.buffer_dtype out."
            expected = "float32: in 16 bits a bias of 1 would stay where it is"
            raise ConfigError(Problem(KEY, actual, expected, hint))
        load = torch.zeros(bias.numel(), dtype=torch.int64, device=bias.device)
        experts.register_forward_pre_hook(partial(self._count, load), with_kwargs=True)
        self._loads.append((bias, load))

    def _start(self, module: nn.Module, args: tuple[Batch, ...], kwargs: dict[str, Batch]) -> None:
        self._real = self._task.real(kwargs["batch"] if "batch" in kwargs else args[0])

    def _count(
        self,
        load: torch.Tensor,
        experts: nn.Module,
        args: tuple[torch.Tensor, ...],
        kwargs: dict[str, torch.Tensor],
    ) -> None:
        recomputed = not torch.compiler.is_compiling() and in_backward()
        if recomputed or not experts.training:
            return
        chosen = chosen_by(args, kwargs)
        real = self._real
        if len(chosen) < real.numel():  # each tensor rank has a part of the tokens
            real = Exchange(self._mesh.axis("tensor")).scatter(real, 1)
        elif self._mesh.rank("tensor"):  # the first has counted the same
            return
        load.scatter_add_(0, chosen.flatten(), real.reshape(-1, 1).expand_as(chosen).flatten())


def chosen_by(args: Sequence[torch.Tensor], kwargs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the experts of each token, [tokens, experts of a token], as a stack is called."""
    chosen: torch.Tensor = [*args, *kwargs.values()][1]
    return chosen.flatten(0, -2)
