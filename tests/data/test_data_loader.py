"""The loader: the right samples for every step and rank, made ahead of time, and an orderly end."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.data.loader import Batch, Batching, BatchLoader, evaluation_batches
from trainer.data.order import KEYED, SampleOrder, sample_ids
from trainer.data.text.token_files import Sample
from trainer.models.spec import LanguageModel
from trainer.recipes.causal_lm.task import CausalLM
from trainer.tasks.task import IGNORED

CPU = torch.device("cpu")


class Numbers:
    """Sample i is [i, i] with the targets [i, ignored]."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Sample:
        return {"input_ids": np.full(2, index, np.int32), "targets": np.array([index, IGNORED])}


def collate(samples: Sequence[Sample]) -> Batch:
    return {
        key: torch.stack([torch.from_numpy(sample[key]) for sample in samples])
        for key in ("input_ids", "targets")
    }  # type: ignore[literal-required]


def loader(
    source: Any = None, collate: Any = collate, device: torch.device = CPU, **changes: int
) -> BatchLoader:
    steps = range(changes.pop("start_step", 0), changes.pop("end_step", 4))
    position = changes.pop("position", 0)
    batching = Batching(**{"micro_batch": 2, "accumulation": 3, **changes}, device=device)
    return BatchLoader(
        source or Numbers(50), collate, batching, steps, order=SampleOrder(3), position=position
    )


def test_every_step_has_its_samples_on_every_rank() -> None:
    ranks = []
    for rank in range(2):
        with loader(data_ranks=2, data_rank=rank, accumulation=3) as steps:
            ranks.append(list(steps))
    for step, pair in enumerate(zip(*ranks, strict=True)):
        assert [part.step for part in pair] == [step, step]
        ids = np.concatenate([ids for part in pair for ids in part.ids])
        assert sorted(ids) == sorted(sample_ids(3, step * 12, 12, 50, KEYED))
        for part in pair:
            for ids, batch in zip(part.ids, part.micro_batches, strict=True):
                assert batch["targets"][:, 0].tolist() == ids.tolist()


def test_a_later_start_goes_on_where_the_position_says() -> None:
    with loader() as whole, loader(start_step=2, position=12) as resumed:
        expected, result = list(whole)[2:], list(resumed)
    assert [part.step for part in result] == [2, 3]
    assert np.array_equal(np.stack([p.ids for p in result]), np.stack([p.ids for p in expected]))


def test_another_batch_size_takes_up_the_same_position() -> None:
    with loader(start_step=1, end_step=2, position=30, micro_batch=5, accumulation=1) as steps:
        (only,) = steps
    assert only.ids[0].tolist() == sample_ids(3, 30, 5, 50, KEYED).tolist()


class Broken(Numbers):
    def __getitem__(self, index: int) -> Sample:
        if index == int(sample_ids(3, 6, 1, 50, KEYED)[0]):
            raise RuntimeError("the disk is gone")
        return super().__getitem__(index)


def test_an_error_in_the_background_is_raised_at_its_step() -> None:
    with loader(Broken(50)) as steps:
        taken = iter(steps)
        assert next(taken).step == 0
        with pytest.raises(RuntimeError, match="the disk is gone"):
            next(taken)


def feeds_alive() -> int:
    return sum(thread.name == "loader" for thread in threading.enumerate())


def test_closing_early_ends_the_thread() -> None:
    with loader(end_step=1_000_000) as steps:
        assert next(iter(steps)).step == 0
        assert feeds_alive() == 1
    assert feeds_alive() == 0


def test_only_a_step_or_two_are_made_beforehand() -> None:
    made: list[int] = []

    def counting(samples: Sequence[Sample]) -> Batch:
        made.append(1)
        return collate(samples)

    with loader(collate=counting, accumulation=1, end_step=100) as steps:
        next(iter(steps))
        deadline = time.monotonic() + 10
        while len(made) < 3 and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(0.05)
        assert len(made) == 3  # one taken, one ready, one that waits for room


@pytest.mark.parametrize(("producer", "consumer", "waits"), [(0.02, 0.0, True), (0.0, 0.02, False)])
def test_waiting_is_measured(producer: float, consumer: float, waits: bool) -> None:
    def slow(samples: Sequence[Sample]) -> Batch:
        time.sleep(producer)
        return collate(samples)

    with loader(collate=slow, accumulation=1, end_step=5) as steps:
        waited = 0.0
        for batches in steps:
            waited += batches.waited_seconds
            time.sleep(consumer)
    assert (waited > 0.08) == waits


@settings(deadline=None)
@given(
    st.integers(1, 25),
    st.one_of(st.none(), st.integers(1, 30)),
    st.integers(1, 4),
    st.integers(1, 4),
)
def test_evaluation_counts_every_sample_once_in_equally_many_batches(
    size: int, limit: int | None, micro_batch: int, ranks: int
) -> None:
    blank = CausalLM(LanguageModel()).blank
    shares = [
        list(
            evaluation_batches(
                Numbers(size), collate, blank, Batching(micro_batch, 1, ranks, rank), limit
            )
        )
        for rank in range(ranks)
    ]
    assert len({len(share) for share in shares}) == 1
    batches = [batch for row in zip_longest(*shares) for batch in row]
    assert all(len(batch["input_ids"]) == micro_batch for batch in batches)
    counted = [
        int(target)
        for batch in batches
        for target in batch["targets"].flatten()
        if target != IGNORED
    ]
    assert counted == list(range(min(size, limit or size)))
    assert len(shares[0]) == -(-min(size, limit or size) // (micro_batch * ranks))


@pytest.mark.gpu
def test_batches_arrive_on_the_gpu() -> None:
    device = torch.device("cuda", 0)
    with loader(device=device) as steps:
        for part in steps:
            for ids, batch in zip(part.ids, part.micro_batches, strict=True):
                assert batch["targets"].device == device
                assert batch["targets"][:, 0].tolist() == ids.tolist()


ENDLESS = """
import torch
from trainer.data.loader import Batching, BatchLoader
from trainer.data.order import SampleOrder

class Source:
    def __len__(self):
        return 64
    def __getitem__(self, index):
        return torch.tensor(index)

loader = BatchLoader(Source(), lambda samples: {"rows": torch.stack(samples)}, Batching(2, workers=2), range(32),
    order=SampleOrder(0), position=0)
print(len(next(iter(loader)).micro_batches), flush=True)
raise RuntimeError("nobody closes it")
"""


def test_workers_that_nobody_closes_do_not_keep_the_process():
    from tests.support.commands import run

    result = run(sys.executable, "-c", ENDLESS, timeout=60)
    assert (
        result.code == 1 and result.output.startswith("1\n") and "nobody closes it" in result.output
    )
