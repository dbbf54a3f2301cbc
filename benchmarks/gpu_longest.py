"""The longest sequence of gpu.py's arms that limit a GPU's memory: predicted by plans, and tried.

python -m benchmarks.gpu_longest CONFIG GPUS DEVICE     # prints what plans predict, as JSON
"""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.gpu_bench import Bench

FIRST, SECOND, MOST = 2048, 8192, 2**20
"""Tokens of the first two plans, and the longest that is predicted."""
MULTIPLE = 128
"""Lengths are multiples of it: of the tiles of kernels."""
TINY = (16, 32, 64)
"""In place of the three, with `--smoke`."""
CLOSE = 0.01
"""The share of its length by which a prediction may be too short."""
SHARES = (0.75, 0.875, 0.9375, 1.0, 1.0625, 1.125, 1.25, 1.5)
"""Of the predicted length, in the order in which they are tried: only the last runs out of memory,
so that nothing has to recover from that."""


def longest(
    needed: Callable[[int], float], room: float, lengths: tuple[int, int, int], multiple: int
) -> int:
    """Return about the longest sequence, in tokens, that needs at most `room` bytes; 0 for none.

    `lengths` are two to begin with and the longest. Memory is nearly linear in the tokens: a line
    through the lengths nearest to the room, one on each side of it if there are both, names the
    next, until what fits is within `CLOSE` of what does not. Each call of `needed` is a plan, which
    takes a minute: there are about five.
    """
    known = {tokens: needed(tokens) for tokens in lengths[:2]}
    while True:
        fit = max((tokens for tokens, size in known.items() if size <= room), default=0)
        over = min((tokens for tokens, size in known.items() if size > room), default=0)
        below = fit + multiple
        above = over - multiple if over else lengths[2]
        if below > above or (over and fit and over - fit <= CLOSE * fit):
            return fit
        ends = {fit, over} & known.keys()
        others = sorted(known.keys() - ends, key=lambda tokens: abs(known[tokens] - room))
        low, high = sorted([*ends, *others][:2])
        slope = (known[high] - known[low]) / (high - low)
        guess = low + (room - known[low]) / slope if slope > 0 else above
        tokens = int(min(max(guess, below), above)) // multiple * multiple
        known[tokens] = needed(tokens)


def predicted(config: str, count: int, device: str, smoke: bool) -> int:
    """Return the longest sequence that `meshloom plan` says fits `count` GPUs of this name."""
    from trainer.config import load
    from trainer.tools.planner.cluster import RESERVED, Cluster, device_of
    from trainer.tools.planner.from_config import planned

    cluster = Cluster(1, count, device_of(device))

    def needed(tokens: int) -> float:
        words = [f"trainer.data.sequence_length={tokens}"]
        return planned(load(Path(config), words), cluster).needed

    room = cluster.device.memory - RESERVED
    if smoke:
        return longest(needed, room, TINY, TINY[0])
    return longest(needed, room, (FIRST, SECOND, MOST), MULTIPLE)


def lengthen(bench: Bench, step: Callable[[int], object]) -> None:
    """Train on sequences that grow around the config's length until one does not fit, and tell the
    longest that ran: two steps of each, since the first makes the optimizer's state.
    """
    import torch

    goal = bench.sequence
    multiple = MULTIPLE if bench.cuda else 1
    for share in SHARES:
        bench.sequence = max(1, int(share * goal) // multiple) * multiple
        try:
            for index in range(2):
                step(index)
            bench.wait()
        except torch.OutOfMemoryError:
            return bench.tell(too_long=bench.sequence)
        bench.tell(longest=bench.sequence, device=bench.device_name())
        if bench.cuda:
            torch.cuda.empty_cache()


def main() -> int:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    config, count, device, *rest = sys.argv[1:]
    print(json.dumps({"predicted": predicted(config, int(count), device, bool(rest))}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
