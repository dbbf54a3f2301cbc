"""`meshloom verify`, which is also `launch/verify.py`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from trainer.command import run_command
from trainer.supervise.launcher import start
from trainer.supervise.world import drop_accelerate, environment_of, gpu_count, world_of

DESCRIPTION = """
Runs a few steps of a small copy of the config's model under the config's own layout, on CPU
processes, and each of them in one process of plain PyTorch; compares modules' outputs, losses,
every gradient, the clip norm, what the optimizer keeps, how far each weight goes, a step that
overflows, counts of targets, the schedule in all steps of the run, the held-out loss and accuracy,
and a resume.
Exit codes: 0 the same, 64 the config is wrong, 76 not the same, 77 the ranks stood still.
"""


def main(arguments: Sequence[str], name: str) -> int:
    """Run the command `name`; returns its exit code."""
    parser = argparse.ArgumentParser(prog=name, description=DESCRIPTION)
    parser.add_argument(
        "--config",
        required=True,
        metavar="JSON",
        help="a DeepSpeed config, or the name of one that is shipped",
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="key.path=value", help="overrides a key of the config"
    )
    parser.add_argument(
        "--world-size", type=int, metavar="N", help="processes (default: the fewest, up to 8)"
    )
    parser.add_argument("--output", type=Path, default=Path("certificate.json"), metavar="PATH")
    parser.add_argument(
        "--precision",
        choices=("float32", "config"),
        default="float32",
        help="config: its own, compared with float32 within the rounding of one process",
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="cuda: one process per GPU"
    )
    options = parser.parse_intermixed_args(arguments)
    from trainer.certify.tiny_run import tiny_run
    from trainer.errors import ConfigError, MeshloomError, Problem

    drop_accelerate(os.environ)
    os.environ.setdefault(
        *(
            ("DS_ACCELERATOR", "cpu")
            if options.device == "cpu"
            else ("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        )
    )
    world = world_of(os.environ)
    try:
        world_size = world.world_size if world else options.world_size
        small = tiny_run(options.config, options.overrides, world_size, options.precision)
        needed = world.local_world_size if world else small.layout.world_size
        if options.device == "cuda" and gpu_count() < needed:
            seen, mend = (
                f"cuda with {gpu_count()} GPUs for {needed} processes",
                "Leave it off to verify on the CPU",
            )
            raise ConfigError(Problem("--device", seen, "a GPU for each process", mend))
        if world is None and options.device == "cpu":
            _import_all(small)
    except MeshloomError as error:
        print(error.render(), file=sys.stderr)
        return error.exit_code
    if world is None:
        fork = partial(run_command, main, arguments, name)
        # CUDA does not work in a process that was forked after its first use
        return start(
            small.layout.world_size, fork if options.device == "cpu" else sys.orig_argv[1:]
        )
    from trainer.supervise.output import Output

    output = Output(quiet=world.rank != 0)
    output.signs.at("importing PyTorch and transformers")
    from trainer.certify.worker import verify

    return verify(small, world, options.device, options.output, output)


def _import_all(small: Any) -> None:
    """Import the modules of the ranks, which are forked from here: in each, it would take longer
    than its steps.
    """
    os.environ.setdefault(
        "OMP_NUM_THREADS", environment_of(0, small.layout.world_size, 0)["OMP_NUM_THREADS"]
    )
    print("start   importing PyTorch and transformers", flush=True)
    for module in (
        "trainer.certify.worker",
        "transformers.trainer",
        "deepspeed.runtime.lr_schedules",
    ):
        import_module(module)
    from trainer.certify.recording import engine_of

    if engine_of(small, "cpu") == "deepspeed":
        import_module(
            "deepspeed.runtime.zero.muon.muon_optimizer"
        )  # it imports torch.compile's compiler
