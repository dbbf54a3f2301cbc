"""Curves over the steps: losses, learning rate and norm, rate, time by phase, memory."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter, PercentFormatter

from trainer.run.observers.timeline import ALONE, PROFILE, TRACE
from trainer.supervise.stall import Phase
from trainer.tools.report import style
from trainer.tools.report.run_record import MOST, Row, RunRecord, finite, number
from trainer.tools.report.style import Chapter
from trainer.trackers.console import scientific

NEVER = "The run has logged no step yet."
PHASES = {
    Phase.WAITING: style.OCHRE, Phase.TRAINING: style.BLUE, Phase.LOGGING: style.MUTED,
    Phase.EVALUATING: style.TEAL, Phase.SAVING: style.VIOLET, Phase.PROFILING: style.SKY,
}  # fmt: skip
"""The phases of a step, in their order, and their colours."""
EVENT_PHASES = {event: phase for phase, event in ALONE.items()}
"""An event of the timeline that is one phase by itself -> that phase."""
ACCURACIES = {
    "evaluation_accuracy": ("held-out accuracy", style.TEAL),
    "evaluation_accuracy_top5": ("held-out top-5 accuracy", style.VIOLET),
}
MEASURED = {"cuda": "allocated by PyTorch", "cpu": "resident set of the process"}
DASHED: Any = {"linewidth": 1.2, "linestyle": (0, (4, 3))}
UNEVEN = 50.0
"""The ratio of the largest to the smallest value above which an axis is logarithmic."""


def losses(record: RunRecord) -> Chapter:
    key = "loss"
    title = "Loss"
    if not record.steps and not record.evaluations:
        return Chapter(key, title, NEVER)
    accuracies = [one for one in ACCURACIES if finite(record.evaluations, one)]
    made, (axes, *below) = style.figure(5.2 if accuracies else 3.2, 2 if accuracies else 1)
    # a row without a loss after each stretch leaves a gap
    again = [row for rows in record.replaced for row in (*rows, {"step": rows[-1]["step"]})]
    _line(axes, again, "loss", style.GREY, "repeated after a resume")
    _line(axes, record.steps, "loss", style.BLUE, "training")
    _line(axes, record.evaluations, "evaluation_loss", style.OCHRE, "held-out", marked=True)
    if odd := [row["step"] for row in record.steps if not math.isfinite(number(row, "loss"))]:
        bottom = axes.get_xaxis_transform()
        height = [0.02] * len(odd)
        axes.plot(odd, height, "x", color=style.RED, transform=bottom, label="not finite")
    axes.set_ylabel("nats per target")
    for accuracy in accuracies:
        name, colour = ACCURACIES[accuracy]
        _line(below[0], record.evaluations, accuracy, colour, name, marked=True)
        below[0].yaxis.set_major_formatter(PercentFormatter(1.0))
    _finish(record, axes, *below)
    return Chapter(key, title, " ".join(_on_losses(record, odd)), made)


def _on_losses(record: RunRecord, odd: Sequence[int]) -> Iterator[str]:
    yield "The loss of each logged step, over its whole global batch, and the held-out loss."
    if many := record.logged > MOST:
        yield f"The {record.logged:,} log lines are thinned: of neighbours, those with the smallest"
        yield "and the largest loss are drawn."
    if odd:
        count = f"At least {len(odd)}" if many else str(len(odd))
        yield f"{count} logged losses are not finite, the first at step {odd[0]:,}."
    if not record.evaluations:
        yield "There was no evaluation."
    if record.replaced:
        times = f"{len(record.replaced)} resume{'s' * (len(record.replaced) > 1)}"
        yield f"After {times}, steps were repeated; their first losses are grey."


def rates(record: RunRecord) -> Chapter:
    key = "learning-rate"
    title = "Learning rate and gradient norm"
    if not record.steps:
        return Chapter(key, title, NEVER)
    made, (above, below) = style.figure(4.2, 2, sharex=True)
    _line(above, record.steps, "learning_rate", style.TEAL, "learning rate")
    _line(below, record.steps, "gradient_norm", style.VIOLET, "gradient norm, before clipping")
    norms = finite(record.steps, "gradient_norm")
    limit = number(record.config, "gradient_clipping")
    if norms and min(norms) / 5 < limit < max(norms) * 5:
        below.axhline(limit, color=style.MUTED, label=f"clipped to {limit:g}", **DASHED)
    if norms and min(norms) > 0 and max(norms) / min(norms) > UNEVEN:
        below.set_yscale("log")
    above.yaxis.set_major_formatter(scientific)
    _finish(record, above, below)
    text = (
        "The learning rate of each logged step, and the norm of the whole model's gradient "
        "before it is clipped."
    )
    if skipped := max(finite(record.steps, "skipped"), default=0):
        text += f" {skipped:,.0f} steps were skipped for a gradient that was not finite."
    return Chapter(key, title, text + ("" if norms else " No finite norm was logged."), made)


def throughput(record: RunRecord) -> Chapter:
    unit = record.unit
    key = "throughput"
    title = f"{unit.capitalize()} per second"
    if not record.steps:
        return Chapter(key, title, NEVER)
    made, (axes,) = style.figure(2.6)
    label = f"target {unit} per second, all ranks together"
    _line(axes, record.steps, "tokens_per_second", style.BLUE, label)
    axes.yaxis.set_major_formatter(EngFormatter(sep=""))
    _finish(record, axes)
    axes.set_ylim(0, 1.12 * max(finite(record.steps, "tokens_per_second"), default=1.0) or 1.0)
    text = "The mean rate between a log line and the one before, evaluations and saves included."
    if used := sorted(finite(record.steps, "mfu")):
        median = used[len(used) // 2]
        text += f" In the median {median:.0%} of the device's peak FLOP/s were used (MFU)."
    return Chapter(key, title, text, made)


def times(record: RunRecord) -> Chapter:
    key = "time"
    title = "Where the time of a step goes"
    if not (intervals := _intervals(record)):
        waits = finite(record.steps, "data_wait")
        known = f" Waiting for data took {sum(waits) / len(waits):.1%} of it." if waits else ""
        return Chapter(key, title, f"The run recorded no phases (timeline.jsonl).{known}")
    made, (above, below) = style.figure(4.2, 2, height_ratios=(0.6, 2.4))
    _split_bar(above, _whole(record))
    recorded = {name for _, phases in intervals for name in phases} - {Phase.PROFILING}
    names = [name for name in PHASES if name in recorded]
    steps = [0, *(step for step, _ in intervals)]
    shown_twice = [intervals[0], *intervals]  # the first interval begins at the start of the run
    series = [[1000 * phases.get(name, 0.0) for _, phases in shown_twice] for name in names]
    colours = [PHASES[name] for name in names]
    below.stackplot(steps, series, colors=colours, step="pre", linewidth=0)
    style.over_steps(below, _last(record))
    below.set_ylabel("ms a step")
    text = (
        "The host's time by phase, between log lines (timeline.jsonl). The host does not wait for "
        "the device within a step. On a GPU, the device's work therefore counts as logging, where "
        "the host does wait."
    )
    if (record.folder / PROFILE / TRACE).is_file():
        text += f" {PROFILE}/{TRACE} has the steps that were profiled, for Perfetto."
    else:
        text += " Set trainer.profile to record the operations within a step."
    return Chapter(key, title, text, made)


def memory(record: RunRecord) -> Chapter:
    key = "memory"
    title = "Memory"
    predicted = record.predicted
    measured = finite(record.steps, "memory_gib")
    if not measured and predicted is None:
        text = "The run has logged no memory, and its folder has no plan.json with a prediction."
        return Chapter(key, title, text)
    text = "The run has logged no memory yet."
    if measured:
        text = "The largest memory on the first rank since the run was last started, as logged."
    made, (axes, *below) = (
        style.figure(4.4, rows=2, height_ratios=(2.4, 0.7)) if predicted else style.figure(2.8)
    )
    peak = predicted[0] / 2**30 if predicted else 0.0
    if predicted:
        axes.axhline(peak, color=style.OCHRE, label="predicted peak", **DASHED)
        _by_kind(below[0], predicted[1], peak)
        text += f" Predicted (plan.json): {peak:.2f} GiB at the peak, by kind below."
    else:
        text += " The folder has no plan.json with a prediction to compare it with."
    kind = MEASURED.get(record.device, "measured")
    label = f"largest since the start, first rank, {kind}"
    _line(axes, record.steps, "memory_gib", style.TEAL, label)
    axes.set_ylabel("GiB")
    _finish(record, axes)
    axes.set_ylim(0, 1.15 * max([*measured, peak]) or 1.0)
    return Chapter(key, title, text, made)


def _split_bar(axes: Axes, parts: Mapping[str, float]) -> None:
    """Draw one bar, divided in proportion to its parts; those of 7 % and more are labelled."""
    left = 0.0
    total = sum(parts.values()) or 1.0
    for name in (name for name in PHASES if name in parts):
        share = parts[name] / total
        style.bar(axes, left, share, PHASES[name], name)
        if share >= 0.07:
            middle = left + share / 2
            axes.text(
                middle, 0, f"{share:.0%}", ha="center", va="center", color="white", fontsize=8
            )
        left += share
    axes.grid(False)
    axes.spines[:].set_visible(False)
    axes.set(xlim=(0, 1), ylim=(0.5, -0.5), xticks=[], yticks=[0], yticklabels=["whole run"])
    axes.tick_params(length=0)
    style.legend_above(axes)


def _by_kind(axes: Axes, kinds: Mapping[str, float], peak: float) -> None:
    left = 0.0
    largest_first = sorted(kinds.items(), key=lambda item: -item[1])
    for place, (name, count) in enumerate(largest_first):
        colour = style.COLOURS[place % len(style.COLOURS)]
        size = count / 2**30
        style.bar(axes, left, size, colour, f"{style.shown(name, 24)} {size:.2f}")
        left += size
    axes.axvline(peak, color=style.OCHRE, **DASHED)
    axes.set(xlim=(0, 1.05 * max(left, peak, 1e-9)), yticks=[], xlabel="GiB, predicted by kind")
    axes.spines["left"].set_visible(False)
    style.legend_above(axes, columns=3)


def _intervals(record: RunRecord) -> list[tuple[int, dict[str, float]]]:
    """Return the step of each log line, and each phase's seconds per step since the line before."""
    intervals: list[tuple[int, dict[str, float]]] = []
    before = 0
    for row in record.timeline:
        if row["event"] == "start":
            before = row["step"]
        elif row["event"] == "logged" and row["step"] > before:
            steps = row["step"] - before
            before = row["step"]
            while intervals and intervals[-1][0] >= row["step"]:
                intervals.pop()
            intervals.append((row["step"], {name: s / steps for name, s in _phases(row)}))
    return intervals


