"""`python -m trainer.run.prediction CONFIG NODES DEVICES DEVICE` prints the memory that a config takes, as JSON.

A run starts it as a process of its own: a process that pretends to be a rank can't be one of real ranks.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence

from trainer.config import load
from trainer.errors import MeshloomError
from trainer.planner.cluster import Cluster, device_of
from trainer.planner.describe import as_json
from trainer.run.planned import planned
from trainer.run.process import unheard
from trainer.run.proposed import proposals

SECONDS = 20.0
"""Seconds for finding changes that would fit: a run waits for them."""


def main(arguments: Sequence[str]) -> int:
    """Print the prediction; return the exit code."""
    path, nodes, devices, device = arguments
    terminal = unheard()
    try:
        config, cluster = load(path), Cluster(int(nodes), int(devices), device_of(device))
        plan = planned(config, cluster)
        found = [] if plan.fits else proposals(config, cluster, plan, most=1, seconds=SECONDS)
    except MeshloomError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    tried = [{"changes": p.changes, "fits": p.plan.fits, "reason": p.reason} for p in found]
    os.write(terminal, json.dumps({**as_json(plan), "proposals": tried}).encode())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
