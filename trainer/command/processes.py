"""Facts that a command finds about its machine and a launcher above it, and the way it exits."""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Callable, MutableMapping, Sequence
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import NoReturn, TextIO, cast

from trainer.errors import DiskError
from trainer.storage import Unfailing

ACCELERATE = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "MEGATRON_LM_", "FP8_")
"""The beginnings of the names of variables by which `accelerate launch` tells its library how to train."""
IDLE = ("", "no", "none", "false", "0", "1", "default")
"""Values of such variables that ask for nothing."""


def gpu_count() -> int:
    """Count the NVIDIA GPUs that processes may use, without importing torch (seconds)."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    present = len(list(Path("/dev").glob("nvidia[0-9]*")))
    return present if visible is None else min(present, _named(visible))


def _named(visible: str) -> int:
    """Count the GPUs that CUDA sees: numbers or UUIDs up to the first other name; of slices (MIG) a single one."""
    names = list(takewhile(re.compile(r"\d+|GPU-[\w-]+|MIG-.+").fullmatch, map(str.strip, visible.split(","))))
    return min(len(names), 1) if any(name.startswith("MIG-") for name in names) else len(names)


def drop_accelerate(environment: MutableMapping[str, str]) -> str | None:
    """Remove the training settings of `accelerate launch`, which Accelerate would follow; the JSON has them here.

    Returns a line for the user if one of them asked for something, else None.
    """
    found = {name: environment.pop(name) for name in sorted(environment) if name.startswith(ACCELERATE)}
    wanted = [f"{name}={value}" for name, value in found.items() if value.lower() not in IDLE]
    if not wanted:
        return None
    more = f" and {len(wanted) - 4} more" if len(wanted) > 4 else ""
    return f"left aside, the JSON says what is trained: {', '.join(wanted[:4])}{more} (from accelerate's launcher)"


def run_command(main: Callable[[Sequence[str], str], int], arguments: Sequence[str], name: str) -> NoReturn:
    """Run a command, and end this process with its exit code: a library's teardown may abort after all was done.

    Output that can't be written does not end a command, but its exit code is then 74 if nothing
    else failed, unless the reader of standard output has left.
    """
    for descriptor in range(3):  # the next opened file would get the number of a closed one
        with suppress(OSError):
            os.fstat(descriptor)
            continue
        os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    output = Unfailing(sys.stdout or open(1, "w"))
    sys.stdout, sys.stderr = cast(TextIO, output), cast(TextIO, Unfailing(sys.stderr or open(2, "w")))
    code = main(arguments, name)
    sys.stdout.flush()
    if output.lost is not None and output.lost.errno != errno.EPIPE and code == 0:
        print(f"disk error: standard output can't be written ({output.lost.strerror})", file=sys.stderr)
        code = DiskError.exit_code
    sys.stderr.flush()
    os._exit(code)
