"""How fast two blocks of a model run on the device that is here: what a plan's time is calibrated by."""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import psutil
import torch

from trainer.config import load
from trainer.errors import ConfigError, Problem, first_line
from trainer.models.materialise import materialise
from trainer.models.spec import ModelSpec, flops_per_token
from trainer.planner.cluster import DEVICES, Cluster, device_named
from trainer.run.planned import Source, source_of

BLOCKS = (1, 3)
"""Of two models; two blocks take what one takes longer than the other."""
ROUNDS, SECONDS = (3, 15), 20.0
"""Passes of each model, at least and at most; after so many seconds no more than the least."""


@dataclass(frozen=True)
class Timing:
    """Two blocks, forward and backward."""

    where: str
    """The device."""
    seconds: float
    """Of a micro-batch."""
    flops: float
    """In it."""

    @property
    def rate(self) -> float:
        """FLOP/s."""
        return self.flops / self.seconds


def timed(config: str, overrides: Sequence[str], cluster: Cluster) -> Timing:
    """Time two blocks of a config's model at its precision, recomputing nothing, with a micro-batch of the layout's.

    In a process of its own: one that has used a GPU can't pretend to be a rank. Raises ConfigError where the device
    here is not of the cluster's kind, where there is nothing to time, or where it does not run.
    """
    try:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as alone:
            return alone.submit(_timed, config, tuple(overrides), cluster).result()
    except RuntimeError as error:  # memory that is not there; a process that was killed for it; a kernel that is not
        mend = "A smaller train_micro_batch_size_per_gpu needs less"
        raise ConfigError(Problem("--measure", first_line(error)[:300], "blocks that run here", mend)) from error


def _timed(config: str, overrides: Sequence[str], cluster: Cluster) -> Timing:
    _check_kind(cluster)
    return time_blocks(source_of(load(config, list(overrides)), cluster))


def time_blocks(source: Source) -> Timing:
    """As `timed`, here and of any kind of cluster."""
    layout = source.subject.layout
    if source.subject.spec.shallow is None:
        raise ConfigError(Problem("--measure", source.subject.spec.name, "a model of blocks that are built one by one"))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    few, more = (source.of_blocks(count) for count in BLOCKS)
    passes = [_Pass(source, spec, device) for spec in (few, more)]
    seconds: list[list[float]] = [[], []]
    began = time.monotonic()
    for done in range(ROUNDS[1] + 1):
        if done > ROUNDS[0] and time.monotonic() - began > SECONDS:
            break
        for taken, one in zip(seconds, passes, strict=True):
            taken.append(one.seconds())
    first, second = (statistics.median(taken[1:]) for taken in seconds)  # the first warms up
    sequence = source.subject.sample.units
    flops = (flops_per_token(more, sequence) - flops_per_token(few, sequence)) * layout.micro_batch * sequence
    if second <= first:
        seen = f"{BLOCKS[1]} blocks took {second:.3g} s and {BLOCKS[0]} took {first:.3g} s"
        mend = "Measure on a machine that does nothing else, or with a larger micro-batch"
        raise ConfigError(Problem("--measure", seen, "more time for more blocks", mend))
    return Timing(_name(device), second - first, flops)


class _Pass:
    """A forward and a backward pass of a model without its head."""

    def __init__(self, source: Source, spec: ModelSpec, device: torch.device) -> None:
        layout = source.subject.layout
        self._task, self._device = source.task(spec), device
        self._model = self._task.prepare(spec.build())
        materialise(self._model, spec, seed=0, device=device, dtype=getattr(torch, layout.precision))
        self._model.train()
        self._batch = {name: part.to(device) for name, part in source.subject.batch(layout.micro_batch).items()}

    def seconds(self) -> float:
        self._model.zero_grad()
        began = self._now()
        hidden = self._task.hidden(self._model, self._batch)
        hidden.backward(torch.ones_like(hidden))
        return self._now() - began

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def _check_kind(cluster: Cluster) -> None:
    """Raises ConfigError where what is measured here says nothing of the cluster's devices."""
    wanted = cluster.device
    if wanted.name not in DEVICES:
        return  # given by its numbers, by someone who knows
    name, memory = "the processor", float(psutil.virtual_memory().total)
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        name, memory = properties.name, properties.total_memory
    found = device_named(name, memory)
    if found != wanted:
        numbers = f"memory={memory / 1e9:.0f}GB,peak=..,bandwidth=..,link=.."
        mend = f"--device {found.name}" if found else f"Give the numbers of {name}: --device {numbers}"
        raise ConfigError(Problem("--measure", f"{name} here, and a plan for {wanted.name}", "one and the same", mend))


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "the processor"
