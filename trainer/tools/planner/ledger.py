"""A record of the memory that a run takes, on real or fake tensors: an entry for each storage, made
or freed.

Storages count, not tensors: views are free, and a storage with several names counts once. Sizes are
as requested; `rounded` is what an allocator makes of them. Memory that a kernel takes inside itself
is not seen.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trainer.tasks.task import bare_name
from trainer.tools.planner.pretend import resizes_reported

KINDS = (
    "weights",
    "gradients",
    "optimizer",
    "activations",
    "logits",
    "communication",
    "temporaries",
    "data",
)
"""The purposes of memory. `communication`: what collectives send from and receive into, gathered
weights too.
"""
BLOCK = 512
"""Bytes that PyTorch's CUDA allocator rounds a tensor up to (c10/cuda/CUDACachingAllocator:
kMinBlockSize).
"""
BUILD, SAVE = "build", "save"
"""The phases in which new tensors are never activations."""
PLACES = {
    "_fsdp_collectives.py": "communication",
    "_fsdp_param.py": "communication",
    "_fsdp_param_group.py": "communication",
    "partition_parameters.py": "communication",
    "stage_1_and_2.py": "communication",
    "stage3.py": "communication",
    "contiguous_memory_allocator.py": "communication",
    "replicas_by_buckets.py": "communication",
    "partitions_at_once.py": "communication",
}
"""Files of FSDP2 and DeepSpeed whose functions make tensors to communicate."""
KEPT = {
    ("stage_1_and_2.py", "zeros"): "optimizer",
    ("stage_1_and_2.py", "full"): "optimizer",
    ("stage3.py", "zeros"): "gradients",
}
"""Gradients and copies that DeepSpeed's ZeRO keeps on the optimizer's device, by file and
operator.
"""


@dataclass(eq=False, slots=True)
class Allocation:
    """One storage, from its allocation to its release, in ticks of the ledger."""

    size: int
    """Bytes."""
    kind: str
    module: str
    """The dotted name of the module whose forward pass made it; empty outside of any."""
    operator: str
    born: int
    died: int | None = None

    @property
    def rounded(self) -> int:
        """Bytes that an allocator gives it."""
        return -(-self.size // BLOCK) * BLOCK


@dataclass(frozen=True)
class Peak:
    """The moment of a phase, or of the whole run, with the most memory in use."""

    phase: str
    size: int
    """Bytes."""
    by_kind: dict[str, int]
    by_consumer: dict[str, int]
    """Bytes by kind and module, blocks counted together."""
    rounding: int
    """Bytes that an allocator's rounding adds."""

    @property
    def largest(self) -> list[tuple[str, int]]:
        """The three consumers with the most bytes."""
        return sorted(self.by_consumer.items(), key=lambda item: -item[1])[:3]


