"""The moments of a save at which the tests kill, stop, delay or break a run."""

from __future__ import annotations


def at(phase: str) -> None:
    """Does nothing; a test puts its own function here.

    Every rank comes to `before`, to `shard` before each tensor that it writes, and to `flush`; rank 0 then to
    `manifest`, `rename` (the manifest is written), `latest` (the checkpoint is published), and to `prune` when an
    older one is out of sight and not yet removed.
    """
