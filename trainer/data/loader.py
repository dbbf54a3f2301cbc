"""Micro-batches of samples on the device, prepared in the background while the model works."""

from __future__ import annotations

import atexit
import contextlib
import math
import queue
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from trainer.data.mixture import Source, sample_of
from trainer.data.order import SampleOrder, Shuffle, micro_batches
from trainer.data.stream import Stream
from trainer.errors import MeshloomError
from trainer.layout import Layout
from trainer.tasks.task import Batch

Collate = Callable[[Sequence[object]], Batch]
Blank = Callable[[object], object]

_AHEAD = 2  # steps prepared ahead: one ready, one in preparation
_MOMENT = 1.0  # seconds between two looks for data
_ORDERED = 1024  # samples whose order is computed at once: one costs as much

Part = list[tuple[int, int | None]]
"""The samples of a micro-batch: their numbers, and the epoch of each, or None in an evaluation."""
BLANK = -1
"""The number that stands for a blank sample, of which no target counts."""


@dataclass(frozen=True)
class StepBatches:
    """The micro-batches of one data rank in one step."""

    step: int
    ids: list[np.ndarray]
    """The samples of each micro-batch, int64 [micro_batch]."""
    micro_batches: list[Batch]
    waited_seconds: float = 0.0
    """Seconds for which the consumer waited for them."""
    positions: int = 0
    """Their tokens on this data rank, padding included."""


@dataclass(frozen=True)
class Batching:
    """The sizes of one data rank's micro-batches, their device, and how they are loaded."""

    micro_batch: int
    accumulation: int = 1
    data_ranks: int = 1
    data_rank: int = 0
    device: torch.device = torch.device("cpu")
    workers: int = 0
    """Processes that load samples; 0: a thread."""

    @classmethod
    def of(cls, layout: Layout, rank: int, device: torch.device, workers: int = 0) -> Batching:
        place = layout.data_ranks, layout.data_rank(rank)
        return cls(layout.micro_batch, layout.accumulation, *place, device, workers)


class BatchLoader:
    """The `steps` of one data rank, prepared ahead by a background thread.

    `position`: the number of samples seen before the first. A stream has to have begun there.

    Use it as a context manager: leaving it ends the thread. Errors in the thread are raised where
    the steps are read.
    """

    def __init__(
        self,
        source: Source,
        collate: Collate,
        batching: Batching,
        steps: range,
        *,
        order: SampleOrder,
        position: int,
    ) -> None:
        self._device = batching.device
        self._closing = threading.Event()
        self._ready: queue.Queue[StepBatches | BaseException | None] = queue.Queue(_AHEAD - 1)
        shape = batching.micro_batch, batching.accumulation, batching.data_ranks
        self._stream = source if isinstance(source, Stream) else None
        train_batch = math.prod(shape)
        shuffle = self._stream or Shuffle(len(source), order)
        sent: deque[Part] = deque()  # requested but not read yet: workers run ahead

        def parts() -> Iterator[Part]:
            ahead = 1 if self._stream else max(1, _ORDERED // math.prod(shape[:2]))
            for first in range(0, len(steps), ahead):
                count = len(steps[first : first + ahead])
                at = position + first * train_batch
                if self._stream:
                    self._stream.reach(at + count * train_batch)
                whole = np.arange(at, at + count * train_batch)
                own = micro_batches(whole, shape[0], count * shape[1], shape[2], batching.data_rank)
                numbers = iter(shuffle.samples(np.concatenate(own)))
                for part in own:
                    sent.append(list(islice(numbers, len(part))))
                    yield sent[-1]

        # not in the thread: workers are forked while no other thread runs
        made = collated(source, collate, parts(), batching.workers, lambda sample: sample)
        self._workers = made if isinstance(made, _Made) else None
        produce = partial(self._produce, steps, batching.accumulation, sent, made)
        self._thread = threading.Thread(target=produce, name="loader", daemon=True)
        self._thread.start()

    def __enter__(self) -> BatchLoader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[StepBatches]:
        while True:
            started = time.perf_counter()
            item = self._next()
            waited = time.perf_counter() - started
            if item is None:
                return
            if isinstance(item, BaseException):
                raise item
            sizes = [next(iter(batch.values())).numel() for batch in item.micro_batches]
            batches = [_on_device(batch, self._device) for batch in item.micro_batches]
            yield StepBatches(item.step, item.ids, batches, waited, sum(sizes))

    def _next(self) -> StepBatches | BaseException | None:
        while True:
            with contextlib.suppress(queue.Empty):
                return self._ready.get(timeout=_MOMENT)
            if self._stream:
                self._stream.waits()

    def close(self) -> None:
        """End the thread and the workers; steps that were prepared and not read are dropped."""
        self._closing.set()
        if self._stream:
            self._stream.close()  # for whose next file the thread may wait
        while self._thread.is_alive():
            with contextlib.suppress(queue.Empty):  # makes room for a thread that waits to put
                self._ready.get_nowait()
            self._thread.join(0.01)
        if self._workers is not None:
            self._workers.close()

    def _produce(
        self, steps: range, accumulation: int, sent: deque[Part], made: Iterator[Batch]
    ) -> None:
        last: BaseException | None = None
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)  # else pinning would open a context on device 0
            for step in steps:
                if self._closing.is_set():
                    break
                batches = [_pinned(next(made), self._device) for _ in range(accumulation)]
                ids = [np.array([number for number, _ in sent.popleft()]) for _ in batches]
                self._ready.put(StepBatches(step, ids, batches))
        except BaseException as error:  # passed to the consumer, who raises it
            last = error
        if self._stream:
            self._stream.end_reading()
        self._ready.put(last)


