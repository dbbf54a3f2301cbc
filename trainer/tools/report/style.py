"""The style of pictures, and the sections of the report."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from trainer.errors import printable

INK = "#27313b"
MUTED = "#6b7682"
GREY = "#aab3bd"
LINE = "#d5dae0"
PALE = "#eef1f4"
BLUE = "#2f5f96"
TEAL = "#3b8f83"
OCHRE = "#cf9434"
RED = "#b4493c"
VIOLET = "#7767a5"
SKY = "#8db4d9"
COLOURS = (BLUE, TEAL, OCHRE, VIOLET, SKY, "#a3b86c", "#c98a9b", MUTED)
WIDTH = 9.6
DPI = 150
FEW = 60
"""The most points of a curve at which each is marked."""
STYLE: Any = {
    "font.family": "DejaVu Sans", "font.size": 9.0, "text.color": INK, "text.parse_math": False,
    "axes.edgecolor": LINE, "axes.labelcolor": MUTED, "axes.linewidth": 0.8, "axes.axisbelow": True,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
    "grid.color": PALE, "grid.linewidth": 0.8, "xtick.color": MUTED, "ytick.color": MUTED,
    "xtick.labelsize": 8.0, "ytick.labelsize": 8.0, "legend.frameon": False, "legend.fontsize": 8.5,
    "lines.linewidth": 1.6, "lines.markersize": 3.5, "lines.solid_capstyle": "round",
    "agg.path.chunksize": 20000,
}  # fmt: skip


@dataclass(frozen=True)
class Chapter:
    """One part of the page; without a figure, `text` says why there is none."""

    key: str
    """The name of its PNG."""
    title: str
    text: str
    figure: Figure | None = None
    table: Sequence[Sequence[str]] = ()
    """Rows of cells; the first is the head."""


def drawing() -> AbstractContextManager[None]:
    """Draw in the report's style within this context."""
    return matplotlib.rc_context(STYLE)


def figure(height: float, rows: int = 1, **more: Any) -> tuple[Figure, list[Axes]]:
    """Return an empty figure, WIDTH x `height` inches, and its `rows` of axes from the top."""
    made = Figure(figsize=(WIDTH, height), dpi=DPI, layout="constrained", facecolor="white")
    FigureCanvasAgg(made)
    return made, list(made.subplots(rows, squeeze=False, **more).flat)


def png(made: Figure) -> bytes:
    with BytesIO() as file, drawing():
        made.savefig(file, format="png", dpi=DPI)
        return file.getvalue()


def bar(axes: Axes, left: float, width: float, colour: str, label: str) -> None:
    """Draw a part of a horizontal bar."""
    axes.barh(0, width, left=left, height=0.6, color=colour, label=label)


def legend_above(axes: Axes, columns: int = 6) -> None:
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        more: dict[str, object] = {"borderaxespad": 0.2, "handlelength": 1.4, "columnspacing": 1.6}
        axes.legend(handles, labels, ncols=columns, loc="lower left", bbox_to_anchor=(0, 1), **more)


def over_steps(axes: Axes, last: float, label: bool = True) -> None:
    """Set the x axis of a curve over steps, from the start of the run to `last`."""
    axes.set_xlim(0, max(last * 1.02, 1.5))
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    axes.margins(y=0.12)
    if label:
        axes.set_xlabel("step")


def shown(text: str, most: int = 48) -> str:
    """Shorten a text from a run's files to `most` characters, to fit a picture."""
    line = printable(text).replace("\n", " ")
    return line if len(line) <= most else f"{line[: most - 3]}..."
