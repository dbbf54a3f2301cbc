"""Documents packed into samples: best fit, the longest first.

A document goes into the sample that it leaves the least room in, or into a new one. The algorithm
works on counts of lengths, so that a million documents take seconds: all documents of one length
that go into samples of equal room are placed at once. Best-fit decreasing: D. S. Johnson,
Near-optimal bin packing algorithms, 1973.
"""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np


def pack(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Pack documents into samples by their lengths alone, int64 [documents], each 1 to `capacity`.

    Returns `order` int64 [documents], their numbers sample by sample, and `starts` int64 [samples
    + 1]: sample s has the documents order[starts[s]:starts[s + 1]], in their original order.
    Samples are sorted by their first documents. Of samples with equal room, the one begun first is
    filled first; so are documents of equal length.
    """
    by_length = np.argsort(-lengths, kind="stable")
    samples = np.empty(len(lengths), np.int64)
    samples[by_length] = _filled(lengths, capacity)
    order = np.lexsort((np.arange(len(lengths)), samples))
    first = np.flatnonzero(np.diff(samples[order], prepend=-1))
    # by first documents: the beginning, which an evaluation takes, is then like the rest
    rank = np.empty(len(first), np.int64)
    rank[np.argsort(order[first], kind="stable")] = np.arange(len(first))
    order = np.lexsort((np.arange(len(lengths)), rank[samples]))
    return order, np.append(np.flatnonzero(np.diff(rank[samples[order]], prepend=-1)), len(lengths))


def _filled(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Return the sample of each document, documents in falling order of length."""
    begun = 0
    # room -> the samples that have it left, in the order in which they came to it
    open_samples: dict[int, list[np.ndarray]] = {}
    rooms: list[int] = []  # in rising order
    placed = []

    def keep_open(room: int, samples: np.ndarray) -> None:
        if room and len(samples):
            if room not in open_samples:
                insort(rooms, room)
            open_samples.setdefault(room, []).append(samples)

    sizes, counts = np.unique(lengths, return_counts=True)
    for length, count in zip(sizes[::-1].tolist(), counts[::-1].tolist(), strict=True):
        while count:
            at = bisect_left(rooms, length)
            room = rooms[at] if at < len(rooms) else capacity
            # a sample that has just taken a document has the least room, and takes the next
            each = room // length
            wanted = -(-count // each)
            if at < len(rooms):
                parts = open_samples.pop(room)
                same = parts[0] if len(parts) == 1 else np.sort(np.concatenate(parts))
                chosen, rest = np.split(same, [wanted])
                del rooms[at]
                keep_open(room, rest)
            else:
                chosen = np.arange(begun, begun + wanted)
                begun = begun + wanted
            taken = min(count, each * len(chosen))
            placed.append(np.repeat(chosen, each)[:taken])
            whole, over = divmod(taken, each)
            keep_open(room - each * length, chosen[:whole])
            keep_open(room - over * length, chosen[whole:])
            count -= taken
    return np.concatenate(placed) if placed else np.empty(0, np.int64)
