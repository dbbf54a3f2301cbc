"""The mesh of a run: which rank is where on its axes, and what travels along each of them."""

from __future__ import annotations

from itertools import product
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch, Rectangle

from trainer.layout import AXES, Layout
from trainer.report.records import RunRecord
from trainer.report.style import BLUE, OCHRE, TEAL, VIOLET, WIDTH, Section, bare, figure

COLOURS = dict(zip(AXES, (VIOLET, OCHRE, BLUE, TEAL), strict=True))
MOST = {"pipeline": 4, "replicate": 4, "shard": 8, "tensor": 4}
"""Ranks of an axis that are drawn."""
CELL, GAP, LEFT = 0.42, 0.16, 1.75
"""Of a process, between groups of them, and left of them all; in units of which one is an inch or less."""


def travels(layout: Layout, engine: str) -> dict[str, str]:
    """What goes over each axis that is longer than 1, and how often."""
    return {axis: _ON[axis](layout, engine) for axis in AXES if getattr(layout, axis) > 1}


def _pipeline(layout: Layout, engine: str) -> str:
    return "hidden states to the next stage and their gradients back, for each micro-batch (send and receive)"


def _replicate(layout: Layout, engine: str) -> str:
    what = "gradients of each shard" if layout.shard > 1 else "gradients"
    return f"{what} are all-reduced among the replicas"


def _shard(layout: Layout, engine: str) -> str:
    if layout.zero_stage == 3:
        return "weights are all-gathered a block at a time, forward and backward; gradients are reduce-scattered"
    if engine == "deepspeed":
        to = ", each to the rank that keeps it" if layout.zero_stage == 2 else ""
        return f"gradients are reduced{to}; new weights are all-gathered after the step"
    return "weights are all-gathered a block at a time and kept until the backward pass; gradients are reduce-scattered"


def _tensor(layout: Layout, engine: str) -> str:
    return "activations and their gradients are all-reduced in each block, forward and backward, for each micro-batch"


_ON = {"pipeline": _pipeline, "replicate": _replicate, "shard": _shard, "tensor": _tensor}


def mesh(record: RunRecord) -> Section:
    key, title, layout = "mesh", "The mesh", record.layout
    if layout is None:
        return Section(key, title, "The run's layout is not known: neither environment.json nor a checkpoint has it.")
    axes_used = travels(layout, record.engine)
    if not axes_used:
        return Section(key, title, f"{layout.describe()}: nothing travels.")
    shown = {axis: min(getattr(layout, axis), MOST[axis]) for axis in AXES}
    height = _height(shown)
    drawn = height * _scale(shown)
    words = 0.24 * len(axes_used) + 0.1
    made, (axes, below) = figure(drawn + words + 0.1, 2, height_ratios=(drawn, words))
    _draw(axes, layout, shown)
    _tell(below, axes_used)
    cut = [
        f"{MOST[axis]} of {getattr(layout, axis)} along {axis}" for axis in AXES if shown[axis] < getattr(layout, axis)
    ]
    by = f" under the engine {record.engine}" if record.engine else ""
    text = f"{layout.describe()}{by}: each square is a process, with its rank."
    text += f" Drawn are {', '.join(cut)}." if cut else ""
    return Section(key, title, text, made)


def _tell(axes: Axes, axes_used: dict[str, str]) -> None:
    """What travels, a line for each axis in its colour."""
    for row, (axis, words) in enumerate(axes_used.items()):
        axes.text(0.0, row, f"along {axis}", color=COLOURS[axis], fontweight="bold", va="center")
        axes.text(1.4, row, words, va="center", fontsize=8.5)
    bare(axes)
    axes.set(xlim=(0, WIDTH), ylim=(len(axes_used) - 0.5, -0.5))


def _scale(shown: dict[str, int]) -> float:
    """Inches of a unit: as large as the width has room for, up to 1."""
    return min(1.0, (WIDTH - 0.2) / (LEFT + _right(shown) + 0.3))


def _right(shown: dict[str, int]) -> float:
    return shown["shard"] * _step(shown)["shard"]


def _step(shown: dict[str, int]) -> dict[str, float]:
    """How far apart neighbours are: tensor within shard to the right, replicate within pipeline downwards."""
    shard = shown["tensor"] * CELL + GAP
    return {"tensor": CELL, "shard": shard, "replicate": CELL + GAP / 2, "pipeline": _stage(shown) + 2 * GAP}


