"""The beats of the other ranks, as one rank last heard them."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from trainer.supervise.stall import Beat, Phase


class Heard:
    """Each other rank's last beat, and when it was read; at first, when the ranks met.

    `processes`: host and process of each rank, of which `rank` is the reader's own.
    """

    def __init__(self, rank: int, processes: Sequence[tuple[str, int]]) -> None:
        met = time.monotonic()
        self._last = {
            other: (Beat(other, host, process, Phase.PREPARING, 0, 0.0), met)
            for other, (host, process) in enumerate(processes)
            if other != rank
        }

    @property
    def ranks(self) -> Collection[int]:
        return self._last.keys()

    def last(self, rank: int) -> Beat:
        return self._last[rank][0]

    def note(self, beats: Iterable[Beat]) -> None:
        """Note beats that have been read; one that was read before tells nothing new."""
        now = time.monotonic()
        for beat in beats:
            if self._last[beat.rank][0].number != beat.number:
                self._last[beat.rank] = (beat, now)

    def seconds_since(self, rank: int) -> float:
        """Return the seconds since the last new beat of another rank; 0 for this rank itself."""
        return time.monotonic() - self._last[rank][1] if rank in self._last else 0.0

    def up_to_now(self) -> list[Beat]:
        """Return each rank's last beat, with its seconds without progress up to now."""
        now = time.monotonic()
        return [replace(beat, still=beat.still + now - read) for beat, read in self._last.values()]
