"""The simulation of one rank: its engine is built, takes steps, evaluates and is saved."""

from __future__ import annotations

import gc
import multiprocessing
import os
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

import torch
from torch import nn
from torch.optim import optimizer as optimizers

from trainer.distributed.dtensor import local
from trainer.engines import EngineKind, Job, Machine
from trainer.errors import ConfigError, Problem
from trainer.layout import Layout
from trainer.models.spec import ModelSpec, stored
from trainer.optim.lr_schedules import LRSchedule
from trainer.parallel.partition import block_ranges
from trainer.recipe import SampleCost
from trainer.storage import Json, imported
from trainer.tasks.task import Batch, Task, bare_name
from trainer.tools.planner.fakes.ledger import BUILD, SAVE, Ledger
from trainer.tools.planner.fakes.memory_history import MemoryHistory, Peak
from trainer.tools.planner.fakes.messages import Message, Messages
from trainer.tools.planner.fakes.pretend import pretending

STEPS = 2
"""Optimizers create their state in the first step; from the second on all are alike."""


@dataclass(frozen=True)
class Workload:
    """The training that is planned: everything an engine is built from, except a machine."""

    layout: Layout
    engine_name: str
    engine: EngineKind
    spec: ModelSpec
    task: Task
    deepspeed: Json
    undecayed: Mapping[str, int]
    schedule: LRSchedule
    sample: SampleCost
    batch: Callable[[int], Batch]
    """Makes a micro-batch of that many samples, of the trained length and without meaning."""

    @cached_property
    def ranges(self) -> list[range]:
        """The blocks of each stage."""
        schedule = self.layout.schedule
        stages = self.layout.stages
        return block_ranges(self.spec.build(), self.spec, schedule, stages)

    def received(self, rank: int) -> torch.Tensor:
        """Make the hidden state that a rank's stage receives for a micro-batch, all zeros."""
        layout = self.layout
        first = self.ranges[layout.coordinates(rank)["pipeline"]].start
        shape = self.task.hidden_shape(self.batch(layout.micro_batch), first)
        return torch.zeros(shape, dtype=getattr(torch, layout.precision))


@dataclass(frozen=True)
class Trace:
    """The record of one simulated rank."""

    rank: int
    history: MemoryHistory
    messages: tuple[Message, ...]
    copied: int = 0
    """Bytes that a background save copies to the host."""

    @cached_property
    def peaks(self) -> tuple[Peak, ...]:
        """The peak of each phase, in order."""
        return tuple(self.history.peaks())

    def peak(self, phase: str) -> Peak:
        return next(peak for peak in self.peaks if peak.phase == phase)


def simulate_all(jobs: Sequence[tuple[Workload, int]], local_world_size: int) -> list[Trace]:
    """Simulate each (workload, rank), as many at a time as there are cores; return them in order.

    Each runs in a process of its own: libraries cache what they learn about groups and meshes.
    Raises ConfigError with the reason if the engine's own code fails on fake tensors.
    """
    if any(workload.engine_name == "deepspeed" for workload, _ in jobs):
        imported("deepspeed", "engine deepspeed")  # seconds, once and not in each process
    traces: dict[int, Trace] = {}
    running: dict[Connection, tuple[int, BaseProcess]] = {}
    work = [len(job.spec.blocks) * job.layout.accumulation for job, _ in jobs]
    # the longest first, so that no core waits long at the end
    waiting = sorted(range(len(jobs)), key=lambda index: work[index])
    fork = multiprocessing.get_context("fork")
    while waiting or running:
        while waiting and len(running) < (os.cpu_count() or 1):
            index = waiting.pop()
            ours, theirs = multiprocessing.Pipe(duplex=False)
            arguments = theirs, *jobs[index], local_world_size
            process = fork.Process(target=_simulate, args=arguments, daemon=True)
            process.start()
            theirs.close()
            running[ours] = index, process
        for ready in wait(list(running)):
            assert isinstance(ready, Connection)
            index, ended = running.pop(ready)
            traces[index] = _received(jobs[index][1], ended, ready)
    return [traces[index] for index in range(len(jobs))]


def _received(rank: int, process: BaseProcess, pipe: Connection) -> Trace:
    try:
        trace, problem = pipe.recv()
    except EOFError:
        process.join()
        trace = None
        problem = f"the process that simulated it ended with exit code {process.exitcode}"
    process.join()
    if trace is None:
        expected = "a model and a layout that run on fake tensors"
        hint = "Several data ranks need PyTorch 2.15." if torch.__version__ < "2.15" else ""
        raise ConfigError(Problem(f"rank {rank}", problem, expected, hint))
    return trace  # type: ignore[no-any-return]


