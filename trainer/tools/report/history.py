"""The history of a run: when it was at work, its checkpoints, and how each start ended."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from trainer.supervise import status_files
from trainer.tools.report.run_record import Row, RunRecord
from trainer.tools.report.style import (
    BLUE,
    MUTED,
    OCHRE,
    RED,
    SKY,
    TEAL,
    Chapter,
    figure,
    legend_above,
)

FINISHED, RUNNING, STOPPED, KILLED = (
    "finished",
    "at work",
    "stopped, all saved",
    "ended without a word",
)
UNITS = ((86_400.0, "days"), (3_600.0, "hours"), (60.0, "minutes"), (1.0, "seconds"))


@dataclass(frozen=True)
class Session:
    """The time from a start of the run to its end, in seconds since 1970."""

    begun: float
    ended: float
    """The last sign of it."""
    first: int
    """The step from which it went on."""
    last: int
    """The last step that is known to be done."""
    how: str


def sessions(record: RunRecord) -> list[Session]:
    found: list[Session] = []
    for row in record.timeline:
        at, step = float(row["time"]), row["step"]
        if row["event"] == "start":
            found.append(Session(at, at, step, step, KILLED))
        elif found:
            found[-1] = replace(
                found[-1],
                ended=at,
                last=max(step, found[-1].last),
                how=_how(row, record, found[-1].how),
            )
    if found and found[-1].how == KILLED and status_files.lives(record.status):
        found[-1] = replace(found[-1], ended=time.time(), how=RUNNING)
    return found


def _how(row: Row, record: RunRecord, before: str) -> str:
    if row["event"] != "end":
        return before
    if row.get("error"):
        return f"failed: {row['error']}"
    starts = [
        one for one in record.timeline if one["event"] == "start" and one["time"] <= row["time"]
    ]
    wanted = starts[-1].get("steps") if starts else None
    return FINISHED if isinstance(wanted, int) and row["step"] >= wanted else STOPPED


def history(record: RunRecord) -> Chapter:
    key, title = "history", "Checkpoints and interruptions"
    made = sessions(record)
    if not made:
        there = ", ".join(f"step {step:,}" for step, _ in record.checkpoints)
        known = f" Checkpoints that are there: {there}." if there else " There is no checkpoint."
        return Chapter(key, title, f"The run recorded no starts and saves (timeline.jsonl).{known}")
    zero, end = made[0].begun, max(one.ended for one in made)
    unit, name = next((pair for pair in UNITS if end - zero >= 2 * pair[0]), UNITS[-1])
    drawn, (axes,) = figure(2.7)

    def of(seconds: float) -> float:
        return (seconds - zero) / unit

    least = 0.004 * max(end - zero, 1e-3) / unit
    for index, one in enumerate(made):
        width = max(of(one.ended) - of(one.begun), least)
        axes.barh(
            0,
            width,
            left=of(one.begun),
            height=0.5,
            color=BLUE,
            label="at work" if index == 0 else "_",
        )
    visible = {step for step, _ in record.checkpoints}
    events = {
        kind: [row for row in record.timeline if row["event"] == kind]
        for kind in ("saved", "evaluated")
    }
    for kept, label, face in (
        (True, "checkpoint", TEAL),
        (False, "checkpoint, pruned since", "white"),
    ):
        times = [of(row["time"]) for row in events["saved"] if (row["step"] in visible) == kept]
        axes.plot(
            times,
            [1] * len(times),
            "o",
            color=TEAL,
            markerfacecolor=face,
            label=label if times else "_",
        )
    times = [of(row["time"]) for row in events["evaluated"]]
    axes.plot(
        times,
        [2] * len(times),
        "|",
        markersize=9,
        color=OCHRE,
        label="evaluation" if times else "_",
    )
    ends = {STOPPED: ("s", SKY), FINISHED: ("D", TEAL), RUNNING: (">", BLUE)}
    for how in dict.fromkeys(one.how for one in made):
        shape, colour = ends.get(how, ("X", RED))
        times = [of(one.ended) for one in made if one.how == how]
        axes.plot(times, [3] * len(times), shape, markersize=6, color=colour, label=how)
    axes.set(
        yticks=range(4),
        yticklabels=["at work", "checkpoints", "evaluations", "ends"],
        ylim=(3.6, -0.6),
    )
    axes.set(xlim=(-2 * least, of(end) + 5 * least), xlabel=f"{name} since the first start")
    axes.grid(False, axis="y")
    axes.tick_params(axis="y", length=0, colors=MUTED)
    legend_above(axes, columns=4)
    stops = len(made) - 1
    text = f"The clock of the first rank. The run was started {len(made)} time{'s' * (stops > 0)}"
    lost = sum(max(0, one.last - after.first) for one, after in zip(made, made[1:], strict=False))
    text += f"; {lost:,} steps were made again." if stops else "."
    table = [["start", "begun (UTC)", "went on from step", "to step", "how it ended"]]
    for index, one in enumerate(made, 1):
        begun = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(one.begun))
        table.append([str(index), begun, f"{one.first:,}", f"{one.last:,}", one.how])
    return Chapter(key, title, text, drawn, table)
