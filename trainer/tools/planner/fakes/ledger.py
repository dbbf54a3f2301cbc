"""The memory that a run takes, on real or fake tensors: an entry for each storage.

Storages count, not tensors: views are free, and a storage with several names counts once. Sizes are
as requested; `rounded` is as an allocator serves them. Memory inside kernels is not recorded.
"""

from __future__ import annotations

import sys
import weakref
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import PurePath
from types import FrameType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trainer.distributed.autograd import in_backward
from trainer.models.names import pattern_of
from trainer.tasks.task import bare_name
from trainer.tools.planner.fakes.memory_history import MemoryHistory, Peak
from trainer.tools.planner.fakes.pretend import resizes_reported

if TYPE_CHECKING:
    from torch._ops import OpOverload

BLOCK = 512
"""Bytes to which the CUDA allocator rounds up (c10/cuda/CUDACachingAllocator: kMinBlockSize)."""
BUILD = "build"
SAVE = "save"
"""The phases in which new tensors are never activations."""
COMMUNICATING = {
    "_fully_shard": ("_fsdp_collectives.py", "_fsdp_param.py", "_fsdp_param_group.py"),
    "zero": (
        *("partition_parameters.py", "contiguous_memory_allocator.py"),
        *("stage_1_and_2.py", "stage3.py"),
    ),
    "planner": ("replicas_by_buckets.py", "patches.py"),
    "recompute": ("offload.py",),
}
"""Files, by folder, whose functions make tensors to communicate, gathered weights included."""
KEPT = {
    ("offload.py", "empty_like"): "block inputs",
    ("stage_1_and_2.py", "zeros"): "optimizer",
    ("stage_1_and_2.py", "full"): "optimizer",
    ("stage3.py", "zeros"): "gradients",
}
"""The kinds of the tensors that these files keep instead, by file and operator.

Those of offload.py are on the host."""
MADE = {
    "_to_copy": "casts to another dtype",
    "constant_pad_nd": "padded tensors",
    "empty": "buffers",
    "empty_like": "buffers",
    "empty_strided": "buffers",
    "mm": "matrix products",
    "ones_like": "tensors of ones",
    "zeros": "tensors that begin as zeros",
    "zeros_like": "tensors that begin as zeros",
}
"""Operators of PyTorch -> what they make, for the report; the names of others say it."""
WHOLE = ("models", "materialise.py", "empty")
"""Folder and file of the function that makes parameters whole, on the host, and its operator."""
INITIAL = "initial values"
"""The kind of these: a rank's part of them goes to its device."""
FRAMES = 12
"""The number of callers that are searched for such a file."""


