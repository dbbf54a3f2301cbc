"""The moments of a save at which tests kill, stop, delay or break a run."""

from __future__ import annotations


def at(phase: str) -> None:
    """Do nothing; a test puts its own function here.

    Every rank calls it with `before`, with `shard` before each tensor that it writes, and with
    `flush`; rank 0 then with `manifest`, `rename` (the manifest is written), `latest` (the
    checkpoint is published), and with `prune` when an older one is out of sight and not yet
    removed.

    A copy elsewhere calls it, in threads, with `bucket` before each operation there and with
    `block` after each block of a file that was read or written; a restore with `restored` once all
    is here, and before each piece of it is put in its place.
    """
