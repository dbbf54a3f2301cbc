"""The content of a checkpoint: state tensors under Hugging Face names, and the run's position.

Engines produce state tensors, `checkpoint/` stores them; neither knows the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from trainer.distributed.ranks import Ranks

VERSION = "0.1.0"
"""The version of this program, which every checkpoint records."""
WEIGHT = "weight"
"""The `key` of model weights; every other key is optimizer state of the same name."""
MASTER = "master"
"""The `key` of the exact float32 weight beside a 16-bit one."""
STEP = "step"
"""The `key` of a parameter's count of updates; in old checkpoints `optimizer_step`, for all."""


@dataclass(frozen=True)
class LocalRead:
    """Reads a state tensor without waiting for others: shards are copied, and gathered later."""

    shard: Callable[[], torch.Tensor | None]
    """Returns this rank's shard of the live tensor; None if it has none that `gather` needs."""
    gather: Callable[[torch.Tensor | None, Ranks], torch.Tensor | None]
    """Returns the whole tensor on its owner, from copied shards on the host. Collective."""


@dataclass(frozen=True)
class StateTensor:
    """One named tensor of the training state.

    `read` and `write` are collective: every rank calls them, for all state tensors in the same
    order. `read()` returns the whole tensor on rank `owner` and None elsewhere; `write(tensor)` is
    called with the whole tensor on every rank, and each rank keeps its shard.
    """

    name: str
    """The parameter's Hugging Face name, e.g. `model.layers.0.mlp.up_proj.weight`."""
    key: str
    """`weight`, or the optimizer's name: `master` (float32), `exp_avg`, `exp_avg_sq`, `step`."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    owner: int
    read: Callable[[], torch.Tensor | None]
    write: Callable[[torch.Tensor], None]
    local: LocalRead | None = None
    keep: Callable[[Mapping[str, tuple[int, ...]]], list[StateTensor]] | None = None
    """Makes the optimizer keep state for this weight as a checkpoint does; None if the weight is
    not trained. `keep(shapes)`, by key: all keys or, if empty, none. Returns the state tensors to
    be written. Not collective.
    """


def renamed(entries: Sequence[StateTensor], names: Mapping[str, str]) -> list[StateTensor]:
    """Return the state tensors under their names in files."""

    def one(entry: StateTensor) -> StateTensor:
        keep = entry.keep
        kept = None if keep is None else lambda shapes: renamed(keep(shapes), names)
        return replace(entry, name=names.get(entry.name, entry.name), keep=kept)

    return [one(entry) for entry in entries] if names else list(entries)


@dataclass(frozen=True)
class RunState:
    """The position of a run. `samples` alone determines the data that comes next."""

    step: int = 0
    """Optimizer steps done."""
    samples: int = 0
    """Samples seen, over all ranks, since the start of the run."""
    tokens: int = 0
    """Label tokens seen, over all ranks."""
    engine: dict[str, float] = field(default_factory=dict)
    """Scalars that the engine restores: the loss scale, the optimizer's own step count."""