@dataclass(eq=False, slots=True)
class Allocation:
    """One storage, from its allocation to its release, in ticks of the ledger."""

    size: int
    """Bytes."""
    kind: str
    """weights, gradients, optimizer, activations, logits, communication, temporaries or data."""
    module: str
    """The dotted name of the module whose forward pass made it; empty outside any."""
    operator: str
    born: int
    died: int | None = None

    @property
    def consumer(self) -> str:
        """The kind with the module, blocks counted together; outside modules with what was made."""
        made = pattern_of(self.module) or MADE.get(self.operator, self.operator)
        return f"{self.kind} of {made}"

    @property
    def rounded(self) -> int:
        """Bytes that an allocator gives it."""
        return -(-self.size // BLOCK) * BLOCK

    def belong_to(self, kind: str, module: str) -> None:
        """Set the kind, and the module unless the name is empty."""
        self.kind = kind
        self.module = module or self.module

    def free(self, tick: int) -> None:
        self.died = tick


class Ledger(TorchDispatchMode):
    """A dispatch mode that records each storage made and freed while it is entered.

    `vocabulary`: floating-point tensors whose last dimension has this size count as logits.
    `blocks`: the names of the model's blocks, in order.
    """

    def __init__(self, vocabulary: int = 0, blocks: Sequence[str] = ()) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self._places = {name: place for place, name in enumerate(blocks)}
        self._entered: list[tuple[int, int]] = []  # tick and place of each block's forward pass
        self._marks: list[int] = []
        self._in_backward = False
        self._updated = ""  # the last phase that has begun its update
        self.allocations: list[Allocation] = []
        self.phases: list[tuple[str, int]] = []  # with their first ticks
        self._tick = 0
        self._operators = [0]
        self._live: dict[int, Allocation] = {}  # by the address of the storage's Python object
        self._names: dict[nn.Module, str] = {}
        self._stack: list[str] = []
        self._refs: dict[int, object] = {}

    def begin(self, phase: str) -> None:
        """Begin `phase`: what follows belongs to it."""
        self.phases.append((phase, self._tick))

    def mark(self) -> None:
        """Begin the last part of the phase, the update, unless it has begun."""
        if self._updated != self.phases[-1][0]:
            self._updated = self.phases[-1][0]
            self._marks.append(self._tick)

    def of(self, tensor: torch.Tensor | None, kind: str, name: str = "") -> None:
        """Set the kind, and the name, of a tensor's storage, which is recorded if it is new."""
        if tensor is None:
            return
        inner = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storage = inner.untyped_storage()
        if id(storage) not in self._live:
            self._note(storage, kind, name, "given")
        self._live[id(storage)].belong_to(kind, name)

    @contextmanager
    def watching(self, modules: Iterable[nn.Module]) -> Iterator[None]:
        """Record the forward passes of these modules, and of those within them, by name."""
        for root in modules:
            named = root.named_modules()
            self._names |= {module: bare_name(name) for name, module in named if name}
        hooks = nn.modules.module
        with ExitStack() as stack:
            stack.callback(hooks.register_module_forward_pre_hook(self._enter).remove)
            after = hooks.register_module_forward_hook(self._leave, always_call=True)
            stack.callback(after.remove)
            yield

    @contextmanager
    def open(self) -> Iterator[Ledger]:
        """Enter the mode, and record storages that are freed and resized without the dispatcher."""
        with resizes_reported(self._resized), self:
            yield self

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        if func is torch.ops.prim.device.default:
            return _device(args[0])  # called twice as often as any computation
        if func is torch.ops._c10d_functional.wait_tensor.default:
            # on a fake tensor the operator would copy
            return args[0] if isinstance(args[0], FakeTensor) else func(*args)
        self._ticks(func)
        if in_backward() is not self._in_backward:
            self._in_backward = not self._in_backward
            self._marks.append(self._tick)
        output = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(output):
            plain = isinstance(leaf, torch.Tensor) and not isinstance(leaf, DTensor)
            if not plain or _device(leaf).type == "meta":
                continue
            storage = leaf.untyped_storage()
            if id(storage) in self._live:
                self._resized(storage)
            else:
                kind = self._kind_of(leaf, func._opname)
                self._note(storage, kind, self._module, func._opname)
        return output

    def _ticks(self, operator: OpOverload | None) -> None:
        """Begin a tick; None: a storage is resized."""
        self._tick += 1
        self._operators.append(0 if operator is None else _number_of(operator))

    def _note(self, storage: torch.UntypedStorage, kind: str, module: str, operator: str) -> None:
        key = id(storage)
        line = Allocation(storage.nbytes(), kind, module, operator, self._tick)
        self._live[key] = line
        self._refs[key] = weakref.ref(storage, lambda _: self._freed(key))
        if line.size:
            self.allocations.append(line)

    def _freed(self, key: int) -> None:
        self._refs.pop(key, None)
        if (line := self._live.pop(key, None)) is not None:
            line.free(self._tick)

    def _resized(self, storage: torch.UntypedStorage) -> None:
        line = self._live.get(id(storage))
        if line is None or line.size == storage.nbytes():
            return
        self._ticks(None)
        line.free(self._tick)
        self._note(storage, line.kind, line.module, line.operator)

    @property
    def _module(self) -> str:
        """The name of the module whose forward pass runs; empty outside any."""
        return self._stack[-1] if self._stack else ""

    def _kind_of(self, tensor: torch.Tensor, operator: str) -> str:
        """Return the kind of a new tensor. Forward passes and recomputation enable gradients."""
        frame: FrameType | None = sys._getframe(2)
        for _ in range(FRAMES):
            if frame is None:
                break
            folder, name = _place(frame.f_code.co_filename)
            if (folder, name, operator) == WHOLE:
                return INITIAL
            if name in COMMUNICATING.get(folder, ()):
                return KEPT.get((name, operator), "communication")
            frame = frame.f_back
        wide = tensor.is_floating_point() and tensor.ndim > 1
        if self.vocabulary and wide and tensor.shape[-1] == self.vocabulary:
            return "logits"
        made = torch.is_grad_enabled() and self.phases[-1][0] not in (BUILD, SAVE)
        return "activations" if made else "temporaries"

    def _enter(self, module: nn.Module, arguments: object) -> None:
        name = self._names.get(module, self._module)
        # not if it is recomputed
        if name in self._places and name != self._module and not in_backward():
            self._entered.append((self._tick, self._places[name]))
        self._stack.append(name)

    def _leave(self, module: nn.Module, arguments: object, output: object) -> None:
        if self._stack:
            self._stack.pop()

    def peaks(self) -> list[Peak]:
        """Return each phase's peak, in order; the largest if the phase occurs several times."""
        return self.history().peaks()

    def history(self) -> MemoryHistory:
        """Return all that was recorded."""
        places: dict[tuple[str, str], int] = {}
        spans = []
        for line in self.allocations:
            if self._on_host(line):
                continue
            place = places.setdefault((line.kind, line.consumer), len(places))
            died = self._tick if line.died is None else line.died
            spans.append((line.born, died, line.size, line.rounded - line.size, place))
        table = np.array(spans, np.int64).reshape(-1, 5)
        marks = sorted({*self._marks, *self._passes()})
        operators = np.array(self._operators, np.int64)
        return MemoryHistory(tuple(self.phases), tuple(marks), table, tuple(places), operators)

    def _passes(self) -> Iterator[int]:
        """Yield the ticks at which the first and the last block of each forward pass begin."""
        runs: list[list[int]] = []
        previous = -1
        for tick, place in self._entered:
            if not runs or place <= previous:
                runs.append([])
            runs[-1].append(tick)
            previous = place
        for run in runs:
            yield run[0]
            yield run[-1]

    def _on_host(self, line: Allocation) -> bool:
        """Return True for a whole parameter that was freed while the engine was built."""
        built = next((tick for phase, tick in self.phases if phase != BUILD), self._tick)
        return line.kind == INITIAL and line.died is not None and line.died <= built


@cache
def _number_of(operator: OpOverload) -> int:
    return zlib.crc32(str(operator).encode())


@cache
def _place(file: str) -> tuple[str, str]:
    """Return the folder and the name of a file."""
    path = PurePath(file)
    return path.parent.name, path.name


def _device(tensor: torch.Tensor) -> torch.device:
    """Return a tensor's device; a fake tensor's pretended one, without calling dispatch modes."""
    return tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device