@dataclass(eq=False)
class Ledger(TorchDispatchMode):
    """A dispatch mode that records each storage made and freed while it is entered.

    `vocabulary`: floating-point tensors whose last dimension has this size count as logits.
    """

    vocabulary: int = 0
    allocations: list[Allocation] = field(default_factory=list)
    phases: list[tuple[str, int]] = field(default_factory=list)
    """Each phase that began, with its first tick, in order."""

    def __post_init__(self) -> None:
        super().__init__()
        self._tick = 0
        self._live: dict[int, Allocation] = {}  # by the address of the storage's Python object
        self._names: dict[nn.Module, str] = {}
        self._stack: list[str] = []
        self._refs: dict[int, Any] = {}

    def begin(self, phase: str) -> None:
        """Begin `phase`: what follows belongs to it."""
        self.phases.append((phase, self._tick))

    def of(self, tensor: torch.Tensor | None, kind: str, name: str = "") -> None:
        """Set the purpose of a tensor; it is recorded now if it was not yet."""
        if tensor is None:
            return
        inner = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storage = inner.untyped_storage()
        if id(storage) not in self._live:
            self._note(storage, kind, name or "", "given")
        found = self._live.get(id(storage))
        if found is not None:
            found.kind = kind
            found.module = name or found.module

    @contextmanager
    def watching(self, modules: Iterable[nn.Module]) -> Iterator[None]:
        """Record the forward passes of these modules, and of those within them, by name."""
        for root in modules:
            self._names |= {
                module: bare_name(name) for name, module in root.named_modules() if name
            }
        hooks = nn.modules.module
        before = hooks.register_module_forward_pre_hook(self._enter)
        after = hooks.register_module_forward_hook(self._leave, always_call=True)
        try:
            yield
        finally:
            before.remove()
            after.remove()

    @contextmanager
    def open(self) -> Iterator[Ledger]:
        """Enter the mode, and record storages that are freed and resized without the dispatcher."""
        with resizes_reported(self._resized), self:
            yield self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        if func is torch.ops.prim.device.default:
            return _device(args[0])  # called twice as often as any computation
        self._tick += 1
        output = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(output):
            if (
                isinstance(leaf, torch.Tensor)
                and not isinstance(leaf, DTensor)
                and _device(leaf).type != "meta"
            ):
                storage = leaf.untyped_storage()
                known = self._live.get(id(storage))
                if known is None:
                    self._note(
                        storage,
                        self._kind_of(leaf, func._opname),
                        self._stack[-1] if self._stack else "",
                        func._opname,
                    )
                elif known.size != storage.nbytes():
                    self._resized(storage)
        return output

    def _note(self, storage: torch.UntypedStorage, kind: str, module: str, operator: str) -> None:
        size = storage.nbytes()
        key = id(storage)
        line = Allocation(size, kind, module, operator, self._tick)
        self._live[key] = line
        self._refs[key] = weakref.ref(storage, lambda _: self._freed(key))
        if size:
            self.allocations.append(line)

    def _freed(self, key: int) -> None:
        self._refs.pop(key, None)
        if (line := self._live.pop(key, None)) is not None:
            line.died = self._tick

    def _resized(self, storage: torch.UntypedStorage) -> None:
        line = self._live.get(id(storage))
        if line is None or line.size == storage.nbytes():
            return
        self._tick += 1
        line.died = self._tick
        self._live[id(storage)] = again = Allocation(
            storage.nbytes(), line.kind, line.module, line.operator, self._tick
        )
        if again.size:
            self.allocations.append(again)

    def _kind_of(self, tensor: torch.Tensor, operator: str) -> str:
        """Return the kind of a new tensor. Forward passes, and recomputation, run with gradients
        enabled.
        """
        frame: Any = sys._getframe(2)
        for _ in range(12):
            if frame is None:
                break
            name = frame.f_code.co_filename.rpartition("/")[2]
            if (kind := PLACES.get(name)) is not None:
                return KEPT.get((name, operator), kind)
            frame = frame.f_back
        if (
            self.vocabulary
            and tensor.is_floating_point()
            and tensor.ndim > 1
            and tensor.shape[-1] == self.vocabulary
        ):
            return "logits"
        made = torch.is_grad_enabled() and self.phases[-1][0] not in (BUILD, SAVE)
        return "activations" if made else "temporaries"

    def _enter(self, module: nn.Module, arguments: Any) -> None:
        self._stack.append(self._names.get(module, self._stack[-1] if self._stack else ""))

    def _leave(self, module: nn.Module, arguments: Any, output: Any) -> None:
        if self._stack:
            self._stack.pop()

    def peaks(self) -> list[Peak]:
        """Return the peak of each phase, in order; a phase that occurs several times has its
        largest.
        """
        bounds = [
            (name, start, end) for (name, start), end in zip(self.phases, self._ends(), strict=True)
        ]
        found: dict[str, Peak] = {}
        for name, start, end in bounds:
            peak = self._peak(name, start, end)
            if name not in found or peak.size > found[name].size:
                found[name] = peak
        return list(found.values())

    def _ends(self) -> list[int]:
        return [start for _, start in self.phases[1:]] + [self._tick + 1]

    def _peak(self, phase: str, start: int, end: int) -> Peak:
        changes: Counter[int] = Counter()
        for line in self.allocations:
            died = self._tick + 1 if line.died is None else line.died
            if line.born < end and died >= start:
                changes[max(line.born, start)] += line.size
                changes[died + 1] -= line.size
        size = most = 0
        when = start
        for tick in sorted(tick for tick in changes if tick < end):
            size += changes[tick]
            if size > most:
                most, when = size, tick
        live = [
            line
            for line in self.allocations
            if line.born <= when and (line.died is None or line.died >= when)
        ]
        return peak_of(phase, live)


def _device(tensor: torch.Tensor) -> torch.device:
    """Return the device, or the one it pretends to be on: asking a fake tensor itself goes through
    all modes.
    """
    return tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device


def peak_of(phase: str, live: Iterable[Allocation]) -> Peak:
    """Add up the storages that live at one moment."""
    kinds: Counter[str] = Counter()
    consumers: Counter[str] = Counter()
    rounding = 0
    for line in live:
        kinds[line.kind] += line.size
        consumers[f"{line.kind} of {generic(line.module) or line.operator}"] += line.size
        rounding += line.rounded - line.size
    return Peak(phase, sum(kinds.values()), dict(kinds), dict(consumers), rounding)


def generic(name: str) -> str:
    """Replace numbers in a dotted name by `*`: layers.3.mlp -> layers.*.mlp."""
    return ".".join("*" if word.isdigit() else word for word in name.split("."))
