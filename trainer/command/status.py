"""`meshloom status RUN`: the state of a run, read without touching it."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainer.command import parser_of, reporting
from trainer.errors import ConfigError, Problem, printable

EPILOG = """
exit codes: 0 it runs or has finished, 1 it has ended otherwise or gives no sign of life,
            64 no such run
"""


@reporting
def main(arguments: Sequence[str], name: str) -> int:
    """Run the command `name`; returns its exit code."""
    parser = parser_of(name, "Show what a run does.", EPILOG)
    parser.add_argument("run", type=Path, metavar="RUN", help="its folder, runs/NAME")
    folder = parser.parse_intermixed_args(arguments).run
    from trainer.supervise import status_files as status

    found = status.read(folder)
    if found is None or not status.can_be_shown(found):
        seen = "no status.json in it" if folder.is_dir() else "no such folder"
        hint = f"{status.NAME} is there, and damaged" if (folder / status.NAME).exists() else ""
        raise ConfigError(Problem(str(folder), seen, "the folder of a run that has begun", hint))
    end = status.read_end(folder)
    # processes of this machine are seen to live; of another machine's, a reported end comes first
    lives = status.lives(found) and (end is None or found.get("host") == socket.gethostname())
    if lives:
        end = None
    if end is not None:
        found = {**found, "ended": end["code"]}
    for line in lines(folder, found, lives):
        print(printable(line))
    if end is not None:
        print("because", printable(end["text"]).replace("\n", "\n        "))
    elif not lives and (folder / status.END).exists():
        print(f"because {status.END} can't be read")
    return 0 if lives or found.get("ended") == 0 else 1


def lines(folder: Path, found: Mapping[str, Any], lives: bool) -> Iterator[str]:
    from trainer.supervise.status_files import whose

    of = f" of {found['steps']}" if found.get("steps") else ""
    state = {None: "" if lives else "no sign of life: ", 0: "finished: "}.get(
        found.get("ended"), "ended: "
    )
    yield f"{state}{found['place'].replace(',', f'{of},', 1) if found['step'] else found['place']}"
    if found.get("ended") is not None:
        yield f"exit    {found['ended']}"
    yield f"ranks   {found['ranks']}, the first is {whose(found)}"
    if lives:
        yield f"still   {found['still']:.0f} s, of at most {found['limit']:.0f} s"
        for one in found["waits_for"]:
            yield (
                f"waits   for rank {one['rank']} on {one['host']}: {one['place']}, for "
                f"{one['still']:.0f} s"
            )
    saved, age = list((folder / "checkpoints").glob("step-*/manifest.json")), ""
    last = max(saved, key=lambda path: (len(path.parent.name), path.parent.name), default=None)
    with suppress(OSError):  # pruned meanwhile
        age = "" if last is None else f", {(time.time() - last.stat().st_mtime) / 60:.0f} min ago"
    yield f"saved   {'nothing yet' if last is None else last.parent.name}{age}"
