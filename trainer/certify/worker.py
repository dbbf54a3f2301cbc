"""The worker of `meshloom verify`: one of the processes that run the layout."""

from __future__ import annotations

import os
import sys
import traceback
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from trainer.certify.certificate import certify, table, write
from trainer.certify.image_certificate import certify_images
from trainer.certify.module_certificate import met
from trainer.certify.tiny_run import Tiny
from trainer.errors import ConfigError, MeshloomError, Problem, shared
from trainer.run.subject import Given
from trainer.supervise.ending import Ending
from trainer.supervise.notes import notes_of
from trainer.supervise.output import Output
from trainer.supervise.phase import Phase
from trainer.supervise.world import World

PASSED, FAILED = 0, 76


def verify(small: Tiny, world: World, device: str, certificate_path: Path, output: Output) -> int:
    """Certify, print the table on rank 0 and write the certificate; return the exit code.
    Collective.
    """
    signs = output.signs
    ending = Ending(world, output.terminal, notes_of(os.environ), signs.close)
    try:
        signs.at(
            f"waiting for {world.world_size} ranks" if world.world_size > 1 else "making ready"
        )
        machine = met(small, device, output.say)
        machine = replace(machine, watch=ending.start_watch(small.config, machine.ranks))
        signs.at("some steps of a small copy under the layout, and in one process")
        if device == "cuda":
            # a resumed run is compared bit for bit; some kernels sum in any order unless set
            # otherwise
            torch.use_deterministic_algorithms(True, warn_only=True)
        if small.config.trainer.task == "image_classification":
            if device == "cuda":
                raise ConfigError(Problem("--device", "cuda, of images", "cpu"))
            certificate = certify_images(small, Given(), machine)
        else:
            certificate = certify(small, machine)
        if world.rank == 0:
            signs.close()
            write(certificate, certificate_path)
            print(
                f"{table(certificate)}\nwritten to {certificate_path}",
                file=output.terminal,
                flush=True,
            )
        machine.watch.at(Phase.LEAVING)
        machine.ranks.barrier()
        return ending.end(PASSED if certificate.passed else FAILED)
    except BaseException as error:
        traceback.print_exc(file=sys.stderr)
        if isinstance(error, MeshloomError) and dist.is_initialized():
            shared(error)  # all find the same, and the first reports for them
        return ending.after(error)
