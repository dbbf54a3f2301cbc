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

from trainer.command import add_config, parser_of, reporting, run_command
from trainer.errors import ConfigError, Problem
from trainer.storage import imported, installed
from trainer.supervise.launcher import start
from trainer.supervise.world import NO_GPUS, drop_accelerate, environment_of, gpu_count, world_of

DESCRIPTION = """
Runs a few steps of a small copy of the config's model under the config's own layout, on CPU
processes, and repeats each step in one process of plain PyTorch; compares modules' outputs, losses,
every gradient, the clip norm, what the optimizer keeps, how far each weight goes, a step that
overflows, counts of targets, the schedule in all steps of the run, the held-out loss and accuracy,
and a resume. Prints what a tiny copy of the model answers to every question of docs/models.md.
Exit codes: 0 the same, 64 the config is wrong, 76 not the same, 77 the ranks hung.
"""


@reporting
def main(arguments: Sequence[str], name: str) -> int:
    options = _options(arguments, name)
    on_cpu = options.device == "cpu"
    world = world_of(os.environ)
    drop_accelerate(os.environ)
    if on_cpu:
        os.environ.update(NO_GPUS)
    else:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    from trainer.certify.tiny_run import tiny_run

    world_size = world.world_size if world else options.world_size
    if options.compile:
        options.overrides.append("trainer.compile=blocks")
    small = tiny_run(options.config, options.overrides, world_size, options.precision)
    needed = world.local_world_size if world else small.layout.world_size
    if not on_cpu and gpu_count() < needed:
        actual = f"cuda with {gpu_count()} GPUs for {needed} processes"
        hint = "Leave out --device to verify on the CPU"
        raise ConfigError(Problem("--device", actual, "a GPU for each process", hint))
    if world is None and on_cpu:
        _import_all(small)
        return start(small.layout.world_size, partial(run_command, main, arguments, name))
    if world is None:  # CUDA does not work in a process that was forked after its first use
        return start(small.layout.world_size, sys.orig_argv[1:])
    from trainer.supervise.output import Output

    output = Output(quiet=world.rank != 0)
    output.signs.at("importing PyTorch and transformers")
    from trainer.certify.worker import verify

    return verify(small, world, options.device, options.output, output)


def _options(arguments: Sequence[str], name: str) -> argparse.Namespace:
    parser = parser_of(name, DESCRIPTION)
    add_config(parser)
    text = "processes (default: the fewest, up to 8)"
    parser.add_argument("--world-size", type=int, metavar="N", help=text)
    text = "the certificate to write (default: %(default)s)"
    path = Path("certificate.json")
    parser.add_argument("--output", type=Path, default=path, metavar="PATH", help=text)
    text = "config: the config's own, compared with float32 within the rounding of one process"
    parser.add_argument("--precision", choices=("float32", "config"), default="float32", help=text)
    text = "certify blocks compiled by torch.compile, as trainer.compile=blocks"
    parser.add_argument("--compile", action="store_true", help=text)
    text = "cuda: one process per GPU"
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help=text)
    return parser.parse_intermixed_args(arguments)


def _import_all(small: Any) -> None:
    """Import what the ranks need, once for all of them: they are forked from this process."""
    threads = environment_of(0, small.layout.world_size, 0)["OMP_NUM_THREADS"]
    os.environ.setdefault("OMP_NUM_THREADS", threads)
    print("start   importing PyTorch and transformers", flush=True)
    for module in ("trainer.certify.worker", "transformers.trainer"):
        import_module(module)
    if installed("deepspeed"):
        imported("deepspeed.runtime.lr_schedules", "meshloom verify")
    from trainer.certify.tiny_run import engine_of

    if engine_of(small, "cpu") == "deepspeed":  # this imports torch.compile's compiler
        import_module("deepspeed.runtime.zero.muon.muon_optimizer")
