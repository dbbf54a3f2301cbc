"""Waiting for other ranks over their store instead of a collective, and so without its timeout."""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import Any

BEAT_SECONDS = 1.0
SILENCE_SECONDS = 600.0
"""Seconds without a sign of life of any working rank. Long: while a huge JSON file is parsed, there is none."""


class Rendezvous:
    """While it is open, this rank gives signs of life, until it waits for the others. All ranks open equally many."""

    def __init__(self, rank: int, world_size: int) -> None:
        from torch.distributed.distributed_c10d import _get_default_store

        self._store: Any = _get_default_store()
        self._world_size = world_size
        number = self._store.add(f"meshloom/rendezvous/{rank}", 1)
        self._done, self._beats = (f"meshloom/rendezvous/{number}/{what}" for what in ("done", "beats"))
        self._at_work = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="rendezvous", daemon=True)

    def __enter__(self) -> Rendezvous:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._at_work.set()
        self._thread.join()

    def wait(self) -> None:
        """Wait until every rank waits. Raises RuntimeError if the others have fallen silent."""
        self._at_work.set()
        heard, since, pause = (-1, -1), time.monotonic(), 0.005
        known = self._add(self._done, 1), 0
        while known[0] < self._world_size:
            time.sleep(pause)
            pause = min(2 * pause, BEAT_SECONDS)
            known = self._add(self._done, 0), self._add(self._beats, 0)
            if known != heard:
                heard, since = known, time.monotonic()
            elif time.monotonic() - since > SILENCE_SECONDS:
                missing = self._world_size - known[0]
                raise RuntimeError(f"{missing} of the ranks gave no sign of life for {SILENCE_SECONDS:.0f} s")

    def _add(self, key: str, count: int) -> int:
        try:
            return int(self._store.add(key, count))
        except RuntimeError as error:
            raise RuntimeError(f"the store of the ranks is gone, and so is the rank that has it: {error}") from error

    def _beat(self) -> None:
        while not self._at_work.wait(BEAT_SECONDS):
            try:
                self._store.add(self._beats, 1)
            except Exception:  # the waiting ranks find out
                return