def collated(
    source: Source, collate: Collate, parts: Iterable[Part], workers: int, blank: Blank
) -> Iterator[Batch]:
    """Return the micro-batches in order, made by `workers` processes; if 0, here, on demand.

    The processes exist when this returns; an error in one of them is raised here.
    """
    made = _Collated(source, collate, blank)
    if not workers:
        return map(made.batch, parts)
    loader = DataLoader(
        made,
        None,
        sampler=parts,
        generator=torch.Generator(),  # the default one belongs to the steps
        num_workers=workers,
        worker_init_fn=_quiet,
    )
    return _Made(loader)


class _Made:
    """The micro-batches that worker processes make.

    The workers ignore signals: a process that did not close them would wait for them at its end.
    """

    def __init__(self, loader: DataLoader[object]) -> None:
        self._made: Any = iter(loader)
        atexit.register(self.close)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        made = next(self._made)
        if isinstance(made, MeshloomError):
            raise made
        return made  # type: ignore[no-any-return]

    def close(self) -> None:
        """End the workers."""
        atexit.unregister(self.close)
        self._made._shutdown_workers()


@dataclass(frozen=True)
class _Collated(Dataset[object]):
    source: Source
    collate: Collate
    blank: Blank

    def batch(self, part: Part) -> Batch:
        return self.collate([self._sample(*place) for place in part])

    def __getitem__(self, part: Part) -> Batch | MeshloomError:
        try:
            return self.batch(part)
        except MeshloomError as error:  # PyTorch would change the text of an error that is raised
            return error

    def _sample(self, number: int, epoch: int | None) -> object:
        if number == BLANK:
            return self.blank(self.source[0])
        return sample_of(self.source, number, epoch)


def _quiet(worker: int) -> None:
    """Make a worker ignore signals: its parent handles them, and the worker ends with it."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)


def evaluation_batches(
    source: Source, collate: Collate, blank: Blank, batching: Batching, limit: int | None
) -> Iterator[Batch]:
    """Yield this data rank's micro-batches of the first `limit` samples, in order.

    Over all ranks every sample is counted once. All ranks get equally many micro-batches of
    `micro_batch` samples, so that collectives match: the tail is filled with `blank(sample)`, of
    which no target counts.
    """
    size = len(source) if limit is None else min(limit, len(source))
    micro_batch = batching.micro_batch
    together = micro_batch * batching.data_ranks
    steps = -(-size // together)
    starts = range(batching.data_rank * micro_batch, steps * together, together)
    parts: Iterator[Part] = (
        [(i if i < size else BLANK, None) for i in range(start, start + micro_batch)]
        for start in starts
    )
    made = collated(source, collate, parts, min(batching.workers, len(starts)), blank)
    try:
        for batch in made:
            yield _on_device(_pinned(batch, batching.device), batching.device)
    finally:
        if isinstance(made, _Made):
            made.close()


def _pinned(batch: Batch, device: torch.device) -> Batch:
    if device.type != "cuda":
        return batch
    return {key: value.pin_memory() for key, value in batch.items()}


def _on_device(batch: Batch, device: torch.device) -> Batch:
    return {key: value.to(device, non_blocking=True) for key, value in batch.items()}
