"""The messages of ranks that copy a folder's files together, in PyTorch's store.

The first rank offers one job at a time, and shows each second that it is at work on it. The others
look for a job every two seconds. They count the bytes that they have moved in one number, and
report in one key each. So the first does as much each second whatever the number of ranks.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from threading import Lock
from typing import Any, TypeVar

T = TypeVar("T")

KEY = "meshloom/upload"
POLL_SECONDS = 2.0
"""Seconds between two looks of a rank that has nothing to copy."""
TICK_SECONDS = 1.0
"""Seconds between two looks during a job."""
ANSWER_SECONDS = 10.0
"""Seconds that an operation of the store may take."""
OVER = "over"


class Closed(Exception):
    """This process leaves the run: it uses the store no more."""


@dataclass(frozen=True)
class ShareJob:
    """A folder of the run, whose files ranks copy."""

    number: int
    folder: str
    """Its path below the run's folder, and below the address."""
    digest: str
    """The hash of its manifest, by which another rank knows that it sees the same folder."""
    files: Mapping[int, Mapping[str, int]]
    """For each rank the sizes of the files that it copies, by their path below the folder."""


@dataclass(frozen=True)
class Report:
    """The end of a rank's share."""

    number: int
    rank: int
    done: Sequence[str] = ()
    """The files that it has copied."""
    left: Sequence[str] = ()
    """The files that it does not see, of the right size: the first rank copies them."""
    problem: str | None = None
    """The first failure."""


@dataclass(frozen=True)
class Arrival:
    """A rank that can copy files, or has a problem with the address."""

    rank: int
    host: str
    problem: str | None = None


class ShareStore:
    """A separate connection to PyTorch's store, for one thread of a rank.

    Methods raise the store's errors, also if it has not answered for ANSWER_SECONDS, and Closed
    after `close`.
    """

    def __init__(self, store: Any, rank: int) -> None:
        self._store = store.clone()
        self._store.set_timeout(datetime.timedelta(seconds=ANSWER_SECONDS))
        self._lock = Lock()
        self._closed = False
        start = self._store.add(f"{KEY}/starts/{rank}", 1)  # a script has several runs
        self._key = f"{KEY}/{start}"

    def close(self) -> None:
        """Wait for the call in progress, and make no more.

        A thread that is in a call of the store when the interpreter ends would abort the process.
        """
        locked = self._lock.acquire(timeout=ANSWER_SECONDS)
        self._closed = True
        if locked:
            self._lock.release()

    # the first rank's

    def open(self, token: object) -> None:
        """Let the other ranks come, to the copy that has this token."""
        self._set("token", json.dumps(token))

    def arrivals(self) -> list[Arrival]:
        lines = self._get("arrivals") or ""
        return [Arrival(**json.loads(line)) for line in lines.splitlines()]

    def offer(self, job: ShareJob) -> None:
        self._set("job", json.dumps(asdict(job)))
        self._set("now", f"{job.number} 0")

    def look(self, number: int, beat: int) -> tuple[int, int]:
        """Show that the first rank is at work; return all bytes moved, and the ranks that ended."""
        self._set("now", f"{number} {beat}")
        ended = self._count(f"ended/{number}", 0)  # first: a rank counts its bytes before it ends
        return self.moved(0), ended

    def end(self, number: int) -> None:
        """Tell the other ranks that nobody waits for this job any more."""
        self._set("now", f"{number} {OVER}")

    def reports(self, job: ShareJob) -> list[Report]:
        """Return the reports on a job that are there."""
        keys = [f"{self._key}/report/{rank}" for rank in job.files]

        def read(store: Any) -> list[bytes]:
            # getting a missing key would wait for it
            there = keys if store.check(keys) else [key for key in keys if store.check([key])]
            return list(store.multi_get(there)) if there else []

        reports = [Report(**json.loads(value)) for value in self._call(read)]
        return [one for one in reports if one.number == job.number]

    # the others'

    def token(self) -> str | None:
        """Return the token of the copy, as JSON; None before the first rank has opened it."""
        return self._get("token")

    def come(self, arrival: Arrival) -> None:
        line = json.dumps(asdict(arrival)) + "\n"
        self._call(lambda store: store.append(f"{self._key}/arrivals", line))

    def now(self) -> tuple[int, str]:
        """Return the number of the last job, and its beat or OVER."""
        number, _, beat = (self._get("now") or f"0 {OVER}").partition(" ")
        return int(number), beat

    def job(self) -> ShareJob:
        fields = json.loads(self._get("job") or "")
        files = {int(rank): sizes for rank, sizes in fields.pop("files").items()}
        return ShareJob(files=files, **fields)

    def moved(self, count: int) -> int:
        """Add to the bytes that ranks have moved, and return their number."""
        return self._count("moved", count)

    def report(self, report: Report) -> None:
        self._set(f"report/{report.rank}", json.dumps(asdict(report)))
        self._count(f"ended/{report.number}", 1)

    # the store

    def _call(self, work: Callable[[Any], T]) -> T:
        with self._lock:
            if self._closed:
                raise Closed
            return work(self._store)

    def _set(self, name: str, value: str) -> None:
        self._call(lambda store: store.set(f"{self._key}/{name}", value))

    def _get(self, name: str) -> str | None:
        key = f"{self._key}/{name}"
        value = self._call(lambda store: store.get(key) if store.check([key]) else None)
        return None if value is None else value.decode()

    def _count(self, name: str, more: int) -> int:
        return int(self._call(lambda store: store.add(f"{self._key}/{name}", more)))
