"""The worker of `meshloom verify`: one of the processes that run the layout."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from trainer.certify.certificate import certify, table, write
from trainer.certify.tiny_run import Tiny, tiny_run
from trainer.engines import Machine
from trainer.errors import ConfigError, MeshloomError, Problem
from trainer.supervise.ending import Ending
from trainer.supervise.notes import notes_of
from trainer.supervise.output import Output
from trainer.supervise.process import join
from trainer.supervise.stall import Phase
from trainer.supervise.world import World, world_of

PASSED = 0
FAILED = 76


def tiny_run_of(
    config: str | Path | dict[str, object], overrides: Sequence[str], processes: int | None
) -> Tiny:
    """Shrink a config to a few steps for `processes`; None: the launcher's number, or the fewest.

    Raises ConfigError as `tiny_run` does.
    """
    launched = world_of(os.environ)
    if launched and not processes:
        processes = launched.world_size
    return tiny_run(config, list(overrides), processes)


def met(
    small: Tiny, device: str = "cpu", say: Callable[[str], None] = lambda line: None
) -> Machine:
    """Join the processes of a certificate; `say` prints which ones it waits for. Collective.

    Raises ConfigError if they do not all join, or have already joined with another backend.
    """
    world = world_of(os.environ)
    assert world is not None
    section = small.config.trainer.model_copy(update={"device": device})
    machine = join(replace(small.config, trainer=section), world, say)
    if dist.get_backend() != ("nccl" if device == "cuda" else "gloo"):
        actual = f"processes that have met by {dist.get_backend()}"
        expected = "a script of its own, or a call before that of train"
        raise ConfigError(Problem("verify", actual, expected))
    return machine


def verify(small: Tiny, world: World, device: str, certificate_path: Path, output: Output) -> int:
    """Certify, print the table and write the certificate; return the exit code. Collective."""
    signs = output.signs
    ending = Ending(world, output.terminal, notes_of(os.environ), signs.close)
    try:
        waits = world.world_size > 1
        signs.at(f"waiting for {world.world_size} ranks" if waits else "making ready")
        machine = met(small, device, output.say)
        watch = ending.start_watch(small.config, machine.ranks)
        machine = replace(machine, watch=watch, signs=signs)
        signs.at("making a small copy of the model, and trying it")
        if device == "cuda":
            # a resumed run is compared bit for bit; some kernels sum in any order by default
            torch.use_deterministic_algorithms(True, warn_only=True)
        certificate = certify(small, machine)
        if world.rank == 0:
            signs.close()
            write(certificate, certificate_path, small.request)
            text = f"{table(certificate)}\nwritten to {certificate_path}"
            print(text, file=output.terminal, flush=True)
        machine.watch.at(Phase.LEAVING)
        machine.ranks.barrier()
        return ending.end(PASSED if certificate.passed else FAILED)
    except BaseException as error:
        traceback.print_exc(file=sys.stderr)
        if isinstance(error, MeshloomError) and dist.is_initialized():
            error.share()  # all ranks raise the same error, and the first reports it
        return ending.after(error)
