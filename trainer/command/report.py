"""`meshloom report RUN`: a run's folder as one HTML page."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

EPILOG = """
exit codes: 0 written, 64 no such run, or matplotlib is not installed, 74 the page can't be written
"""


def main(arguments: Sequence[str], name: str) -> int:
    """Run the command `name`; returns its exit code."""
    parser = argparse.ArgumentParser(
        prog=name,
        description=(
            "Write a run as one HTML page with its pictures, and these as PNGs in a "
            "folder "
            "beside it."
        ),
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="its folder, runs/NAME")
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="the page; else report.html in the run's folder"
    )
    options = parser.parse_intermixed_args(arguments)
    from trainer.errors import ConfigError, MeshloomError, Problem, printable

    try:
        if find_spec("matplotlib") is None:
            raise ConfigError(
                Problem(name, "matplotlib is not installed", "it", "pip install 'meshloom[report]'")
            )
        from trainer.tools.report import read, write

        written = write(read(options.run), options.output or options.run / "report.html")
    except MeshloomError as error:
        print(error.render(), file=sys.stderr)
        return error.exit_code
    beside = (
        f", {len(written) - 1} pictures beside it in {written[1].parent.name}/"
        if written[1:]
        else ", no picture"
    )
    print(printable(f"report  {written[0]}{beside}"))
    return 0
