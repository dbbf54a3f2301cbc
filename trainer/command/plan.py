"""`meshloom plan`: the memory, traffic and time of a run, without a GPU."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.command import add_config, parser_of, reporting
from trainer.errors import ConfigError, Problem

if TYPE_CHECKING:
    from trainer.tools.planner.proposals import Proposal

DESCRIPTION = """
Predicts how much memory each rank takes and for what, how much is sent over which link, and about
how long a step takes. It runs the engines' own code on tensors without values, as each kind of rank
of a cluster, which need not exist.
Exit codes: 0 it fits, 1 it does not fit, 64 the config is wrong.
"""
DOES_NOT_FIT = 1
PROPOSING = 20.0
"""Seconds after which no other layout is tried."""


@reporting
def main(arguments: Sequence[str], name: str) -> int:
    options = _options(arguments, name)
    if min(options.nodes, options.gpus) < 1:
        actual = f"{options.nodes} nodes of {options.gpus} devices"
        raise ConfigError(Problem("--nodes, --gpus", actual, "at least one of each"))
    from trainer.supervise.world import NO_GPUS

    os.environ.update(NO_GPUS)
    with _sign_of_life(quiet=options.json):
        from trainer.supervise.process import unheard

        terminal = unheard()
        text, code = _planned(options)
    os.write(terminal, f"{text}\n".encode())
    return code


@contextmanager
def _sign_of_life(quiet: bool) -> Iterator[None]:
    """Show on standard error that a plan is computed: standard output has the plan alone.

    On a terminal it is a moving line, elsewhere one line, after two seconds. `quiet`: neither, as
    for programs.
    """
    from rich.console import Console

    from trainer.supervise.output import Signs

    signs = Signs(Console(stderr=True, quiet=quiet))
    signs.at("planning: engines run on tensors without values")
    try:
        yield
    finally:
        signs.close()


def _options(arguments: Sequence[str], name: str) -> argparse.Namespace:
    parser = parser_of(name, DESCRIPTION)
    add_config(parser)
    parser.add_argument("--nodes", type=int, default=1, metavar="N")
    text = "devices of each node (default: 8)"
    parser.add_argument("--gpus", type=int, default=8, metavar="N", help=text)
    text = "a name (default: h100-80gb), or numbers: memory=..,peak=..,bandwidth=..,link=.."
    parser.add_argument("--device", default="h100-80gb", help=text)
    text = f"try other layouts; start none after SECONDS (default: {PROPOSING:.0f})"
    parser.add_argument(
        "--propose", nargs="?", type=float, const=PROPOSING, metavar="SECONDS", help=text
    )
    text = "write the config with the best proposal's changes"
    parser.add_argument("--write", type=Path, metavar="JSON", help=text)
    parser.add_argument("--json", action="store_true", help="for programs: bytes and seconds")
    return parser.parse_intermixed_args(arguments)


def _planned(options: argparse.Namespace) -> tuple[str, int]:
    """Return the text to print, and the exit code."""
    from trainer.config import load
    from trainer.tools.planner import recompute_modes as recompute
    from trainer.tools.planner.cluster import Cluster, device_of
    from trainer.tools.planner.proposals import proposals
    from trainer.tools.planner.rendering import as_json, lines

    cluster = Cluster(options.nodes, options.gpus, device_of(options.device))
    config = load(options.config, options.overrides)
    plan, tried_modes = recompute.planned_by_need(config, cluster)
    code = 0 if plan.fits else DOES_NOT_FIT
    proposed: list[str] = []
    tried: dict[str, object] = {}
    if tried_modes:
        tried = recompute.as_json(tried_modes)
        config = load(options.config, [*options.overrides, recompute.override_of(tried_modes)])
    if options.propose is not None or options.write is not None:
        candidates = proposals(config, cluster, plan, seconds=options.propose or PROPOSING)
        proposed = [*_proposed(options, candidates)]
        tried["proposals"] = [
            {"changes": one.changes, "fits": one.plan.fits, "comparison": one.comparison}
            for one in candidates
        ]
    elif not plan.fits:
        proposed = [
            f"propose --propose tries other layouts, and begins none after {PROPOSING:.0f} s"
        ]
    if options.json:
        return json.dumps(as_json(plan) | tried, indent=2), code
    if tried_modes:
        proposed = [f"note    {recompute.note(tried_modes)}", *proposed]
    return "\n".join([*lines(plan), *proposed]), code


def _proposed(options: argparse.Namespace, proposed: list[Proposal]) -> Iterator[str]:
    """Yield the lines on proposals; write the first, if it fits, to the requested file."""
    from trainer.tools.planner.proposals import write
    from trainer.tools.planner.rendering import proposal_lines

    for number, proposal in enumerate(proposed, 1):
        yield from proposal_lines(number, proposal.plan, proposal.changes, proposal.comparison)
    if not proposed:
        yield "propose nothing: no other layout was found that fits better or is faster"
    if options.write and proposed and proposed[0].plan.fits:
        write(options.config, options.overrides, proposed[0], options.write)
        yield f"wrote   {options.write}, with the first of them"
    elif options.write:
        yield f"wrote   nothing to {options.write}: no proposal fits"
