"""The share of a rank that is not the first: a thread copies what the first assigns to it."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from threading import Event, Lock, Thread

from trainer.checkpoint.copies import share_store
from trainer.checkpoint.copies.bucket import Bucket, in_streams
from trainer.checkpoint.copies.marks import MARK, mark_of
from trainer.checkpoint.copies.share_store import OVER, Arrival, Report, ShareJob, ShareStore
from trainer.checkpoint.copies.shares import digest_of_manifest
from trainer.errors import named_line

FIRST_SECONDS = 25.0
"""Seconds without a sign of the first rank after which nothing more is written: with those between
two signs at the copy it is less than another machine waits before it takes over."""


class RankShare:
    """The thread of a rank that copies files of the run's folder, as this rank sees it, for the
    first one.
    """

    def __init__(self, store: ShareStore, rank: int, address: str, folder: Path) -> None:
        self._store = store
        self._rank = rank
        self._address = address
        self._folder = folder
        self._closed = Event()
        self._thread = Thread(target=self._run, name="share", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Report what is at work as failed, and end."""
        self._closed.set()
        self._thread.join(3 * share_store.TICK_SECONDS)
        self._store.close()

    def _run(self) -> None:
        came = False
        while not (came or self._closed.is_set()):
            with suppress(Exception):  # the store's: it may answer the next time
                came = self._come()
            self._closed.wait(share_store.TICK_SECONDS)
        last = 0
        while not self._closed.wait(share_store.POLL_SECONDS):
            with suppress(Exception):
                number, beat = self._store.now()
                if number > last and beat != OVER:
                    last = number
                    self._work(self._store.job())

    def _come(self) -> bool:
        """Try to write at the address; tell the first rank. Return False before it is there."""
        if (token := self._store.token()) is None:
            return False
        problem = None
        try:
            bucket = Bucket(self._address)
            bucket.probe(f".meshloom-{self._rank}")
            if json.dumps(mark_of(bucket).get("token")) != token:
                problem = f"{self._address} is another place there, without the run's {MARK}"
        except Exception as error:
            problem = f"{self._address} can't be written there ({named_line(error)})"
        self._store.come(Arrival(self._rank, socket.gethostname(), problem))
        return True

    def _work(self, job: ShareJob) -> None:
        """Copy this rank's files of a job, and report."""
        if not (files := job.files.get(self._rank)):
            return
        folder = self._folder / job.folder
        sees = digest_of_manifest(folder) == job.digest
        copying = _Copying(folder, f"{self._address}/{job.folder}", files, sees)
        try:
            problem = self._watch(job, copying)
            if problem != OVER:
                problem = problem or copying.problem
                done = tuple(copying.done)
                left = tuple(copying.left)
                self._store.report(Report(job.number, self._rank, done, left, problem))
        finally:
            copying.stop()
            while not (copying.ended.wait(share_store.TICK_SECONDS) or self._closed.is_set()):
                pass  # no second job beside it

    def _watch(self, job: ShareJob, copying: _Copying) -> str | None:
        """Wait for the end; return why this rank stops before, OVER if nobody waits for it."""
        last = ""
        heard = time.monotonic()
        while not copying.ended.wait(share_store.TICK_SECONDS):
            self._store.moved(copying.take())
            number, beat = self._store.now()
            if number != job.number or beat == OVER:
                return OVER
            if beat != last:
                last = beat
                heard = time.monotonic()
            if time.monotonic() - heard > FIRST_SECONDS:
                return f"rank 0 gave no sign of life for {FIRST_SECONDS:.0f} s"
            if self._closed.is_set():
                return "it has left the run"
        self._store.moved(copying.take())
        return None


class _Copying:
    """Files on their way from this rank's folder, in threads."""

    def __init__(self, folder: Path, address: str, files: Mapping[str, int], sees: bool) -> None:
        self._folder = folder
        self._files = files
        self._sees = sees
        self._bucket = Bucket(address, self._count)
        self._lock = Lock()
        self._bytes = 0
        self._stopped = Event()
        self.done: list[str] = []
        self.left: list[str] = []
        self.problem: str | None = None
        self.ended = Event()
        Thread(target=self._run, name="share at work", daemon=True).start()

    def stop(self) -> None:
        """Let each file fail at its next block."""
        self._stopped.set()

    def take(self) -> int:
        """Return the bytes that were moved since the last call."""
        with self._lock:
            count = self._bytes
            self._bytes = 0
        return count

    def _run(self) -> None:
        try:
            in_streams(self._put, self._files)
        except BaseException as error:
            self.problem = named_line(error)
        self.ended.set()

    def _put(self, name: str) -> None:
        path = self._folder / name
        try:
            if self._is_here(name):
                self._bucket.put(path, name)
                self.done.append(name)
                return
        except OSError:
            if self._is_here(name):
                raise
        self.left.append(name)  # or was removed meanwhile

    def _is_here(self, name: str) -> bool:
        path = self._folder / name
        with suppress(OSError):
            return (
                self._sees and path.stat().st_size == self._files[name] and os.access(path, os.R_OK)
            )
        return False

    def _count(self, count: int) -> None:
        if self._stopped.is_set():
            raise TimeoutError("stopped")
        with self._lock:
            self._bytes += count