def _stage(shown: dict[str, int]) -> float:
    return shown["replicate"] * (CELL + GAP / 2)


def _above(shown: dict[str, int]) -> float:
    """Room for the arrows of what goes to the right."""
    return 0.9 if shown["shard"] * shown["tensor"] > 1 else 0.2


def _height(shown: dict[str, int]) -> float:
    return shown["pipeline"] * (_stage(shown) + 2 * GAP) - 1.2 * GAP + _above(shown)


def _draw(axes: Axes, layout: Layout, shown: dict[str, int]) -> None:
    step = _step(shown)
    right = _right(shown)
    down = _height(shown) - _above(shown)
    size = min(8.5, 90 * CELL * _scale(shown) / len(str(layout.world_size - 1)))
    for p, r, s, t in product(*(range(shown[axis]) for axis in AXES)):
        rank = layout.rank_at(p, r, s, t)
        x, y = s * step["shard"] + t * step["tensor"], p * step["pipeline"] + r * step["replicate"]
        inside: dict[str, Any] = {"boxstyle": "round,pad=0,rounding_size=0.05", "linewidth": 0}
        box = FancyBboxPatch((x + 0.03, y + 0.03), CELL - 0.06, CELL - 0.06, facecolor=BLUE, alpha=0.85, **inside)
        axes.add_patch(box)
        axes.text(x + CELL / 2, y + CELL / 2, str(rank), ha="center", va="center", color="white", fontsize=size)
    if layout.tensor > 1:
        for p, r, s in product(*(range(shown[axis]) for axis in AXES[:3])):
            corner = s * step["shard"] - 0.02, p * step["pipeline"] + r * step["replicate"] - 0.02
            frame: dict[str, Any] = {"fill": False, "edgecolor": TEAL, "linewidth": 1.6}
            axes.add_patch(Rectangle(corner, shown["tensor"] * CELL + 0.04, CELL + 0.04, **frame))
    if layout.pipeline > 1:
        for p in range(shown["pipeline"]):
            corner = -GAP, p * step["pipeline"] - GAP * 0.7
            frame = {"fill": False, "edgecolor": VIOLET, "linewidth": 1.0, "linestyle": (0, (4, 3))}
            axes.add_patch(Rectangle(corner, right + GAP, _stage(shown) + GAP * 1.1, **frame))
    _arrows(axes, layout, shown, right, down)
    bare(axes)
    axes.set(
        xlim=(-LEFT, max(right + 0.2, WIDTH - LEFT - 0.2)), ylim=(down, -_above(shown)), aspect="equal", anchor="NW"
    )


def _arrows(axes: Axes, layout: Layout, shown: dict[str, int], right: float, down: float) -> None:
    """An arrow and a name beside the ranks for each axis that is longer than 1."""
    tensor = shown["tensor"] * CELL
    ends = {
        "pipeline": ((-0.42, 0.0), (-0.42, down - GAP)),
        "replicate": ((-0.26, 0.02), (-0.26, _stage(shown) - GAP / 2)),
        "shard": ((0.0, -0.5), (right - GAP, -0.5)),
        "tensor": ((0.0, -0.24), (tensor, -0.24)),
    }
    for axis, (start, end) in ends.items():
        size = getattr(layout, axis)
        if size == 1:
            continue
        style = {"arrowstyle": "<->", "color": COLOURS[axis], "linewidth": 1.6, "shrinkA": 0, "shrinkB": 0}
        axes.annotate("", end, start, arrowprops=style)
        name = f"{axis} {size:,}"
        bold: dict[str, Any] = {"color": COLOURS[axis], "fontsize": 9, "fontweight": "bold"}
        if axis == "shard":
            axes.text(0, -0.62, name, ha="left", va="bottom", **bold)
        elif axis == "tensor":
            axes.text(tensor + 0.12, -0.24, name, ha="left", va="center", **bold)
        elif axis == "pipeline":
            axes.text(-0.55, (start[1] + end[1]) / 2, name, ha="right", va="center", **bold)
        else:
            low = end[1] if layout.pipeline > 1 else (start[1] + end[1]) / 2
            axes.text(-0.55, min(low, 0.12) if layout.pipeline > 1 else low, name, ha="right", va="center", **bold)
