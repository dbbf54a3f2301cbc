"""`meshloom report RUN`: a run's folder as one HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trainer.command import parser_of, reporting
from trainer.errors import printable
from trainer.storage import required

DESCRIPTION = "Write a run as one HTML page with its pictures, and these as PNGs beside it."
EPILOG = """
exit codes: 0 written, 64 no such run, or matplotlib is not installed, 74 the page can't be written
"""


@reporting
def main(arguments: Sequence[str], name: str) -> int:
    parser = parser_of(name, DESCRIPTION, EPILOG)
    parser.add_argument("run", type=Path, metavar="RUN", help="the run's folder, runs/NAME")
    text = "file for the page (default: report.html in the run's folder)"
    parser.add_argument("--output", type=Path, metavar="FILE", help=text)
    options = parser.parse_intermixed_args(arguments)
    required("matplotlib", name, "matplotlib")
    from trainer.tools.report.page import write
    from trainer.tools.report.run_record import read

    page, *pictures = write(read(options.run), options.output or options.run / "report.html")
    beside = "no picture"
    if pictures:
        beside = f"{len(pictures)} pictures beside it in {pictures[0].parent.name}/"
    print(printable(f"report  {page}, {beside}"))
    return 0
