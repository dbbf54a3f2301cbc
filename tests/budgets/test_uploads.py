"""The cost of a copy: bytes by rank, and what the first rank does each second at 1,024 ranks."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.support.checkpoint.sharing import LARGE, copied_by, ranks_at, with_files
from trainer.checkpoint.copies.share_store import ShareJob, ShareStore
from trainer.checkpoint.copies.shares import MOST_RANKS, divided_among, spread_out, takes_part

GIB = 2**30


@pytest.mark.parametrize("count", [4, 40])
def test_no_rank_uploads_more_than_its_share(tmp_path: Path, count: int) -> None:
    """Four ranks, files of 1 to 2 times a size: at most a file more, where files are few."""
    folders = [tmp_path / f"rank-{rank}" / "job" for rank in range(4)]
    with_files(folders[0], 10, [50_000 + 50_000 * number // count for number in range(count)])
    for folder in folders[1:]:
        shutil.copytree(folders[0], folder)
    with ranks_at(f"file://{tmp_path}/bucket", folders) as (first, *_), copied_by(folders) as by:
        first.finish()
    uploaded = [sum(by[rank].values()) for rank in range(4)]
    print(f"{count} files: bytes by rank {uploaded}")
    one_file = 100_000 if count < 16 else 0
    assert max(uploaded) <= 1.1 * sum(uploaded) / 4 + one_file
    assert all(size >= LARGE for rank in (1, 2, 3) for size in by[rank].values())


def test_a_checkpoint_of_405_billion_parameters_goes_by_each_of_128_machines() -> None:
    """64 files of the model and 64 of the optimizer: 5 TB, of 1,024 ranks."""
    sizes = {f"model-{n}": 12 * GIB for n in range(64)} | {f"adam-{n}": 70 * GIB for n in range(64)}
    sizes |= {"trainer.json": 9_000, "tokenizer.json": 2_000_000}
    hosts = {r: f"node-{r // 8}" for r in range(1024) if takes_part(r, 1024)}
    assert len(hosts) == MOST_RANKS
    shares = divided_among(spread_out(hosts), sizes)
    by_machine: Counter[str] = Counter()
    for rank, names in shares.items():
        by_machine[hosts[rank]] += sum(sizes[name] for name in names)
    by_rank = [sum(sizes[name] for name in names) for names in shares.values()]
    total = sum(sizes.values())
    print(f"at most {max(by_machine.values()) / total:.2%} by a machine of {len(by_machine)}")
    assert max(by_rank) <= 1.1 * total / 1024 + 70 * GIB
    assert max(by_machine.values()) <= 1.1 * total / 128 + 70 * GIB
    assert len(by_machine) == 128
    assert {"trainer.json", "tokenizer.json"} <= set(shares[0])


class Counted:
    """A store that counts its operations."""

    def __init__(self, store: Any, calls: Counter[str]) -> None:
        self._store = store
        self.calls = calls

    def clone(self) -> Counted:
        return Counted(self._store.clone(), self.calls)

    def __getattr__(self, name: str) -> Any:
        self.calls[name] += 1
        return getattr(self._store, name)


@pytest.mark.parametrize("ranks", [4, MOST_RANKS])
def test_the_first_rank_asks_the_store_as_often_whatever_the_number_of_ranks(ranks: int) -> None:
    """Each second of a copy."""
    store = Counted(dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False), Counter())
    first = ShareStore(store, 0)
    first.offer(
        ShareJob(1, "checkpoints/step-000010", "", {rank: {"a": 1} for rank in range(1, ranks)})
    )
    store.calls.clear()
    first.look(1, 1)
    print(f"{ranks} ranks: {dict(store.calls)}")
    assert store.calls.total() == 3


def test_a_rank_that_has_nothing_to_copy_asks_the_store_twice_in_two_seconds() -> None:
    store = Counted(dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False), Counter())
    first, other = ShareStore(store, 0), ShareStore(store, 1)
    first.end(1)
    store.calls.clear()
    assert other.now() == (1, "over")
    assert store.calls == {"check": 1, "get": 1}
