"""Curves of logged values over the steps: losses, learning rate and norm, rate, time by phase,
memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter, PercentFormatter

from trainer.run.timeline import ALONE, PROFILE, TRACE
from trainer.supervise.phase import Phase
from trainer.tools.report.run_record import MOST, Row, RunRecord, finite, number
from trainer.tools.report.style import (
    BLUE,
    COLOURS,
    FEW,
    GREY,
    MUTED,
    OCHRE,
    RED,
    SKY,
    TEAL,
    VIOLET,
    Chapter,
    figure,
    legend_above,
    over_steps,
    shown,
)

NEVER = "The run has logged no step yet."
PHASES = {
    Phase.WAITING: OCHRE, Phase.TRAINING: BLUE, Phase.LOGGING: MUTED,
    Phase.EVALUATING: TEAL, Phase.SAVING: VIOLET, Phase.PROFILING: SKY,
}  # fmt: skip
"""The phases of a step, in their order, and their colours."""
ACCURACIES = {
    "evaluation_accuracy": "held-out accuracy",
    "evaluation_accuracy_top5": "held-out top-5 accuracy",
}
UNEVEN = 50.0
"""The ratio of the largest to the smallest value above which an axis is logarithmic."""


def losses(record: RunRecord) -> Chapter:
    key, title = "loss", "Loss"
    if not record.steps and not record.evaluations:
        return Chapter(key, title, NEVER)
    shares = [share for share in ACCURACIES.items() if finite(record.evaluations, share[0])]
    made, (axes, *below) = figure(3.2 + 2 * bool(shares), 1 + bool(shares))
    again = [
        row for stretch in record.replaced for row in (*stretch, {"step": stretch[-1]["step"]})
    ]  # with gaps
    _line(axes, again, "loss", GREY, "made again after a resume")
    _line(axes, record.steps, "loss", BLUE, "training")
    _line(axes, record.evaluations, "evaluation_loss", OCHRE, "held-out", marked=True)
    odd = [row["step"] for row in record.steps if not math.isfinite(number(row, "loss"))]
    if odd:
        axes.plot(
            odd,
            [0.02] * len(odd),
            "x",
            color=RED,
            transform=axes.get_xaxis_transform(),
            label="not finite",
        )
    axes.set_ylabel("nats per target")
    for (column, name), colour in zip(shares, (TEAL, VIOLET), strict=False):
        _line(below[0], record.evaluations, column, colour, name, marked=True)
        below[0].yaxis.set_major_formatter(PercentFormatter(1.0))
    for one in (axes, *below):
        over_steps(one, _last(record), label=one is [axes, *below][-1])
        legend_above(one)
    text = "The loss of each logged step, over its whole global batch, and the held-out loss."
    if many := record.logged > MOST:
        text += (
            f" Of {record.logged:,} log lines few are drawn: of neighbours the least loss and "
            "the largest."
        )
    if odd:
        text += (
            f" {'At least ' * many}{len(odd)} logged losses are not finite, the first at step "
            f"{odd[0]:,}."
        )
    if not record.evaluations:
        text += " There was no evaluation."
    return Chapter(key, title, text + _again(record), made)


def rates(record: RunRecord) -> Chapter:
    key, title = "learning-rate", "Learning rate and gradient norm"
    if not record.steps:
        return Chapter(key, title, NEVER)
    made, (above, below) = figure(4.2, 2, sharex=True)
    _line(above, record.steps, "learning_rate", TEAL, "learning rate")
    _line(below, record.steps, "gradient_norm", VIOLET, "gradient norm, before clipping")
    norms = finite(record.steps, "gradient_norm")
    limit = number(record.config, "gradient_clipping")
    if norms and min(norms) / 5 < limit < max(norms) * 5:
        below.axhline(
            limit, color=MUTED, linewidth=1, linestyle=(0, (4, 3)), label=f"clipped to {limit:g}"
        )
    if norms and min(norms) > 0 and max(norms) / min(norms) > UNEVEN:
        below.set_yscale("log")
    above.yaxis.set_major_formatter(_scientific)
    for axes in (above, below):
        over_steps(axes, _last(record), label=axes is below)
        legend_above(axes)
    skipped = max(
        (number(row, "skipped") for row in record.steps if "skipped" in row), default=math.nan
    )
    text = (
        "The learning rate of each logged step, and the norm of the whole model's gradient "
        "before it is clipped."
    )
    text += (
        f" {skipped:,.0f} steps were skipped for a gradient that was not finite."
        if skipped > 0
        else ""
    )
    return Chapter(key, title, text + ("" if norms else " No finite norm was logged."), made)


def throughput(record: RunRecord) -> Chapter:
    images = record.section.get("task") == "image_classification"
    unit = "images" if images else "tokens"
    key, title = "throughput", f"{unit.capitalize()} per second"
    if not record.steps:
        return Chapter(key, title, NEVER)
    made, (axes,) = figure(2.6)
    _line(
        axes,
        record.steps,
        "tokens_per_second",
        BLUE,
        f"target {unit} per second, all ranks together",
    )
    axes.yaxis.set_major_formatter(EngFormatter(sep=""))
    over_steps(axes, _last(record))
    rates = finite(record.steps, "tokens_per_second")
    axes.set_ylim(0, 1.12 * max(rates, default=1.0) or 1.0)
    legend_above(axes)
    text = "The mean rate between a log line and the one before, evaluations and saves included."
    if used := sorted(finite(record.steps, "mfu")):
        text += (
            f" In the median {used[len(used) // 2]:.0%} of the device's peak FLOP/s were used "
            "(MFU)."
        )
    return Chapter(key, title, text, made)


def times(record: RunRecord) -> Chapter:
    key, title = "time", "Where the time of a step goes"
    intervals = _intervals(record)
    if not intervals:
        waits = finite(record.steps, "data_wait")
        known = f" Waiting for data took {sum(waits) / len(waits):.1%} of it." if waits else ""
        return Chapter(key, title, f"The run recorded no phases (timeline.jsonl).{known}")
    made, (above, below) = figure(4.2, 2, height_ratios=(0.6, 2.4))
    _split_bar(above, _whole(record))
    names = [
        name
        for name in PHASES
        if name is not Phase.PROFILING and any(name in phases for _, phases in intervals)
    ]
    shown_twice = [intervals[0], *intervals]  # the first interval begins at the start of the run
    series = [[1000 * phases.get(name, 0.0) for _, phases in shown_twice] for name in names]
    colours = [PHASES[name] for name in names]
    below.stackplot(
        [0, *(step for step, _ in intervals)], series, colors=colours, step="pre", linewidth=0
    )
    over_steps(below, _last(record))
    below.set_ylabel("ms a step")
    text = (
        "The host's time by phase, between log lines (timeline.jsonl). Nothing waits for the "
        "device within a step, so "
        "on a GPU the device's own work shows where the host waits for it, in logging."
    )
    if (record.folder / PROFILE / TRACE).is_file():
        text += f" {PROFILE}/{TRACE} has the steps that were profiled, for Perfetto."
    else:
        text += " What a step is made of within is recorded with trainer.profile."
    return Chapter(key, title, text, made)


def memory(record: RunRecord) -> Chapter:
    key, title, predicted = "memory", "Memory", record.predicted
    measured = finite(record.steps, "memory_gib")
    if not measured and predicted is None:
        return Chapter(
            key,
            title,
            "The run has logged no memory, and its folder has no plan.json with a prediction.",
        )
    text = "The largest memory on the first rank since the run was last started, as it was logged."
    if predicted is None:
        made, (axes,) = figure(2.8)
        text += " The folder has no plan.json with a prediction to set beside it."
    else:
        made, (axes, below) = figure(4.4, 2, height_ratios=(2.4, 0.7))
        peak = predicted[0] / 2**30
        axes.axhline(
            peak, color=OCHRE, linewidth=1.2, linestyle=(0, (4, 3)), label="predicted peak"
        )
        _by_kind(below, predicted[1], peak)
        text = text if measured else "The run has logged no memory yet."
        text += f" Predicted (plan.json): {peak:.2f} GiB at the peak, by kind below."
    kind = {"cuda": "allocated by PyTorch", "cpu": "resident set of the process"}.get(
        record.device, "measured"
    )
    _line(axes, record.steps, "memory_gib", TEAL, f"largest since the start, first rank, {kind}")
    axes.set_ylabel("GiB")
    over_steps(axes, _last(record))
    axes.set_ylim(0, 1.15 * max(measured + ([predicted[0] / 2**30] if predicted else [])))
    legend_above(axes)
    return Chapter(key, title, text, made)


def _split_bar(axes: Axes, parts: Mapping[str, float]) -> None:
    """Draw one bar, divided in proportion to its parts; those of 7 % and more are labelled."""
    left, total = 0.0, sum(parts.values()) or 1.0
    for name in (name for name in PHASES if name in parts):
        share = parts[name] / total
        axes.barh(0, share, left=left, height=0.66, color=PHASES[name], label=name)
        if share >= 0.07:
            axes.text(
                left + share / 2,
                0,
                f"{share:.0%}",
                ha="center",
                va="center",
                color="white",
                fontsize=8,
            )
        left += share
    axes.grid(False)
    axes.spines[:].set_visible(False)
    axes.set(xlim=(0, 1), ylim=(0.5, -0.5), xticks=[], yticks=[0], yticklabels=["whole run"])
    axes.tick_params(length=0)
    legend_above(axes)


def _by_kind(axes: Axes, kinds: Mapping[str, float], peak: float) -> None:
    left = 0.0
    for index, (name, count) in enumerate(sorted(kinds.items(), key=lambda item: -item[1])):
        colour, size = COLOURS[index % len(COLOURS)], count / 2**30
        axes.barh(
            0, size, left=left, height=0.6, color=colour, label=f"{shown(name, 24)} {size:.2f}"
        )
        left += size
    axes.axvline(peak, color=OCHRE, linewidth=1.2, linestyle=(0, (4, 3)))
    axes.set(xlim=(0, 1.05 * max(left, peak, 1e-9)), yticks=[], xlabel="GiB, predicted by kind")
    axes.spines["left"].set_visible(False)
    legend_above(axes, columns=3)


def _intervals(record: RunRecord) -> list[tuple[int, dict[str, float]]]:
    """Return the step of each log line, and the seconds per step in each phase since the line
    before.
    """
    found: list[tuple[int, dict[str, float]]] = []
    before = 0
    for row in record.timeline:
        if row["event"] == "start":
            before = row["step"]
        elif row["event"] == "logged" and row["step"] > before:
            steps, before = row["step"] - before, row["step"]
            while found and found[-1][0] >= row["step"]:
                found.pop()
            found.append((row["step"], {name: passed / steps for name, passed in _phases(row)}))
    return found


def _whole(record: RunRecord) -> dict[str, float]:
    """Return the seconds of each phase; steps that were repeated count twice."""
    total: dict[str, float] = {}
    for row in record.timeline:
        for name, passed in _phases(row):
            total[name] = total.get(name, 0.0) + passed
    return total


def _phases(row: Row) -> list[tuple[str, float]]:
    """Return the phases in a line of the timeline, with their seconds."""
    alone = {event: phase for phase, event in ALONE.items()}.get(row["event"])
    given = {alone: row.get("seconds")} if alone else row.get("seconds")
    named = given if isinstance(given, dict) else {}
    return [
        (name, passed)
        for name in named
        if name in PHASES and math.isfinite(passed := number(named, name))
    ]


def _line(
    axes: Axes, rows: Sequence[Row], key: str, colour: str, label: str, marked: bool = False
) -> None:
    """Draw a curve over the steps, broken where a value is not finite."""
    points = [(row["step"], number(row, key)) for row in rows]
    if any(math.isfinite(value) for _, value in points):
        style = "o" if marked or len(points) <= FEW else ""
        axes.plot(
            [step for step, _ in points],
            [v for _, v in points],
            color=colour,
            label=label,
            marker=style,
        )


def _last(record: RunRecord) -> float:
    rows = [
        *record.steps,
        *record.evaluations,
        *(row for stretch in record.replaced for row in stretch),
    ]
    return max((float(row["step"]) for row in [*rows, *record.timeline]), default=1.0)


def _again(record: RunRecord) -> str:
    times = len(record.replaced)
    plural = "s" * (times > 1)
    return (
        f" After {times} resume{plural}, steps were made again; their first losses are grey."
        if times
        else ""
    )


def _scientific(value: float, position: float) -> str:
    mantissa, _, exponent = f"{value:.1e}".partition("e")
    return f"{mantissa}e{int(exponent)}" if value else "0"
