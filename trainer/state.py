"""What a checkpoint is made of: pieces of training state under Hugging Face names, and the run's position.

Engines produce pieces, `checkpoint/` stores them; neither knows the other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from trainer.ranks import Ranks

WEIGHT = "weight"
"""The `part` of a piece that holds model weights; every other part is optimizer state of the same name."""
MASTER = "master"
"""The `part` of the exact float32 weight beside a 16-bit one."""


@dataclass(frozen=True)
class Parts:
    """How a piece is read without a wait for other ranks: each copies its part, and they are put together later."""

    own: Callable[[], torch.Tensor | None]
    """This rank's part of the live tensor; None where it has none that `gather` wants."""
    gather: Callable[[torch.Tensor | None, Ranks], torch.Tensor | None]
    """The whole tensor on the piece's owner from a copy of `own`, on the host. Collective over the ranks given."""


@dataclass(frozen=True)
class Piece:
    """One named tensor of the training state.

    `read` and `write` are collective: every rank calls them, for all pieces in the same order.
    `read()` returns the whole tensor on rank `owner` and None elsewhere; `write(tensor)` is called
    with the whole tensor on every rank, and each rank keeps its part.
    """

    name: str
    """The parameter's Hugging Face name, e.g. `model.layers.0.mlp.up_proj.weight`."""
    part: str
    """`weight`, or what the optimizer keeps beside it: `master` (float32 weights), `exp_avg`, `exp_avg_sq`."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    owner: int
    read: Callable[[], torch.Tensor | None]
    write: Callable[[torch.Tensor], None]
    parts: Parts | None = None


@dataclass(frozen=True)
class RunState:
    """Where a run stands. `samples` alone fixes the data that comes next."""

    step: int = 0
    """Optimizer steps done."""
    samples: int = 0
    """Samples seen, over all ranks, since the start of the run."""
    tokens: int = 0
    """Target tokens seen, over all ranks."""
    engine: dict[str, float] = field(default_factory=dict)
    """Scalars the engine wants back: the loss scale, the optimizer's own step count."""
