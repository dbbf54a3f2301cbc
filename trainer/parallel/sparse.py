"""Parameters that some tokens leave without a gradient, such as an expert that none chose.

One process leaves such a parameter unchanged, which for Adam differs from a gradient of zero. So in
each step the data ranks agree on the parameters that have a gradient on any of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from trainer.distributed.ranks import group_of_rows
from trainer.parallel.parallel_mesh import REDUCTIONS, ParallelMesh, ranks_along


class Used:
    """The parameters of this rank that had a gradient in a step, on any data rank."""

    def __init__(self, modules: Sequence[nn.Module], mesh: ParallelMesh) -> None:
        self._parameters = [p for module in modules for p in module.parameters() if p.requires_grad]
        self._flags = [False] * len(self._parameters)
        # on the host, of ranks with the same parameters and other samples
        rows = ranks_along(mesh.device_mesh, REDUCTIONS["batch"])
        self._group = group_of_rows(rows, backend="gloo")
        index = {parameter: i for i, parameter in enumerate(self._parameters)}
        units = [m for module in modules for m in module.modules() if isinstance(m, FSDPModule)]
        self._sharded = bool(units)
        for unit in units:
            unit.set_reduce_scatter_unused_params(True, recurse=False)  # the same on every rank
            self._watch(unit, index)

    def agree(self) -> None:
        """Give a parameter a gradient on all data ranks if one has it, else none. Collective.

        Called after the last backward pass. The flags are on the host, so nothing waits for the
        device.
        """
        mine = self._flags if self._sharded else [p.grad is not None for p in self._parameters]
        flags = torch.tensor(mine, dtype=torch.uint8)
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._group)
        for parameter, used in zip(self._parameters, flags, strict=True):
            if not used:
                parameter.grad = None
            elif parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self._flags = [False] * len(self._parameters)

    def _watch(self, unit: nn.Module, index: dict[nn.Parameter, int]) -> None:
        """Watch the gradients of gathered parameters: shards have zeros where there was none."""
        children = [m for m in unit.modules() if isinstance(m, FSDPModule) and m is not unit]
        inner = {module for child in children for module in child.modules()}
        own = [
            (module, key, index[parameter])
            for module in unit.modules()
            if module not in inner
            for key, parameter in module._parameters.items()
            if parameter is not None and parameter in index
        ]
        watched: set[nn.Parameter] = set()

        def hook(module: nn.Module, inputs: object) -> None:
            for owner, key, i in own:
                whole = owner._parameters[key]
                if whole is not None and whole not in watched:
                    watched.add(whole)
                    note = lambda _, i=i: self._flags.__setitem__(i, True)  # noqa: E731
                    whole.register_post_accumulate_grad_hook(note)

        unit.register_forward_pre_hook(hook)
