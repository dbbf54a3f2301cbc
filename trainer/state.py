"""The content of a checkpoint: state tensors under Hugging Face names, and the run's position.

Engines produce state tensors, `checkpoint/` stores them; neither knows the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch

    from trainer.distributed.ranks import Ranks

VERSION = "0.2.0"
"""The version of this program, which every checkpoint records."""
WEIGHT = "weight"
"""The `key` of model weights; every other key is optimizer state of the same name."""
CARRIED = "carried"
"""The `key` of a tensor of a base that the trained model has no place for: its bytes are kept."""
MASTER = "master"
"""The `key` of the exact float32 weight beside a 16-bit one."""
STEP = "step"
"""The `key` of a parameter's count of updates; in old checkpoints `optimizer_step`, for all."""


@dataclass(frozen=True)
class Part:
    """A part of a state tensor that one rank holds, and its place in the whole."""

    value: torch.Tensor
    offset: int = 0
    """Values of the whole before its first one."""
    strides: tuple[int, ...] | None = None
    """Values of the whole from one to the next, along each dimension; None: it is the whole."""

    def within(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the view of the whole tensor that is this part of it."""
        if self.strides is None:
            return whole
        return whole.as_strided(self.value.shape, self.strides, self.offset)


class Reader(Protocol):
    """Reads one state tensor from where it is stored, a part at a time."""

    def fill(self, part: Part) -> None:
        """Replace the values of a part, on any device, by those at its place in the whole.

        Raises DiskError if they can't be read.
        """


class FileTensor(NamedTuple):
    """A tensor in a file, of consecutive bytes of a state tensor: one expert of all."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class StateTensor:
    """One named tensor of the training state.

    `parts()` returns what this rank writes of it: over all ranks each value once. `write` is
    collective: every rank calls it, for all state tensors in the same order, and reads its shard.
    """

    name: str
    """The parameter's Hugging Face name, e.g. `model.layers.0.mlp.up_proj.weight`."""
    key: str
    """`weight`, or the optimizer's name: `master` (float32), `exp_avg`, `exp_avg_sq`, `step`."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    owner: int
    """The rank with the tensor's file, which also writes what several ranks hold."""
    parts: Callable[[], list[Part]]
    write: Callable[[Reader], None]
    keep: Callable[[Mapping[str, tuple[int, ...]]], list[StateTensor]] | None = None
    """Makes the optimizer keep state for this weight as a checkpoint does; None if the weight is
    not trained. `keep(shapes)`, by key: all keys or, if empty, none. Returns the state tensors to
    be written. Not collective.
    """
    pieces: tuple[FileTensor, ...] = ()
    """The tensors in files that its bytes are, in order; empty: one, under its name."""
    file_dtype: torch.dtype | None = None
    """The dtype that it has in a model's files whatever that of the others; None: theirs."""

    def read(self, ranks: Ranks) -> torch.Tensor:
        """Return the whole tensor on the host of every rank. Collective; for small models."""
        import torch

        own = [replace(part, value=part.value.detach().cpu().clone()) for part in self.parts()]
        whole = torch.empty(self.shape, dtype=self.dtype)
        for part in (part for parts in ranks.gather(own) for part in parts):
            part.within(whole).copy_(part.value)
        return whole


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
