"""A store that outlives its ranks: what the last ones wrote is not seen by the next."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch.distributed as dist

from tests.support.messages import raises
from trainer.errors import ConfigError
from trainer.supervise.meeting import session


def meet(
    store: dist.TCPStore, ranks: list[int], world_size: int, patience: float = 20.0
) -> list[dist.PrefixStore]:
    def one(rank: int) -> dist.PrefixStore:
        own = dist.TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False)
        return session(own, rank, world_size, patience)

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(one, ranks))


def test_each_start_has_a_store_of_its_own():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for start in range(3):
        result = meet(store, [0, 1, 2], 3)
        assert not any(one.check(["address"]) for one in result), "of an earlier start"
        result[start].set("address", str(start))
        assert [one.get("address") for one in result] == [str(start).encode()] * 3


def test_a_rank_that_died_before_it_met_the_others_is_no_riddle():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with raises(ConfigError, "rank 1 heard nothing", "rank 0"):
        meet(store, [1], 3, 0.2)
    with raises(ConfigError, "1 of 3 ranks", "come: rank 2"):
        meet(store, [0, 1], 3, 1.0)
    result = meet(store, [2, 1, 0], 3)
    result[0].set("here", "1")
    assert all(one.check(["here"]) for one in result)
