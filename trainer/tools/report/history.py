"""The history of a run: when it was at work, its checkpoints, and how each start ended."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from matplotlib.figure import Figure

from trainer.supervise import status_files
from trainer.tools.report import style
from trainer.tools.report.run_record import Row, RunRecord
from trainer.tools.report.style import Chapter

FINISHED = "finished"
RUNNING = "at work"
STOPPED = "stopped, all saved"
KILLED = "ended without an error"
ENDS = {STOPPED: ("s", style.SKY), FINISHED: ("D", style.TEAL), RUNNING: (">", style.BLUE)}
"""The marks of ends and their colours; any other end has a red cross."""
UNITS = ((86_400.0, "days"), (3_600.0, "hours"), (60.0, "minutes"), (1.0, "seconds"))


@dataclass(frozen=True)
class Attempt:
    """The time from a start of the run to its end, in seconds since 1970."""

    begun: float
    ended: float
    """The last sign of it."""
    first: int
    """The step from which it resumed."""
    last: int
    """The last step that is known to be done."""
    how: str


def attempts(record: RunRecord) -> list[Attempt]:
    """Return the starts of a run in order, each with its end."""
    result: list[Attempt] = []
    steps: object = None  # the run's last step, as its last start recorded it
    for row in record.timeline:
        at = float(row["time"])
        step = row["step"]
        if row["event"] == "start":
            steps = row.get("steps")
            result.append(Attempt(at, at, step, step, KILLED))
        elif result:
            how = _end(row, steps) if row["event"] == "end" else result[-1].how
            result[-1] = replace(result[-1], ended=at, last=max(step, result[-1].last), how=how)
    if result and result[-1].how == KILLED and status_files.lives(record.status):
        result[-1] = replace(result[-1], ended=time.time(), how=RUNNING)
    return result


def _end(row: Row, steps: object) -> str:
    if row.get("error"):
        return f"failed: {row['error']}"
    return FINISHED if isinstance(steps, int) and row["step"] >= steps else STOPPED


def history(record: RunRecord) -> Chapter:
    """Return the section on a run's starts, ends, checkpoints and evaluations."""
    key = "history"
    title = "Checkpoints and interruptions"
    if not (made := attempts(record)):
        there = ", ".join(f"step {step:,}" for step, _ in record.checkpoints)
        known = f" Its checkpoints: {there}." if there else " There is no checkpoint."
        return Chapter(key, title, f"The run recorded no starts and saves (timeline.jsonl).{known}")
    again = len(made) - 1
    text = f"By the first rank's clock. The run was started {len(made)} time{'s' * (again > 0)}"
    lost = sum(max(0, one.last - after.first) for one, after in pairwise(made))
    text += f"; {lost:,} steps were repeated." if again else "."
    table = [["start", "begun (UTC)", "resumed from step", "to step", "how it ended"]]
    for index, one in enumerate(made, 1):
        begun = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(one.begun))
        table.append([str(index), begun, f"{one.first:,}", f"{one.last:,}", one.how])
    return Chapter(key, title, text, _picture(record, made), table)


def _picture(record: RunRecord, made: Sequence[Attempt]) -> Figure:
    """Draw four rows over time: when the run was at work, its saves, its evaluations, its ends."""
    zero = made[0].begun
    end = max(one.ended for one in made)
    unit, name = next((pair for pair in UNITS if end - zero >= 2 * pair[0]), UNITS[-1])
    least = 0.004 * max(end - zero, 1e-3) / unit
    drawn, (axes,) = style.figure(2.7)

    def mark(row: int, seconds: Sequence[float], shape: str, label: str, **look: Any) -> None:
        times = [(one - zero) / unit for one in seconds]
        axes.plot(times, [row] * len(times), shape, label=label if times else "_", **look)

    for index, one in enumerate(made):
        width = max((one.ended - one.begun) / unit, least)
        style.bar(axes, (one.begun - zero) / unit, width, style.BLUE, "_" if index else "at work")
    there = {step for step, _ in record.checkpoints}
    saved = [row for row in record.timeline if row["event"] == "saved"]
    kept = [row["time"] for row in saved if row["step"] in there]
    pruned = [row["time"] for row in saved if row["step"] not in there]
    evaluated = [row["time"] for row in record.timeline if row["event"] == "evaluated"]
    mark(1, kept, "o", "checkpoint", color=style.TEAL)
    mark(1, pruned, "o", "checkpoint, pruned since", color=style.TEAL, markerfacecolor="white")
    mark(2, evaluated, "|", "evaluation", color=style.OCHRE, markersize=9)
    for how in dict.fromkeys(one.how for one in made):
        shape, colour = ENDS.get(how, ("X", style.RED))
        ended = [one.ended for one in made if one.how == how]
        mark(3, ended, shape, style.shown(how), color=colour, markersize=6)
    rows = ["at work", "checkpoints", "evaluations", "ends"]
    axes.set(yticks=range(4), yticklabels=rows, ylim=(3.6, -0.6))
    right = (end - zero) / unit + 5 * least
    axes.set(xlim=(-2 * least, right), xlabel=f"{name} since the first start")
    axes.grid(False, axis="y")
    axes.tick_params(axis="y", length=0, colors=style.MUTED)
    style.legend_above(axes, columns=4)
    return drawn
