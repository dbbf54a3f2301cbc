"""DDP's memory and messages without its C++: gradients in buckets, each reduced when it is full.

Follows torch/nn/parallel/distributed.py and torch/csrc/distributed/c10d/reducer.cpp (Li et al.,
arXiv 2006.15704, section 4.2).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


class BucketedReplica(nn.Module):
    """A replacement of `DistributedDataParallel` for tensors without values."""

    _ddp_init_helper: object = None  # which `steady_buckets` replaces

    def __init__(
        self, module: nn.Module, *_: object, gradient_as_bucket_view: bool = False, **__: object
    ) -> None:
        super().__init__()
        self.module = module
        self._views = gradient_as_bucket_view
        self._syncs = True
        self._sent = torch.float32
        learned: list[Any] = [p for p in module.parameters() if p.requires_grad][::-1]
        self._buckets: list[torch.Tensor] = []
        self._place: dict[nn.Parameter, tuple[int, int]] = {}
        """Parameter -> its bucket, and its offset in it."""
        self._wanted: list[int] = []
        limits = [dist._DEFAULT_FIRST_BUCKET_BYTES, 25 << 20]
        for indices in dist._compute_bucket_assignment_by_size(learned, limits)[0]:
            group = [learned[index] for index in indices]
            offset = 0
            for parameter in group:
                self._place[parameter] = (len(self._buckets), offset)
                offset += parameter.numel()
            self._buckets.append(torch.zeros(offset, dtype=group[0].dtype))
            self._wanted.append(len(group))
        self._missing = list(self._wanted)
        for parameter in learned:
            parameter.register_post_accumulate_grad_hook(self._arrived)

    def forward(self, *arguments: object) -> object:
        return self.module(*arguments)

    def register_comm_hook(self, *_: object, **__: object) -> None:
        self._sent = torch.bfloat16  # as the only hook that engines use does

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self._syncs = False
        try:
            yield
        finally:
            self._syncs = True

    def _arrived(self, parameter: torch.Tensor) -> None:
        if not self._syncs:
            return
        index, offset = self._place[parameter]  # type: ignore[index]
        view = self._buckets[index][offset : offset + parameter.numel()].view(parameter.shape)
        assert parameter.grad is not None
        view.copy_(parameter.grad)
        if self._views:
            parameter.grad = view
        self._missing[index] -= 1
        if self._missing[index] == 0:
            dist.all_reduce(self._buckets[index].to(self._sent))
            self._missing[index] = self._wanted[index]
