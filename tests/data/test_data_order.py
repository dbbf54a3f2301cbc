"""The order of samples is a function of seed and position alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.data.order import micro_batches, sample_ids

seeds, sizes, positions, counts = (st.integers(0, hi) for hi in (2**31, 60, 300, 150))


@given(seeds, st.integers(1, 60), st.integers(0, 4))
def test_each_epoch_is_a_permutation(seed: int, size: int, epoch: int) -> None:
    assert sorted(sample_ids(seed, epoch * size, size, size)) == list(range(size))


@given(seeds, st.integers(1, 60), positions, counts, counts)
def test_slices_join(seed: int, size: int, position: int, first: int, second: int) -> None:
    whole = sample_ids(seed, position, first + second, size)
    parts = [
        sample_ids(seed, position, first, size),
        sample_ids(seed, position + first, second, size),
    ]
    assert whole.dtype == np.int64
    assert np.array_equal(whole, np.concatenate(parts))


def test_epochs_and_seeds_differ() -> None:
    assert not np.array_equal(sample_ids(0, 0, 50, 50), sample_ids(0, 50, 50, 50))
    assert not np.array_equal(sample_ids(0, 0, 50, 50), sample_ids(1, 0, 50, 50))


def test_the_order_of_a_known_seed_never_changes() -> None:
    """A resumed run relies on it; fails if numpy ever shuffles in another way."""
    assert sample_ids(7, 8, 4, 10).tolist() == [5, 9, 9, 0]


@given(seeds, st.data())
def test_every_factorisation_trains_a_step_on_the_same_samples(
    seed: int, data: st.DataObject
) -> None:
    micro, accumulation, ranks = (data.draw(st.integers(1, 5)) for _ in range(3))
    ids = sample_ids(seed, 0, micro * accumulation * ranks, 1000)
    shares = [micro_batches(ids, micro, accumulation, ranks, rank) for rank in range(ranks)]
    assert all(
        len(share) == accumulation and all(len(part) == micro for part in share) for share in shares
    )
    assert sorted(np.concatenate([part for share in shares for part in share])) == sorted(ids)


def test_a_step_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="reshape"):
        micro_batches(np.arange(7), 2, 2, 2, 0)