def _whole(record: RunRecord) -> dict[str, float]:
    """Return the seconds of each phase; steps that were repeated count twice."""
    total: dict[str, float] = {}
    for row in record.timeline:
        for name, seconds in _phases(row):
            total[name] = total.get(name, 0.0) + seconds
    return total


def _phases(row: Row) -> list[tuple[str, float]]:
    """Return the phases in a line of the timeline, with their seconds."""
    seconds = row.get("seconds")
    if row["event"] in EVENT_PHASES:
        seconds = {EVENT_PHASES[row["event"]]: seconds}
    named = seconds if isinstance(seconds, dict) else {}
    phases = ((name, number(named, name)) for name in named if name in PHASES)
    return [(name, passed) for name, passed in phases if math.isfinite(passed)]


def _line(
    axes: Axes, rows: Sequence[Row], key: str, colour: str, label: str, marked: bool = False
) -> None:
    """Draw a curve over the steps, broken where a value is not finite."""
    values = [number(row, key) for row in rows]
    if any(map(math.isfinite, values)):
        marker = "o" if marked or len(values) <= style.FEW else ""
        steps = [row["step"] for row in rows]
        axes.plot(steps, values, color=colour, label=label, marker=marker)


def _finish(record: RunRecord, *axes: Axes) -> None:
    """Set the common axis of steps, named under the lowest picture, and the legends."""
    for one in axes:
        style.over_steps(one, _last(record), label=one is axes[-1])
        style.legend_above(one)


def _last(record: RunRecord) -> float:
    replaced = (row for stretch in record.replaced for row in stretch)
    rows = (*record.steps, *record.evaluations, *replaced, *record.timeline)
    return max((float(row["step"]) for row in rows), default=1.0)
