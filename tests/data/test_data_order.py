"""The order of samples is a function of seed and position alone."""

from __future__ import annotations

import tracemalloc
from collections import Counter
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.data.order import (
    KEYED,
    LISTED,
    SampleOrder,
    Shuffle,
    held_out,
    micro_batches,
    sample_ids,
    split,
)

seeds, sizes, positions, counts = (st.integers(0, hi) for hi in (2**31, 60, 300, 150))
orders = st.sampled_from([LISTED, KEYED])


@given(seeds, st.one_of(st.integers(1, 60), st.integers(1, 20_000)), st.integers(0, 4), orders)
def test_each_epoch_is_a_permutation(seed: int, size: int, epoch: int, order: int) -> None:
    result = sample_ids(seed, epoch * size, size, size, order)
    assert np.array_equal(np.sort(result), np.arange(size))


@given(seeds, st.integers(1, 60), positions, counts, counts, orders)
def test_slices_join(
    seed: int, size: int, position: int, first: int, second: int, order: int
) -> None:
    whole = sample_ids(seed, position, first + second, size, order)
    parts = [
        sample_ids(seed, position, first, size, order),
        sample_ids(seed, position + first, second, size, order),
    ]
    assert whole.dtype == np.int64
    assert np.array_equal(whole, np.concatenate(parts))


@given(seeds, st.integers(50, 10**12), st.integers(1, 9), orders.filter(lambda one: one == KEYED))
def test_epochs_seeds_and_sources_differ(seed: int, size: int, epoch: int, order: int) -> None:
    first = sample_ids(seed, 0, 50, size, order)
    assert len(set(first.tolist())) == 50 and first.min() >= 0 and first.max() < size
    for other in (
        sample_ids(seed, epoch * size, 50, size, order),
        sample_ids(seed + 1, 0, 50, size, order),
        Shuffle(size, SampleOrder(seed, order), 0).ids(np.arange(50)),
    ):
        assert not np.array_equal(first, other)


def test_every_order_of_a_few_samples_is_as_likely() -> None:
    """By chi-squared, over the orders of five samples: 119 degrees of freedom, p = 1e-4."""
    result = Counter(tuple(sample_ids(seed, 0, 5, 5, KEYED).tolist()) for seed in range(3600))
    assert sum((result[one] - 30) ** 2 / 30 for one in permutations(range(5))) < 182


@pytest.mark.parametrize(("order", "ids"), [(LISTED, [5, 9, 9, 0]), (KEYED, [6, 8, 0, 4])])
def test_the_order_of_a_known_seed_never_changes(order: int, ids: list[int]) -> None:
    """A resumed run relies on it; fails if numpy ever shuffles in another way."""
    assert sample_ids(7, 8, 4, 10, order).tolist() == ids


@given(st.integers(0, 500), st.floats(1e-3, 0.9))
def test_each_sample_is_trained_on_or_held_out(size: int, fraction: float) -> None:
    train, kept = split(size, fraction)
    assert list(kept) == [index for index in range(size) if held_out(index, fraction)]
    assert sorted([*train, *kept]) == list(range(size)) and list(train) == sorted(train)


def test_nothing_of_the_size_of_the_data_is_held() -> None:
    tracemalloc.start()
    sample_ids(0, 10**15, 4096, 10**12, KEYED)
    assert all(part[len(part) - 1] < 10**9 for part in split(10**9, 0.01))
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


@given(seeds, st.data())
def test_every_factorisation_trains_a_step_on_the_same_samples(
    seed: int, data: st.DataObject
) -> None:
    micro, accumulation, ranks = (data.draw(st.integers(1, 5)) for _ in range(3))
    ids = sample_ids(seed, 0, micro * accumulation * ranks, 1000, KEYED)
    shares = [micro_batches(ids, micro, accumulation, ranks, rank) for rank in range(ranks)]
    assert all(
        len(share) == accumulation and all(len(part) == micro for part in share) for share in shares
    )
    assert sorted(np.concatenate([part for share in shares for part in share])) == sorted(ids)


def test_a_step_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="reshape"):
        micro_batches(np.arange(7), 2, 2, 2, 0)
