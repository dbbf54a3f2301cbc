"""The files of a folder, divided among ranks by bytes; the first rank assigns them and waits.

Only the first rank decides what is copied and when a copy is whole. The others are in
`rank_share.py`. Nothing of a division is kept: each job divides what is missing among the ranks
that have come, have the same address before them, and did not fail in the job before.
"""

from __future__ import annotations

import hashlib
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread

from trainer.checkpoint.copies import share_store
from trainer.checkpoint.copies.bucket import BLOCK, block_of, in_streams, patience
from trainer.checkpoint.copies.share_store import Arrival, Report, ShareJob, ShareStore
from trainer.checkpoint.manifest import MANIFEST
from trainer.distributed.balance import least_loaded
from trainer.errors import DiskError, Problem, listed

SMALL = BLOCK
"""Files with fewer bytes stay with the first rank."""
MOST_RANKS = 256
"""The most ranks that copy: a checkpoint has about 128 large files."""
COME_SECONDS = 70.0
"""Seconds for which the first job waits for the others: longer than an address may not answer."""


def takes_part(rank: int, world_size: int) -> bool:
    """Return True if a rank copies files; those that do are spread over the machines."""
    return rank % -(-world_size // MOST_RANKS) == 0


def spread_out(hosts: Mapping[int, str]) -> list[int]:
    """Order ranks, by their machines: first one of each machine, then a second one."""
    before: Counter[str] = Counter()
    places = []
    for rank in sorted(hosts):
        places.append((before[hosts[rank]], rank))
        before[hosts[rank]] += 1
    return [rank for _, rank in sorted(places)]


def divided_among(order: Sequence[int], sizes: Mapping[str, int]) -> dict[int, list[str]]:
    """Divide files among ranks: the largest first, each to the rank that has the fewest bytes.

    Of ranks with equal bytes the first one of `order` takes it. The small files are rank 0's.
    """
    small = [name for name, size in sizes.items() if size < SMALL]
    large = sorted(sizes.keys() - set(small), key=lambda name: (-sizes[name], name))
    shares = {0: small}
    names = [*small, *large]
    candidates = [[0]] * len(small) + [order] * len(large)
    ranks = least_loaded([sizes[name] for name in names], candidates)
    for name, rank in zip(large, ranks[len(small) :], strict=True):
        shares.setdefault(rank, []).append(name)
    return shares


def digest_of_manifest(folder: Path) -> str:
    """Return the hash of a folder's manifest; empty if it has none."""
    with suppress(FileNotFoundError):
        return hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest()
    return ""


class Shares:
    """The first rank's part: it offers jobs, copies its own share, and collects the reports.

    `others`: the number of other ranks that take part. `address`: that of the copy, for errors.
    `moved` is called with the bytes that others have moved, and `check` each second; it raises an
    error if the copying is to end.
    """

    def __init__(
        self,
        store: ShareStore,
        others: int,
        token: object,
        address: str,
        moved: Callable[[int], object],
        check: Callable[[], object],
    ) -> None:
        self._store = store
        self._others = others
        self._begun = time.monotonic()
        self._address = address
        self._moved = moved
        self._check = check
        self._number = 0
        self._bytes = 0
        """Those that others had moved when they were last counted."""
        self._failed: set[int] = set()
        """The ranks that failed in the last job, and are left out of the next one."""
        self._noted: set[int] = set()
        self._closed = Event()
        store.open(token)

    def close(self) -> None:
        self._closed.set()
        self._store.close()

    def notes(self) -> list[str]:
        """Return a line on the ranks that can't copy, if new ones are known."""
        unable = [one for one in self._arrivals() if one.problem is not None]
        new = [one for one in unable if one.rank not in self._noted]
        if not new:
            return []
        self._noted |= {one.rank for one in new}
        ranks = listed([f"rank {one.rank} on {one.host}" for one in new])
        return [f"note: other ranks copy the share of {ranks}: {new[0].problem}"]

    def copy(
        self,
        folder: Path,
        to: str,
        names: Sequence[str],
        put: Callable[[str], None],
        arrived: Callable[[str], None],
    ) -> None:
        """Copy files of a folder to `to`, which is its path below the run's folder, too.

        `put` copies one from here. `arrived` is called for each that another rank has copied, also
        if others failed. Raises the first error, after all ranks have ended their shares; and
        DiskError if the others move nothing for as long as a server may take for a block.
        """
        sizes = {name: (folder / name).stat().st_size for name in names}
        is_large = any(size >= SMALL for size in sizes.values())
        shares = divided_among(self._order() if is_large else [0], sizes)
        own = shares.pop(0)
        if not shares:
            in_streams(put, own)
            return
        self._number += 1
        files = {rank: {name: sizes[name] for name in share} for rank, share in shares.items()}
        job = ShareJob(self._number, to, digest_of_manifest(folder), files)
        streams = _OwnShare(put, own)
        reports: list[Report] = []
        try:
            self._store.offer(job)
            self._await(job, streams.ended)
        finally:
            with suppress(Exception):  # of the store, which then has raised above
                self._store.end(job.number)
                reports = self._store.reports(job)
            done = [one for one in reports if one.problem is None]
            self._failed = set(files) - {one.rank for one in done}
            for name in (name for one in reports for name in one.done):
                arrived(name)
            streams.ended.wait()
        if streams.error is not None:
            raise streams.error
        if bad := [f"rank {one.rank}: {one.problem}" for one in reports if one.problem]:
            raise OSError(listed(bad))
        in_streams(put, [name for one in reports for name in one.left])

    def _order(self) -> list[int]:
        """Return the ranks that can copy, without those that failed last if others are left."""
        deadline = self._begun + COME_SECONDS
        while len(self._arrivals()) < self._others and time.monotonic() < deadline:
            if self._closed.wait(share_store.TICK_SECONDS):
                break
        hosts = {one.rank: one.host for one in self._arrivals() if one.problem is None}
        hosts[0] = socket.gethostname()
        order = spread_out(hosts)
        good = [rank for rank in order if rank not in self._failed]
        return good if len(good) > 1 else order

    def _arrivals(self) -> list[Arrival]:
        """Return the ranks that have come; none if the store is gone: the first copies all then."""
        try:
            return self._store.arrivals()
        except Exception:  # of any kind
            return []

    def _await(self, job: ShareJob, own: Event) -> None:
        """Wait until all shares have ended."""
        block = max(block_of(size) for sizes in job.files.values() for size in sizes.values())
        limit = patience(block) + 2 * share_store.POLL_SECONDS
        last = time.monotonic()
        beat = 0
        ended = 0
        while ended < len(job.files) or not own.is_set():
            beat += 1
            bytes_moved, ended = self._store.look(job.number, beat)
            if (count := bytes_moved - self._bytes) > 0:
                self._bytes = bytes_moved
                self._moved(count)
                last = time.monotonic()
            self._check()
            if ended < len(job.files) and time.monotonic() - last > limit:
                raise self._no_answer(job, limit)
            self._closed.wait(share_store.TICK_SECONDS)

    def _no_answer(self, job: ShareJob, limit: float) -> DiskError:
        silent = job.files.keys() - {one.rank for one in self._store.reports(job)}
        ranks = listed([f"rank {rank}" for rank in sorted(silent)])
        actual = f"no answer of {ranks} for {limit:.0f} s"
        hint = "Look at their logs; other ranks take their files in the next copy"
        return DiskError(Problem(self._address, actual, "ranks that copy their files", hint))


class _OwnShare:
    """The files that the first rank copies itself, in a thread."""

    def __init__(self, put: Callable[[str], None], names: Sequence[str]) -> None:
        self._put = put
        self._names = names
        self.ended = Event()
        self.error: BaseException | None = None
        Thread(target=self._run, name="share", daemon=True).start()

    def _run(self) -> None:
        try:
            in_streams(self._put, self._names)
        except BaseException as error:
            self.error = error
        self.ended.set()