def _simulate(pipe: Connection, workload: Workload, rank: int, local_world_size: int) -> None:
    """Run the simulation in the rank's process; send (trace, None) or (None, the error)."""
    torch.set_num_threads(1)  # the forked process has no such threads
    gc.freeze()  # nothing from before the fork is finalised here
    world_size = workload.layout.world_size
    messages = Messages(rank)
    received = partial(workload.received, rank) if workload.engine_name == "deepspeed" else None
    try:
        with pretending(rank, world_size, local_world_size, deepspeed=received) as ranks:
            machine = Machine(torch.device("cpu"), ranks, local_world_size)
            with messages:
                ledger, copied = recorded(workload, machine, messages.begin)
        pipe.send((Trace(rank, ledger.history(), tuple(messages.found), copied), None))
    except Exception as error:  # whatever an engine's or a model's own code raises
        where = traceback.extract_tb(error.__traceback__)[-1]
        problem = f"{type(error).__name__}: {error} ({where.filename}:{where.lineno})"
        pipe.send((None, problem[:600]))
    finally:
        pipe.close()
        os._exit(0)  # nothing of the parent process is finalised here


def recorded(
    workload: Workload, machine: Machine, at: Callable[[str], None] = lambda phase: None
) -> tuple[Ledger, int]:
    """Record an engine that is built, steps, evaluates and is saved; call `at` before each phase.

    Returns the ledger, and the bytes that a background save copies.
    """
    layout = replace(workload.layout, compile="none")  # fake tensors are not compiled
    vocabulary = workload.spec.language.vocabulary // layout.tensor
    ledger = Ledger(vocabulary, workload.spec.blocks)

    def begin(phase: str) -> None:
        gc.collect()
        ledger.begin(phase)
        at(phase)

    with ledger.open():
        begin(BUILD)
        job = Job(
            layout, workload.spec, workload.task, workload.deepspeed, 0, machine, workload.undecayed
        )
        engine = workload.engine.build(job)
        modules = engine.modules
        _weights(ledger, modules)
        with ledger.watching(modules), _optimizers(ledger, modules):
            for step in range(STEPS):
                begin(step_name(step))
                batches = [workload.batch(layout.micro_batch) for _ in range(layout.accumulation)]
                for batch in batches:
                    for tensor in batch.values():
                        ledger.of(tensor, "data", "the batch")
                engine.step(step, batches, workload.schedule(step))
            del batches, batch, tensor
            begin("evaluation")
            engine.evaluate([workload.batch(layout.micro_batch)])
        begin(SAVE)
        entries = stored(workload.spec, engine.state_tensors())  # as by a save
        copied = sum(part.value.nbytes for entry in entries for part in entry.parts())
        begin("end")
        engine.close()
    return ledger, copied


def step_name(step: int) -> str:
    """Return the phase of a step, which begin at 0."""
    return f"step {step + 1}"


def _weights(ledger: Ledger, modules: Sequence[nn.Module]) -> None:
    for module in modules:
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            kept = getattr(tensor, "ds_tensor", tensor)  # ZeRO-3's shard of a partitioned parameter
            ledger.of(kept, "weights", bare_name(name))


def _gradients(modules: Sequence[nn.Module]) -> Iterator[tuple[torch.Tensor, list[str]]]:
    """Yield a gradient of each storage, and the names of all parameters whose gradients it has."""
    gradients: dict[int, tuple[torch.Tensor, list[str]]] = {}
    for module in modules:
        for name, parameter in module.named_parameters():
            if (gradient := parameter.grad) is not None:
                storage = local(gradient).untyped_storage()
                gradients.setdefault(id(storage), (gradient, []))[1].append(bare_name(name))
    yield from gradients.values()


def common_name(names: Sequence[str]) -> str:
    """Return the dotted name of the smallest module that has all of these parameters."""
    return ".".join(os.path.commonprefix([name.split(".") for name in names]))


@contextmanager
def _optimizers(ledger: Ledger, modules: Sequence[nn.Module]) -> Iterator[None]:
    """Name gradients and optimizer state in the ledger, whenever an optimizer steps."""

    def before(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        ledger.mark()
        for gradient, names in _gradients(modules):
            ledger.of(gradient, "gradients", common_name(names))
        own = {parameter for module in modules for parameter in module.parameters()}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter not in own:  # DeepSpeed's flat float32 copies
                    ledger.of(parameter, "optimizer", "float32 copies")
                    ledger.of(parameter.grad, "optimizer", "float32 copies")

    def after(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        for state in optimizer.state.values():
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    ledger.of(value, "optimizer")

    with ExitStack() as stack:
        stack.callback(optimizers.register_optimizer_step_pre_hook(before).remove)
        stack.callback(optimizers.register_optimizer_step_post_hook(after).remove)
        yield
