"""Samples to micro-batches on the device, prepared in the background while the model works."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType

import numpy as np
import torch

from trainer.data.order import micro_batches, sample_ids
from trainer.data.source import IGNORED, Sample, Source

Batch = dict[str, torch.Tensor]
Collate = Callable[[Sequence[Sample]], Batch]

_AHEAD = 2  # steps prepared beforehand: one in hand, one in the making


@dataclass(frozen=True)
class StepBatches:
    """What one data rank trains on in one step; `ids[i]` [micro_batch] are the samples of `micro_batches[i]`."""

    step: int
    ids: list[np.ndarray]
    micro_batches: list[Batch]


class Feed:
    """The steps `start_step` .. `end_step - 1` of one data rank, made ahead of time by a background thread.

    `position` is the samples seen before `start_step`. To be used as a context manager: leaving it ends the thread.
    What the thread raises is raised where the steps are taken.
    """

    def __init__(
        self,
        source: Source,
        collate: Collate,
        *,
        seed: int,
        micro_batch: int,
        accumulation: int,
        data_ranks: int,
        data_rank: int,
        position: int,
        start_step: int,
        end_step: int,
        device: torch.device,
    ) -> None:
        self.waited_seconds = 0.0
        """Time that the consumer spent waiting for data."""
        self._device = device
        self._closing = threading.Event()
        self._ready: queue.Queue[StepBatches | BaseException | None] = queue.Queue(_AHEAD - 1)
        train_batch = micro_batch * accumulation * data_ranks

        def prepare(step: int) -> StepBatches:
            ids = sample_ids(seed, position + (step - start_step) * train_batch, train_batch, len(source))
            mine = micro_batches(ids, micro_batch, accumulation, data_ranks, data_rank)
            return StepBatches(step, mine, [_pinned(collate([source[i] for i in part]), device) for part in mine])

        steps = range(start_step, end_step)
        self._thread = threading.Thread(target=self._produce, args=(prepare, steps), name="feed", daemon=True)
        self._thread.start()

    def __enter__(self) -> Feed:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __iter__(self) -> Iterator[StepBatches]:
        while True:
            started = time.perf_counter()
            item = self._ready.get()
            self.waited_seconds += time.perf_counter() - started
            if item is None:
                return
            if isinstance(item, BaseException):
                raise item
            yield StepBatches(item.step, item.ids, [_on_device(batch, self._device) for batch in item.micro_batches])

    def close(self) -> None:
        """End the thread; steps that were prepared and not taken are dropped."""
        self._closing.set()
        while self._thread.is_alive():
            with contextlib.suppress(queue.Empty):  # room, so that a thread that waits to put goes on
                self._ready.get_nowait()
            self._thread.join(0.01)

    def _produce(self, prepare: Callable[[int], StepBatches], steps: range) -> None:
        last: BaseException | None = None
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)  # else pinning would open a context on device 0
            for step in steps:
                if self._closing.is_set():
                    break
                self._ready.put(prepare(step))
        except BaseException as error:  # handed to the consumer, who raises it
            last = error
        self._ready.put(last)


def evaluation_batches(
    source: Source,
    collate: Collate,
    *,
    limit: int | None,
    micro_batch: int,
    data_ranks: int,
    data_rank: int,
    device: torch.device,
) -> Iterator[Batch]:
    """This data rank's micro-batches of the first `limit` samples, in order.

    Over all ranks every sample is counted once. All ranks get equally many micro-batches of `micro_batch` samples,
    so that collectives match: the tail is filled with samples of which no target counts.
    """
    size = len(source) if limit is None else min(limit, len(source))
    for start in range(data_rank * micro_batch, _round_up(size, micro_batch * data_ranks), micro_batch * data_ranks):
        samples = [source[i] if i < size else _blank(source[0]) for i in range(start, start + micro_batch)]
        yield _on_device(_pinned(collate(samples), device), device)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _blank(sample: Sample) -> Sample:
    return {"input_ids": sample["input_ids"], "targets": np.full_like(sample["targets"], IGNORED)}


def _pinned(batch: Batch, device: torch.device) -> Batch:
    return {key: value.pin_memory() for key, value in batch.items()} if device.type == "cuda" else batch


def _on_device(batch: Batch, device: torch.device) -> Batch:
    return {key: value.to(device, non_blocking=True) for key, value in batch.items()}
