"""What lives in memory, tensor by tensor, over a run of real or fake tensors: a line for each storage.

Storages count, not tensors: views are free, and what several names refer to counts once. Sizes are what was asked
for; what an allocator rounds up is `rounded`. What a kernel takes inside itself is not seen.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from trainer.tasks.task import bare_name

KINDS = ("weights", "gradients", "optimizer", "activations", "logits", "communication", "temporaries", "data")
"""What memory is for. `communication`: what collectives send from and receive into, gathered weights among it."""
BLOCK = 512
"""Bytes that PyTorch's CUDA allocator rounds a tensor up to (c10/cuda/CUDACachingAllocator: kMinBlockSize)."""
BUILD, SAVE = "build", "save"
"""The phases in which what is made is no activation."""
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
"""Files whose functions make tensors to send them, of FSDP2 and DeepSpeed."""
KEPT = {
    ("stage_1_and_2.py", "zeros"): "optimizer",
    ("stage_1_and_2.py", "full"): "optimizer",
    ("stage3.py", "zeros"): "gradients",
}
"""What DeepSpeed's ZeRO makes on the optimizer's device, by file and operator: gradients and copies that it keeps."""


@dataclass(eq=False, slots=True)
class Allocation:
    """One storage, from when it was made to when it was freed, in ticks of the ledger."""

    size: int
    """Bytes."""
    kind: str
    module: str
    """The module whose forward pass made it, by its dotted name; empty outside of one."""
    operator: str
    born: int
    died: int | None = None

    @property
    def rounded(self) -> int:
        """Bytes that an allocator gives it."""
        return -(-self.size // BLOCK) * BLOCK


@dataclass(frozen=True)
class Peak:
    """The fullest moment of a phase, or of all."""

    phase: str
    size: int
    """Bytes."""
    by_kind: dict[str, int]
    by_consumer: dict[str, int]
    """Bytes of each kind of each module, blocks counted together."""
    rounding: int
    """Bytes that an allocator's rounding adds."""

    @property
    def largest(self) -> list[tuple[str, int]]:
        """The three consumers with the most bytes."""
        return sorted(self.by_consumer.items(), key=lambda item: -item[1])[:3]


@dataclass(eq=False)
class Ledger(TorchDispatchMode):
    """Writes down each storage that is made and freed while it is entered.

    `vocabulary`: a floating tensor whose last dimension this is, counts as logits.
    """

    vocabulary: int = 0
    allocations: list[Allocation] = field(default_factory=list)
    phases: list[tuple[str, int]] = field(default_factory=list)
    """What began, and when, in order."""

    def __post_init__(self) -> None:
        super().__init__()
        self._tick = 0
        self._live: dict[int, Allocation] = {}  # by the address of the storage's Python object
        self._names: dict[nn.Module, str] = {}
        self._stack: list[str] = []
        self._refs: dict[int, Any] = {}

    def begin(self, phase: str) -> None:
        """What comes now belongs to `phase`."""
        self.phases.append((phase, self._tick))

    def of(self, tensor: torch.Tensor | None, kind: str, name: str = "") -> None:
        """Say what a tensor is for; written down here if it was not yet."""
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
        """Names the forward passes of these, and of what they contain."""
        for root in modules:
            self._names |= {module: bare_name(name) for name, module in root.named_modules() if name}
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
        """Enter it, with what frees and regrows storages behind the dispatcher's back."""
        plain = torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            found = plain(storage, size)
            self._resized(storage)
            return found

        propagate = ShardingPropagator._propagate_tensor_meta_non_cached

        def paused(*arguments: Any, **options: Any) -> Any:
            with _disable_current_modes():  # DTensor asks fakes of its own for shapes, of the whole tensor
                return propagate(*arguments, **options)

        with (
            mock.patch.object(torch.UntypedStorage, "resize_", resize),
            mock.patch.object(ShardingPropagator, "_propagate_tensor_meta_non_cached", paused),
            self,
        ):
            yield self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        if func is torch.ops.prim.device.default:
            return _device(args[0])  # asked for twice as often as anything is computed
        self._tick += 1
        output = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and not isinstance(leaf, DTensor) and _device(leaf).type != "meta":
                storage = leaf.untyped_storage()
                known = self._live.get(id(storage))
                if known is None:
                    self._note(
                        storage, self._kind_of(leaf, func._opname), self._stack[-1] if self._stack else "", func._opname
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
        """Of a tensor that was just made. Forward passes keep the graph on, and so does what is computed again."""
        frame: Any = sys._getframe(2)
        for _ in range(12):
            if frame is None:
                break
            name = frame.f_code.co_filename.rpartition("/")[2]
            if (kind := PLACES.get(name)) is not None:
                return KEPT.get((name, operator), kind)
            frame = frame.f_back
        if self.vocabulary and tensor.is_floating_point() and tensor.ndim > 1 and tensor.shape[-1] == self.vocabulary:
            return "logits"
        made = torch.is_grad_enabled() and self.phases[-1][0] not in (BUILD, SAVE)
        return "activations" if made else "temporaries"

    def _enter(self, module: nn.Module, arguments: Any) -> None:
        self._stack.append(self._names.get(module, self._stack[-1] if self._stack else ""))

    def _leave(self, module: nn.Module, arguments: Any, output: Any) -> None:
        if self._stack:
            self._stack.pop()

    def peaks(self) -> list[Peak]:
        """The fullest moment of each phase, in order; a phase that came several times has its fullest."""
        bounds = [(name, start, end) for (name, start), end in zip(self.phases, self._ends(), strict=True)]
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
        live = [line for line in self.allocations if line.born <= when and (line.died is None or line.died >= when)]
        return peak_of(phase, live)


def _device(tensor: torch.Tensor) -> torch.device:
    """Where it is, or pretends to be: to ask a fake tensor itself is a call through all modes."""
    return tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device


def peak_of(phase: str, live: Iterable[Allocation]) -> Peak:
    """What lives at one moment, added up."""
    kinds: Counter[str] = Counter()
    consumers: Counter[str] = Counter()
    rounding = 0
    for line in live:
        kinds[line.kind] += line.size
        consumers[f"{line.kind} of {generic(line.module) or line.operator}"] += line.size
        rounding += line.rounded - line.size
    return Peak(phase, sum(kinds.values()), dict(kinds), dict(consumers), rounding)


def generic(name: str) -> str:
    """layers.3.mlp -> layers.*.mlp"""
    return ".".join("*" if word.isdigit() else word for word in name.split("."))
