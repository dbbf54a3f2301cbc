"""The points of a save, copy or restore at which tests kill, stop, delay or break a run."""

from __future__ import annotations


def at(phase: str) -> None:
    """Do nothing; a test puts its own function here.

    In a save, every rank calls it with `before`, with `shard` before each span of a file that it
    writes, and with `flush`. The first rank of each run folder then calls it with `manifest`,
    `rename` (the manifest is written) and `latest` (the checkpoint is published). An export has
    `shard`, `flush` and `manifest` alone. Pruning calls it with `prune` when an older checkpoint
    is renamed and not yet removed.

    The copy of a run calls it in threads: with `bucket` before each operation at the address, and
    with `block` after each block of a file. A restore calls it with `restored` when all files are
    here, and before each checkpoint or file is renamed into place.
    """
