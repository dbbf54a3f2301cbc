"""One training step of one rank, counted without a device, on fake ranks and fake tensors.

    step = counted(workload(zero_stage=3, shard=8, accumulation=4, model=LLAMA))
    step.reads                    # {"trainer/optim/optimizer.py:73 step_if_finite": 1}: host reads
    step.collectives()            # {("all-gather", ("shard",), "bfloat16"): (count, bytes)}
    step.operators("recompute")   # {"aten.mul": 12, ...}; also "forward", "backward", "no_grad"
    step.events                   # all of them, in the order in which they were launched

It counts the second step: the first creates the optimizer's state. Bytes are those of the whole
tensor that is reduced or gathered, the larger of input and output (`Message.size`). Each rank runs
in a process of its own, as many at a time as there are cores (`count`). Fake tensors are on the
CPU: a read of a value is seen, and one of an operator whose output's shape depends on values is an
error; `tensor.cpu()`, which copies nothing here, is not seen.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from tests.support.training import LLAMA, Case, spec_of, task_of
from trainer.engines import ENGINES, Job, Machine
from trainer.errors import ConfigError, Problem
from trainer.layout import AXES, PIPELINE_SCHEDULES, Layout, Recompute
from trainer.models.spec import ModelSpec, NoWeights
from trainer.optim.decay import spared
from trainer.optim.lr_schedules import Update
from trainer.tools.planner.fakes.messages import Message, Messages, place
from trainer.tools.planner.fakes.pretend import pretending
from trainer.tools.planner.simulate import SampleCost, Workload

LENGTH = 32
READS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default)
"""The operators by which the host waits for a value of the device."""

NO_WORK = ("prim.", "profiler.")
"""Beginnings of the names of operators that compute nothing."""

Kind = tuple[str, tuple[str, ...], str]
"""The name of a collective, the axes along which its ranks differ, and its dtype."""


@dataclass(frozen=True)
class Event:
    """One operator, host read or message, in the order in which they were launched."""

    name: str
    """`aten.mm` for an operator; the field's name for a message."""
    during: str
    """The pass: forward, backward, recompute (a forward inside a backward pass) or no_grad."""
    block: int | None
    """The block of the model in whose forward or backward pass it was; None outside of blocks."""
    place: str = ""
    """Of a host read or a message: the line of this package's code."""
    message: Message | None = None

    @property
    def is_read(self) -> bool:
        return self.message is None and bool(self.place)


