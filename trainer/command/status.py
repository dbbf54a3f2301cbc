"""`meshloom status RUN`: the state of a run, read without touching it."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from trainer.command import parser_of, reporting
from trainer.errors import ConfigError, Problem, printable
from trainer.storage import Json
from trainer.supervise import status_files as status

EPILOG = """
exit codes: 0 it is running or has finished, 1 it ended otherwise or gives no sign of life,
            64 no such run
"""


@reporting
def main(arguments: Sequence[str], name: str) -> int:
    parser = parser_of(name, "Show what a run is doing.", EPILOG)
    parser.add_argument("run", type=Path, metavar="RUN", help="the run's folder, runs/NAME")
    folder = parser.parse_intermixed_args(arguments).run
    written = status.read(folder)
    if written is None or not status.can_be_shown(written):
        actual = f"no {status.NAME} in it" if folder.is_dir() else "no such folder"
        if (folder / status.NAME).exists():
            actual = f"{status.NAME} is there, and damaged"
        raise ConfigError(Problem(str(folder), actual, "the folder of a run that has begun"))
    end = status.read_end(folder)
    # a process of this machine is checked; of another machine's, a reported end counts first
    here = written.get("host") == socket.gethostname()
    lives = status.lives(written) and (end is None or here)
    if end is not None and not lives:
        written = {**written, "ended": end["code"]}
    for line in lines(folder, written, lives):
        print(printable(line))
    if end is not None and not lives:
        print("because", printable(end["text"]).replace("\n", "\n        "))
    elif not lives and (folder / status.END).exists():
        print(f"because {status.END} can't be read")
    return 0 if lives or written.get("ended") == 0 else 1


def lines(folder: Path, written: Json, lives: bool) -> Iterator[str]:
    """Yield the lines on a run, from its status file `written`; `lives`: it is in progress."""
    code = written.get("ended")
    place = written["place"]
    if written["step"] and written.get("steps"):
        step = written["step"]  # after the last, `step` is past it
        steps = written["steps"]
        place = place.replace(f"step {step},", f"step {min(step, steps)} of {steps},", 1)
    if code is not None:
        yield f"ended: {place}" if code else f"finished: {place.rpartition(', ')[0] or place}"
        yield f"exit    {code}"
    else:
        yield place if lives else f"no sign of life: {place}"
    yield f"ranks   {written['ranks']}, the first is {status.whose(written)}"
    if lives:
        yield f"still   {written['still']:.0f} s, of at most {written['limit']:.0f} s"
        for rank in written["waits_for"]:
            name = f"rank {rank['rank']} on {rank['host']}"
            seconds = f"{rank['still']:.0f} s"
            yield f"waits   for {name}: {rank['place']}, for {seconds}"
    yield f"saved   {_newest(folder / 'checkpoints')}"


def _newest(folder: Path) -> str:
    """Return the name and age, in minutes, of the newest checkpoint in `folder`."""
    if not (manifests := list(folder.glob("step-*/manifest.json"))):
        return "nothing yet"
    last = max(manifests, key=lambda path: (len(path.parent.name), path.parent.name))
    age = ""
    with suppress(OSError):  # pruned meanwhile
        age = f", {(time.time() - last.stat().st_mtime) / 60:.0f} min ago"
    return f"{last.parent.name}{age}"
