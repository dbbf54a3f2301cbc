"""`meshloom train`, which is also `launch/train.py`. Checks the config before torch is imported."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from trainer.command import add_config, parser_of
from trainer.data.sources.location import check_paths
from trainer.errors import ConfigError, MeshloomError, Problem
from trainer.supervise import world as worlds
from trainer.supervise.launcher import start
from trainer.supervise.notes import notes_of

if TYPE_CHECKING:
    from trainer.config import Config
    from trainer.supervise.signals import StopSignals

EPILOG = """
any key of the config can be overridden:
  %(prog)s --config zero2 trainer.steps=20 zero_optimization.stage=3

start it with any launcher:
  deepspeed launch/train.py --config ds_configs/zero2.json
  torchrun --nproc-per-node 8 launch/train.py --config ds_configs/zero2.json
  accelerate launch launch/train.py --config ds_configs/zero2.json
  %(prog)s --config zero2      (by itself: one process per GPU, or --processes N)
without a checkout:
  deepspeed --no_local_rank --module trainer.command train --config zero2
  torchrun --nproc-per-node 8 -m trainer.command train --config zero2

exit codes: 0 done, 64 config, 65 data, 69 hub, 70 internal, 74 disk, 75 stopped, 76 numerics,
  77 stalled
"""


def options_of(arguments: Sequence[str], name: str) -> argparse.Namespace:
    parser = parser_of(name, "Train a transformer from a DeepSpeed JSON config.", EPILOG)
    add_config(parser)
    start = parser.add_mutually_exclusive_group()
    text = (
        "resume from the newest good checkpoint of the newest run of this name, or from the one at "
        "PATH; without this option, the same command resumes a run that was not finished"
    )
    start.add_argument("--resume", metavar="auto|PATH", help=text)
    text = "start a new run, even if there is an unfinished one"
    start.add_argument("--fresh", action="store_true", help=text)
    text = "resume even if data, tokenizer, model or code changed"
    parser.add_argument("--resume-anyway", action="store_true", help=text)
    text = "resume without the checkpoint's optimizer state"
    parser.add_argument("--resume-weights-only", action="store_true", help=text)
    text = "show the plan and the data; train nothing"
    parser.add_argument("--dry-run", action="store_true", help=text)
    text = "show N samples as the model sees them, and exit"
    parser.add_argument("--preview", type=int, metavar="N", help=text)
    text = "compute the teacher's column (trainer.distillation.column) in this layout, and exit"
    parser.add_argument("--teacher-only", action="store_true", help=text)
    text = "show which engine runs which layout, and exit"
    parser.add_argument("--engines", action=ShowEngines, nargs=0, help=text)
    text = "how many processes to start (default: one per GPU)"
    parser.add_argument("--processes", type=int, metavar="N", help=text)
    # deepspeed passes it
    parser.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)
    return parser.parse_intermixed_args(arguments)


class ShowEngines(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from trainer.run.describe import layout_table

        print(layout_table())
        parser.exit()


def main(arguments: Sequence[str], name: str) -> int:
    from trainer.supervise.signals import StopSignals

    terminal = os.dup(2)
    try:
        return command(options_of(arguments, name), StopSignals())
    except MeshloomError as error:
        rank = int(os.environ.get("RANK", "0"))
        notes = notes_of(os.environ)
        written = notes is not None and notes.write_end(rank, error.render(), error.exit_code)
        if rank == 0 and not written:
            with suppress(OSError):  # the terminal may be closed
                os.write(terminal, f"{error.render()}\n".encode())
        return error.exit_code


def command(options: argparse.Namespace, signals: StopSignals) -> int:
    world = worlds.world_of(os.environ)
    count = options.processes or worlds.gpu_count() or 1
    sizes = (world.world_size, world.local_world_size) if world else (count, count)
    config = checked_config(options, *sizes)
    if world is None or world.rank == 0:
        check_paths(config.trainer)  # before torch is imported, which takes seconds
    if world is None:
        if count > 1:
            signals.hand_over()
            return start(count, sys.orig_argv[1:])
        os.environ.update(worlds.environment_of(0, 1, worlds.free_port()))
        world = worlds.World()

    for note in filter(None, (worlds.drop_accelerate(os.environ), worlds.cant_rejoin(os.environ))):
        config = replace(config, notes=(*config.notes, note))
    from trainer.supervise.output import Output

    output = Output(quiet=world.rank != 0)
    output.signs.at("importing PyTorch and transformers")
    from trainer.run.run import Request, run
    from trainer.tools.hub.repository import open_hub
    from trainer.tools.planner.recompute_choice import PLANNER

    request = Request(
        resume=options.resume,
        fresh=options.fresh,
        resume_anyway=options.resume_anyway,
        weights_only=options.resume_weights_only,
        dry_run=options.dry_run,
        preview=options.preview,
        teacher_only=options.teacher_only,
        overrides=options.overrides,
        planner=PLANNER,
        open_hub=open_hub,
    )
    return run(config, request, world, output, signals)


def checked_config(options: argparse.Namespace, world_size: int, local_size: int) -> Config:
    """Compile the config, and check batch sizes and mesh without torch.

    `local_size`: the processes of a node. Raises ConfigError, with the numbers of nodes that fit.
    """
    from trainer.config import RuntimeFacts, load
    from trainer.run.compose import compose, nodes_for

    if (hostfile := worlds.missing_hostfile(os.getppid())) is not None:
        hint = "DeepSpeed would train on this machine alone"
        place = f"--hostfile: {hostfile}"
        raise ConfigError(Problem(place, "no such file", "a list of machines", hint))
    config = load(options.config, options.overrides)
    facts = RuntimeFacts(world_size, None, None, False, "cpu", local_size)
    each = f"nodes (processes on each: {local_size})"
    nodes = world_size // local_size
    try:
        compose(config, facts)
    except ConfigError as error:
        several = "TORCHELASTIC_RUN_ID" in os.environ or world_size > local_size
        if not several or not (fitting := nodes_for(config, facts)):
            raise
        raise ConfigError(*error.problems, Problem(each, f"{nodes}", fitting)) from None
    if not options.dry_run:
        return config
    return replace(config, notes=(*config.notes, f"{each} can be: {nodes_for(config, facts)}"))