@dataclass(frozen=True)
class Step:
    """The events of one step of one rank."""

    layout: Layout
    events: tuple[Event, ...]

    @property
    def reads(self) -> Counter[str]:
        """Host reads by line."""
        return Counter(event.place for event in self.events if event.is_read)

    @property
    def messages(self) -> list[Message]:
        return [event.message for event in self.events if event.message is not None]

    def collectives(self) -> dict[Kind, tuple[int, int]]:
        """Return the count and bytes of each kind of message in the step."""
        results: dict[Kind, tuple[int, int]] = {}
        for message in self.messages:
            dtype = str(message.dtype).removeprefix("torch.")
            kind = message.name, self._axes_of(message), dtype
            count, size = results.get(kind, (0, 0))
            results[kind] = count + 1, size + message.size
        return results

    def _axes_of(self, message: Message) -> tuple[str, ...]:
        """Return the axes of a message; `secondary` for gathers in one part of `shard` (hpZ)."""
        axes, size = self.layout.axes_of(message.group), self.layout.regathered
        if size and axes == ("shard",) and message.name == "all-gather":
            parts = {self.layout.coordinates(rank)["shard"] // size for rank in message.group}
            return ("secondary",) if len(parts) == 1 else axes
        return axes

    def operators(self, during: str) -> Counter[str]:
        """Count the operators of a pass, by name."""
        return Counter(
            event.name for event in self.events if event.message is None and event.during == during
        )


def layout_of(
    engine: str = "mesh", recompute: str = "none", schedule: str = "1F1B", **sizes: Any
) -> Layout:
    """Describe a layout; what is not given is 1. Raises ConfigError if it is not run."""
    axes = dict.fromkeys(AXES, 1)
    batches = {"micro_batch": 1, "accumulation": 1, "zero_stage": 0, "precision": "float32"}
    layout = Layout(
        **{**axes, **batches, **sizes},
        offload_optimizer="none",
        offload_param="none",
        recompute=Recompute(recompute),  # type: ignore[arg-type]
        schedule=PIPELINE_SCHEDULES[schedule],
    )
    if refusal := ENGINES[engine].refusal(layout):
        raise ConfigError(Problem(f"engine {engine}", refusal, "a layout that it runs"))
    return layout


def workload(
    *,
    engine: str = "mesh",
    model: Mapping[str, Any] = LLAMA,
    length: int = LENGTH,
    optimizer: Mapping[str, Any] | None = None,
    more: Mapping[str, Mapping[str, Any]] | None = None,
    reduced: str = "auto",
    **sizes: Any,
) -> Workload:
    """Describe a small run: a model config, a layout (`layout_of`), and more of the JSON.

    `reduced`: `communication_data_type`.

    Raises ConfigError if the engine does not run the layout.
    """
    layout = layout_of(engine, **sizes)
    whole = {
        "train_batch_size": layout.train_batch,
        "train_micro_batch_size_per_gpu": layout.micro_batch,
        "gradient_accumulation_steps": layout.accumulation,
    }
    case = Case(
        engine=engine,
        world_size=layout.tensor,
        tensor=layout.tensor,
        zero_stage=layout.zero_stage,
        precision=layout.precision,
        more={key: dict(value) for key, value in (more or {}).items()},
        top=whole
        | ({"optimizer": dict(optimizer)} if optimizer else {})
        | ({"communication_data_type": reduced} if reduced != "auto" else {}),
    )
    spec = spec_with(json.dumps(model))

    def batch(count: int) -> dict[str, torch.Tensor]:
        ids = torch.zeros(count, length, dtype=torch.int64)
        return {"input_ids": ids, "targets": torch.ones_like(ids)}

    return Workload(
        layout=layout,
        engine_name=engine,
        engine=ENGINES[engine],
        spec=spec,
        task=task_of(spec, case),
        deepspeed=case.deepspeed(),
        undecayed=spared("norms_and_biases", spec),
        schedule=lambda step: Update(1e-2),
        sample=SampleCost("samples", 1, "", 0.0, 0),
        batch=batch,
    )


@cache
def spec_with(model: str) -> ModelSpec:
    """Return the spec of a model config, given as JSON, without weights."""
    return spec_of(json.loads(model)).with_weights(NoWeights())


def counted(job: Workload, rank: int = 0) -> Step:
    """Count a step of one rank. Raises RuntimeError with what its code raised."""
    [step] = count([(job, rank)])
    return step


def count(jobs: Iterable[tuple[Workload, int]]) -> list[Step]:
    """Count a step of each rank, as many at a time as there are cores."""
    waiting = list(enumerate(jobs))[::-1]
    if any(job.engine_name == "deepspeed" for _, (job, _) in waiting):
        import deepspeed  # noqa: F401 - seconds, once and not in each process
    running: dict[Any, tuple[int, Any]] = {}
    steps: dict[int, Step] = {}
    while waiting or running:
        while waiting and len(running) < (os.cpu_count() or 1):
            index, (job, rank) = waiting.pop()
            ours, theirs = multiprocessing.Pipe(duplex=False)
            process = multiprocessing.get_context("fork").Process(
                target=_run, args=(theirs, job, rank), daemon=True
            )
            process.start()
            theirs.close()
            running[ours] = index, process
        for ready in wait(list(running)):
            index, process = running.pop(ready)
            steps[index] = _received(ready, process)  # type: ignore[arg-type]
    return [steps[index] for index in sorted(steps)]


def _received(pipe: Connection, process: Any) -> Step:
    try:
        result = pipe.recv()
    except EOFError:
        result = "the process ended without an answer"
    process.join()
    if isinstance(result, str):
        raise RuntimeError(result)
    return result  # type: ignore[no-any-return]


def _run(pipe: Connection, job: Workload, rank: int) -> None:
    torch.set_num_threads(1)  # the forked process has no such threads
    gc.freeze()
    try:
        pipe.send(Step(job.layout, tuple(_events(job, rank))))
    except Exception:  # whatever an engine's or a model's own code raises
        pipe.send(traceback.format_exc())
    finally:
        pipe.close()
        os._exit(0)  # nothing of the parent process is finalised here


def _events(job: Workload, rank: int) -> list[Event]:
    layout = job.layout
    received = partial(job.received, rank) if job.engine_name == "deepspeed" else None
    with pretending(rank, layout.world_size, layout.world_size, deepspeed=received) as ranks:
        machine = Machine(torch.device("cpu"), ranks, layout.world_size)
        engine = job.engine.build(
            Job(layout, job.spec, job.task, job.deepspeed, 0, machine, job.undecayed)
        )
        # only a schedule of stages, and DeepSpeed, need the first step's micro-batches
        whole = job.engine_name == "deepspeed" or layout.pipeline > 1
        for number, rounds in enumerate((layout.accumulation if whole else 1, layout.accumulation)):
            batches = [job.batch(layout.micro_batch) for _ in range(rounds)]
            recorder = _Recorder(rank)
            recorder.watch(engine.modules, job.spec)
            with recorder:
                engine.step(number, batches, job.schedule(number))
            recorder.forget()
        return recorder.events


class _Recorder(Messages):
    """A dispatch mode that records each operator, host read and message, with pass and block."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.events: list[Event] = []
        self._block: int | None = None
        self._hooks: list[Any] = []

    def watch(self, modules: Sequence[nn.Module], spec: ModelSpec) -> None:
        """Note in which block events are, by hooks on the blocks that this rank has."""
        blocks = {name: index for index, name in enumerate(spec.blocks)}
        for module in modules:
            for name, block in module.named_modules():
                if (index := blocks.get(name.removeprefix("model."))) is not None:
                    entered = block.register_forward_pre_hook(partial(self._entered, index))
                    left = block.register_forward_hook(partial(self._left, index))
                    self._hooks += [entered, left]

    def forget(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def _entered(self, index: int, block: nn.Module, inputs: Any) -> None:
        self._block = index
        for tensor in _with_gradient(inputs):
            tensor.register_hook(partial(self._gone, index))

    def _left(self, index: int, block: nn.Module, inputs: Any, output: Any) -> None:
        self._block = None
        for tensor in _with_gradient(output):
            tensor.register_hook(partial(self._back, index))

    def _back(self, index: int, gradient: torch.Tensor) -> None:
        self._block = index

    def _gone(self, index: int, gradient: torch.Tensor) -> None:
        if self._block == index:
            self._block = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known, during, where = len(self.found), _pass(), ""
        if func in READS and isinstance(args[0], FakeTensor):
            where = place() or "outside of this package"
        output = super().__torch_dispatch__(func, types, args, kwargs)
        if output is NotImplemented:
            return output
        if len(self.found) > known:
            message = self.found[-1]
            event = Event(message.name, during, self._block, message.place, message)
        else:
            name = func._schema.name.replace("::", ".")
            event = Event(name, during, self._block, where)
        if not event.name.startswith(NO_WORK):
            self.events.append(event)
        return output


def _pass() -> str:
    if torch._C._current_autograd_node() is not None:
        return "recompute" if torch.is_grad_enabled() else "backward"
    return "forward" if torch.is_grad_enabled() else "no_grad"


def _with_gradient(value: Any) -> Iterator[torch.Tensor]:
    for tensor in value if isinstance(value, tuple | list) else [value]:
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
            yield tensor
