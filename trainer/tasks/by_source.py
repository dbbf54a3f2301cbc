"""The training loss of each source of a mixture, summed on the device until it is read."""

from __future__ import annotations

import torch
import torch.distributed as dist

from trainer.tasks.task import IGNORED, Batch


class LossBySource:
    """Sums of losses and numbers of targets, by the number of the source of each sample."""

    def __init__(self, sources: int, device: torch.device | None = None) -> None:
        self._sums = torch.zeros(2, sources, dtype=torch.float64, device=device)
        self._of = self._counts = torch.empty(0)

    def start(self, batch: Batch) -> None:
        """Take what is added next for the losses of `batch`, which has `sources` [batch, 1]."""
        targets = batch["targets"]
        self._of = batch["sources"].expand_as(targets).flatten()
        self._counts = (targets != IGNORED).flatten()
        self._sums = self._sums.to(targets.device)

    def add(self, rows: slice, losses: torch.Tensor) -> None:
        """Add the losses of some of its tokens, [n], 0 without a target."""
        found = torch.stack([losses, self._counts[rows].to(losses.dtype)]).double()
        self._sums.index_add_(1, self._of[rows], found)

    def take(self, group: dist.ProcessGroup | None, device: torch.device) -> torch.Tensor:
        """Return the sums since the last call, [2, sources], over a group. Collective."""
        found, self._sums = self._sums.to(device), torch.zeros_like(self._sums)
        if group is not None:
            dist.all_reduce(found, group=group)
        return found
