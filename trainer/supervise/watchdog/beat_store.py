"""The beats of all ranks in PyTorch's store, and the verdict on a run that hangs."""

from __future__ import annotations

import datetime
import json
import threading
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict
from typing import Any

from trainer.supervise import stall
from trainer.supervise.stall import Beat

KEY = "meshloom/watch"


class BeatStore:
    """A separate connection to PyTorch's store.

    Methods raise the store's errors, also if it has not answered for `seconds`.
    """

    def __init__(self, store: Any, seconds: float) -> None:
        self._store = store.clone()
        self._store.set_timeout(datetime.timedelta(seconds=seconds))

    def put(self, beat: Beat) -> None:
        self._store.set(f"{KEY}/{beat.rank}", json.dumps(asdict(beat)))

    def beats(self, ranks: Collection[int], *, some_missing: bool) -> Iterator[Beat]:
        """Yield the last beats of these ranks, of which some may not have written one yet."""
        keys = [f"{KEY}/{rank}" for rank in ranks]
        if some_missing and not self._store.check(keys):  # getting a missing key would wait for it
            keys = [key for key in keys if self._store.check([key])]
        for value in self._store.multi_get(keys):
            yield stall.beat_of(json.loads(value))

    def count(self, event: str, more: int) -> int:
        """Add to the number of an event ("failed", "left"), and return it."""
        return int(self._store.add(f"{KEY}/{event}", more))

    def give_verdict(self, records: int) -> None:
        """Record that a rank reports for all, and how many ranks are to write their records."""
        self._store.set(f"{KEY}/verdict", str(records))

    def has_verdict(self) -> bool:
        return bool(self._store.check([f"{KEY}/verdict"]))

    def records(self) -> int:
        """Return how many ranks are to write their records; waits for a verdict."""
        return int(self._store.get(f"{KEY}/verdict"))


def in_time(work: Callable[[], None], seconds: float) -> bool:
    """Run `work` in a thread; return True if it ends within `seconds`, since a store may hang."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()
