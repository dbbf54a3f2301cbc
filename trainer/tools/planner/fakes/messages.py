"""The messages of one rank, in order: an entry for each collective, send and receive."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup, _resolve_process_group
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from torch._ops import OpOverload

_OPERATORS = {
    "all-reduce": "allreduce_ all_reduce all_reduce_ allreduce_coalesced_ all_reduce_coalesced",
    "all-gather": "_allgather_base_ allgather_ allgather_into_tensor_coalesced_ "
    "all_gather_into_tensor all_gather_into_tensor_out all_gather_into_tensor_coalesced",
    "reduce-scatter": "_reduce_scatter_base_ reduce_scatter_ reduce_scatter_tensor "
    "reduce_scatter_tensor_coalesced_ reduce_scatter_tensor_coalesced",
    "all-to-all": "alltoall_ alltoall_base_ all_to_all_single shard_dim_alltoall",
    "broadcast": "broadcast_ broadcast",
    "reduce": "reduce_",
    "gather": "gather_",
    "scatter": "scatter_",
    "send": "send",
    "receive": "recv_",
    "barrier": "barrier",
}
NAMES = {operator: name for name, words in _OPERATORS.items() for operator in words.split()}
"""PyTorch's communication operators -> the field's names."""
LIBRARIES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor")
POINT_TO_POINT = ("send", "receive")
HERE = Path(__file__).parent.parent
PACKAGE = HERE.parents[1]


@dataclass(frozen=True)
class Message:
    """One collective, or one end of a point-to-point message."""

    name: str
    """The field's name: all-reduce, all-gather, ..., send, receive."""
    group: tuple[int, ...]
    """The ranks that take part; of a send or receive, this rank and its peer."""
    dtype: torch.dtype | None
    size: int
    """Bytes of the whole tensor that is reduced or gathered: the larger of input and output."""
    phase: str
    place: str
    """The place in this package's code: `file:line function`."""
    peer: int | None = None
    """The other rank of a send or receive."""

    @property
    def sent(self) -> float:
        """Bytes that this rank sends if rings are used (Thakur et al., 2005; NCCL's `busbw`)."""
        if self.name in POINT_TO_POINT:
            return float(self.size) if self.name == "send" else 0.0
        share = (len(self.group) - 1) / max(1, len(self.group))
        return (2 if self.name == "all-reduce" else 1) * share * self.size


class Messages(TorchDispatchMode):
    """A dispatch mode that records a rank's messages while it is entered."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.phase = ""
        self.found: list[Message] = []

    def begin(self, phase: str) -> None:
        """Begin `phase`: what follows belongs to it."""
        self.phase = phase

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented
        library, _, name = func._schema.name.partition("::")
        output = func(*args, **(kwargs or {}))
        if library in LIBRARIES and name in NAMES:
            self._note(NAMES[name], args, output)
        return output

    def _note(self, name: str, args: tuple[Any, ...], output: object) -> None:
        group = _group(args)
        if len(group) == 1:
            return
        sides = [_tensors(value) for value in (*args, output)]
        dtype = next((tensor.dtype for tensor in _tensors(args)), None)
        size = max(sum(tensor.nbytes for tensor in side) for side in sides)
        peer = None
        if name in POINT_TO_POINT:
            peer = group[int(args[2])]
            group = tuple(sorted((self.rank, peer)))
        self.found.append(Message(name, group, dtype, size, self.phase, place(), peer))


def _tensors(value: object) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _group(args: Sequence[object]) -> tuple[int, ...]:
    boxed = [(ProcessGroup.unbox, value) for value in args if isinstance(value, torch.ScriptObject)]
    named = [(_resolve_process_group, word) for word in reversed(args) if isinstance(word, str)]
    groups: list[tuple[Callable[[Any], ProcessGroup], Any]] = [*boxed, *named]
    for group_of, value in groups:
        with suppress(RuntimeError, TypeError, ValueError):  # of these types is a reduction, too
            return tuple(dist.get_process_group_ranks(group_of(value)))
    return ()


def place() -> str:
    """Return the innermost running line of this package outside the planner; empty without one."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if name := _engines_file(frame.f_code.co_filename):
            return f"{name}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return ""


@cache
def _engines_file(name: str) -> str | None:
    """Return a file's path in this package; None for a file of a library or of the planner."""
    path = Path(name)
    ours = path.is_relative_to(PACKAGE) and HERE not in path.parents
    return str(path.relative_to(PACKAGE.parent)) if ours else None
