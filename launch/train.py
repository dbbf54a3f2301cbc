#!/usr/bin/env python3
"""Train from a DeepSpeed JSON config. See --help."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from launch.processes import World, environment_of, free_port, gpu_count, missing_hostfile, start, world_of

EPILOG = """
any key of the config can be overridden:
  launch/train.py --config ds_configs/zero2.json trainer.steps=20 zero_optimization.stage=3

start it with any launcher:
  deepspeed launch/train.py --config ds_configs/zero2.json
  torchrun --nproc-per-node 8 launch/train.py --config ds_configs/zero2.json
  accelerate launch launch/train.py --config ds_configs/zero2.json
  python launch/train.py --config ds_configs/zero2.json      (one process per GPU, or --processes N)

exit codes: 0 done, 64 config, 65 data, 70 internal, 74 disk, 75 preempted, 76 numerics
"""


def arguments_of(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a transformer from a DeepSpeed JSON config.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", required=True, metavar="JSON", help="a DeepSpeed config")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="overrides a key of the config")
    whence = parser.add_mutually_exclusive_group()
    whence.add_argument(
        "--resume",
        metavar="auto|PATH",
        help="go on from the newest good checkpoint of the newest run of this name, or from the one at PATH; without "
        "it, the same command goes on with a run that was not finished",
    )
    whence.add_argument("--fresh", action="store_true", help="start a run of its own, and leave an unfinished one")
    parser.add_argument(
        "--resume-anyway", action="store_true", help="also where data, tokenizer or model changed since the checkpoint"
    )
    parser.add_argument("--resume-weights-only", action="store_true", help="leave the checkpoint's optimizer state out")
    parser.add_argument("--dry-run", action="store_true", help="show the plan and the data; train nothing")
    parser.add_argument("--engines", action=ShowEngines, nargs=0, help="show which engine runs which layout, and leave")
    parser.add_argument("--processes", type=int, metavar="N", help="how many processes to start (default: one per GPU)")
    parser.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)  # deepspeed passes it
    return parser.parse_intermixed_args(argv)


class ShowEngines(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from trainer.describe import layout_table

        print(layout_table())
        parser.exit()


def main() -> int:
    from trainer.errors import MeshloomError
    from trainer.signals import StopSignals

    terminal = os.dup(2)
    try:
        return command(arguments_of(), StopSignals())
    except MeshloomError as error:
        if os.environ.get("RANK", "0") == "0":
            os.write(terminal, f"{error.render()}\n".encode())
        return error.exit_code


def command(options: argparse.Namespace, signals) -> int:  # type: ignore[no-untyped-def]
    world = world_of(os.environ)
    count = options.processes or gpu_count() or 1
    config = checked_config(options, world.world_size if world else count, world.local_world_size if world else count)
    if world is None:
        if count > 1:
            return start(count, sys.argv)
        os.environ.update(environment_of(0, 1, free_port()))
        world = World()

    from launch.output import Output

    output = Output()
    from trainer.run import Request, run

    request = Request(
        options.resume,
        options.fresh,
        options.resume_anyway,
        options.resume_weights_only,
        options.dry_run,
        options.overrides,
    )
    return run(config, request, world, output, signals)


def checked_config(options: argparse.Namespace, world_size: int, local_world_size: int):  # type: ignore[no-untyped-def]
    """The config, compiled, with the batch sizes and the mesh proved to fit; all before torch is imported."""
    from trainer.config import Facts, load, resolve
    from trainer.errors import ConfigError, Problem
    from trainer.layout import layout_of

    hostfile = missing_hostfile(os.getppid())
    if hostfile is not None:
        raise ConfigError(
            Problem(
                f"--hostfile: {hostfile}",
                "no such file",
                "a list of machines",
                "DeepSpeed would train on this machine alone",
            )
        )
    config = load(options.config, options.overrides)
    layout_of(resolve(config, Facts(world_size, None, None, False, "cpu", local_world_size)), world_size)
    return config


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # the exit code is the run's: a library's teardown may abort after everything was done
    os._exit(code)
