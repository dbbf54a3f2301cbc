"""Batch norm on several data ranks, with the running statistics that one process would have.

A micro-batch is normalised by its own statistics, whatever rank it runs on, so that the same
micro-batches give the same gradients in any layout. The running statistics, which evaluation uses,
include each micro-batch once, in the order of the global batch: they are the same on every rank,
and not only those of its own samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from trainer.distributed.autograd import in_backward
from trainer.distributed.exchange import Exchange
from trainer.errors import NumericsError, Problem
from trainer.models.own.module import running_norms
from trainer.parallel import patches
from trainer.parallel.parallel_mesh import ParallelMesh


class RunningStatistics:
    """The running statistics of all batch norms on this rank.

    A module's own update knows neither the other ranks nor that a recomputed block was counted.
    """

    def __init__(self, modules: Sequence[nn.Module], mesh: ParallelMesh, data_rank: int) -> None:
        self._mesh = mesh
        self._synchronised = mesh.layout.sync_batch_norm and mesh.size("batch") > 1
        # synchronised ranks have all seen the same statistics
        self._ranks, self._rank = (1, 0) if self._synchronised else (mesh.size("batch"), data_rank)
        norms = (norm for module in modules for norm in running_norms(module).values())
        self._norms = [*map(_NormOfStep, norms)]
        if self._synchronised or mesh.layout.precision != "float32":
            group = mesh.group("batch") if self._synchronised else None
            ranks = None if group is None else Exchange(group)
            for norm in (part for module in modules for part in module.modules()):
                if isinstance(norm, _BatchNorm):
                    patches.replace_forward(norm, partial(_normalised, norm, ranks))

    @contextmanager
    def of_step(self, micro_batches: int) -> Iterator[None]:
        """Wrap the forward passes of a step: adds their statistics, on every data rank. Collective.

        Raises NumericsError if a module did not run equally often in each micro-batch.
        """
        for norm in self._norms:
            norm.start()
        yield
        if self._norms:
            with torch.no_grad():
                self._take_up(micro_batches)

    def _take_up(self, micro_batches: int) -> None:
        statistics = [norm.weighted(micro_batches, self._ranks, self._rank) for norm in self._norms]
        if self._ranks > 1:
            flat = torch.cat([value.flatten() for value in statistics])
            self._mesh.sum(flat, "batch")
            parts = flat.split([value.numel() for value in statistics])
            statistics = [
                part.view_as(value) for part, value in zip(parts, statistics, strict=True)
            ]
        for norm, value in zip(self._norms, statistics, strict=True):
            norm.take_up(value, self._ranks)


class _NormOfStep:
    """The statistics of one module in each forward pass of a step."""

    def __init__(self, module: _NormBase) -> None:
        self._module = module
        self._momentum = module.momentum
        patches.keep_last_statistics(module)
        self._found: list[torch.Tensor] = []
        module.register_forward_hook(self._note)

    def start(self) -> None:
        self._found = []
        self._before = self._kept().double()
        self._count = self._counter().clone()

    def weighted(self, micro_batches: int, ranks: int, rank: int) -> torch.Tensor:
        """Return this rank's share of what the step adds, [mean and variance, features], float64.

        An exponential average of n more values is (1 - m)^n of the old average, plus m (1 - m)^(n -
        1 - i) of value i.
        """
        passes, rest = divmod(len(self._found), micro_batches)
        if rest:
            actual = f"{len(self._found)} forward passes in {micro_batches} micro-batches"
            raise NumericsError(Problem("batch norm", actual, "as many in each"))
        momentum = self._momentum
        total = torch.zeros_like(self._before)
        for index, value in enumerate(self._found):
            micro_batch, turn = divmod(index, passes)
            later = len(self._found) * ranks - 1 - ((micro_batch * ranks + rank) * passes + turn)
            weight = 1.0 if momentum is None else momentum * (1 - momentum) ** later
            total += value.double() * weight
        return total

    def take_up(self, added: torch.Tensor, ranks: int) -> None:
        count = len(self._found) * ranks
        if self._momentum is None:  # the mean of all
            after = (self._before * self._count + added) / (self._count + count)
        else:
            after = self._before * (1 - self._momentum) ** count + added
        for buffer, value in zip(self._buffers(), after, strict=True):
            buffer.copy_(value)
        self._counter().copy_(self._count + count)
        self._found = []

    def _note(self, module: nn.Module, inputs: object, output: object) -> None:
        if module.training and not in_backward():
            self._found.append(self._kept().clone())

    def _kept(self) -> torch.Tensor:
        return torch.stack(self._buffers())

    def _buffers(self) -> tuple[torch.Tensor, torch.Tensor]:
        mean = self._module.running_mean
        variance = self._module.running_var
        assert mean is not None and variance is not None
        return mean, variance

    def _counter(self) -> torch.Tensor:
        counter = self._module.num_batches_tracked
        assert counter is not None
        return counter


def _normalised(module: _BatchNorm, ranks: Exchange | None, given: torch.Tensor) -> torch.Tensor:
    """Return batch norm in float32, over the micro-batches of `ranks` together if there are any.

    Not every device has batch norm in 16 bits, and PyTorch's SyncBatchNorm is for GPUs only.
    """
    kind = torch.promote_types(given.dtype, torch.float32)
    module._check_input_dim(given)
    wide = given.to(kind)
    weight, bias = (
        None if value is None else value.to(kind) for value in (module.weight, module.bias)
    )
    if module.training and ranks is not None:
        return _together(module, ranks, wide, weight, bias).to(given.dtype)
    running = module.running_mean, module.running_var
    fresh = module.training or module.running_mean is None
    momentum = module.momentum or 0.0
    output = F.batch_norm(wide, *running, weight, bias, fresh, momentum, module.eps)
    return output.to(given.dtype)


def _together(
    module: _BatchNorm,
    ranks: Exchange,
    wide: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    def total(own: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks, each of which uses the sum for a part: gradients are summed, too."""
        return ranks.copy_to(ranks.reduce_from(own))

    dims = [dim for dim in range(wide.dim()) if dim != 1]
    shape = [1, -1] + [1] * (wide.dim() - 2)
    samples = wide.new_tensor([wide.numel() // wide.shape[1]])
    sums = total(torch.cat([wide.sum(dims), samples]))
    count = sums[-1].detach()
    mean = sums[:-1] / count
    centred = wide - mean.view(shape)
    variance = total(centred.square().sum(dims)) / count
    if module.running_mean is not None and module.running_var is not None:
        with torch.no_grad():  # as with a momentum of 1
            module.running_mean.copy_(mean)
            module.running_var.copy_(variance * count / (count - 1))
    output = centred * (variance + module.eps).rsqrt().view(shape)
    if weight is None or bias is None:
        return output
    return output * weight.view(shape) + bias.view(shape)
