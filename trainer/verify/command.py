"""The worker of `launch/verify.py`: one of the processes that run the layout."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from typing import TextIO

import torch.distributed as dist

from trainer.errors import MeshloomError
from trainer.ranks import Ranks
from trainer.verify.certificate import certify, table, write
from trainer.verify.shrink import Small

PASSED, FAILED = 0, 76


def verify(small: Small, rank: int, world_size: int, output: Path, terminal: TextIO) -> int:
    """Certify, print the table on rank 0 and write the certificate; returns the exit code. Collective."""
    dist.init_process_group("gloo")
    ranks = Ranks(rank, world_size)
    try:
        certificate = certify(small, ranks)
    except MeshloomError as error:
        if rank == 0:
            print(error.render(), file=terminal, flush=True)
        return error.exit_code
    except BaseException:
        traceback.print_exc(file=sys.stderr)
        print(f"rank {rank}: {traceback.format_exc()}", file=terminal, flush=True)
        return 70
    if rank == 0:
        write(certificate, output)
        print(f"{table(certificate)}\nwritten to {output}", file=terminal, flush=True)
    ranks.barrier()
    return PASSED if certificate.passed else FAILED
