"""What `trainer.profile` recorded: the parts of a step, and the operators that take most of the time."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainer.report.records import RunRecord
from trainer.report.style import BLUE, COLOURS, MUTED, OCHRE, SKY, TEAL, VIOLET, Section, figure, shown, split_bars
from trainer.run.profile import FOLDER, PREFIX, TRACE
from trainer.run.timeline import PROFILING

PHASES = {
    "waiting for data": OCHRE, "training": BLUE, "forward and the rest": "#5c86b5", "backward": SKY, "optimizer": TEAL,
    "logging": MUTED, "evaluating": "#a3b86c", "saving": VIOLET, PROFILING: "#c98a9b",
}  # fmt: skip
"""The phases of a step, in their order, and their colours."""
CATEGORIES = {
    "communication": r"c10d|nccl|gloo|record_param_comms|all_?reduce|all_?gather|reduce_?scatter|_to_all|broadcast",
    "attention": r"attention|flash|efficient_attn",
    "matrix products": r"\bb?mm\b|addmm|baddbmm|matmul|::linear|gemm|einsum|convolution|conv\dd",
    "optimizer": r"^Optimizer|_foreach|fused_adam|adam|lamb|lion",
    "copies and casts": r"copy|::to\b|_to_copy|::cat\b|::clone|contiguous|memcpy|memset|fill_|zero_|pin_memory|::item",
}
"""Category of an operator -> what its name has; the first that fits counts."""
REST, BETWEEN = "element-wise and others", "between operators"
TOP = 12


@dataclass(frozen=True)
class Profiled:
    steps: str
    seconds: dict[str, float]
    """Of the recorded steps together, on the host, by the names of PHASES."""


def profiled_phases(profile: Mapping[str, Any] | None) -> Profiled | None:
    """The host's time; forward is what training has beside the backward pass and the optimizer."""
    if profile is None:
        return None
    rows = profile["operators"]
    found = {row["name"].removeprefix(PREFIX): row["host"] / 1e6 for row in rows if row["name"].startswith(PREFIX)}
    training = found.pop("training", 0.0)
    backward = sum(row["host"] for row in rows if row["name"].startswith("autograd::engine::evaluate_function")) / 1e6
    optimizer = max((row["host"] for row in rows if row["name"].startswith("Optimizer.step#")), default=0.0) / 1e6
    forward = max(0.0, training - backward - optimizer)
    parts = {"forward and the rest": forward, "backward": backward, "optimizer": optimizer, **found}
    steps = profile["steps"]
    named = f"{steps[0]} to {steps[-1]}" if len(steps) > 1 else str(steps[0])
    return Profiled(named, {name: value for name, value in parts.items() if value > 0 and name in PHASES})


def operators(record: RunRecord) -> Section:
    key, title = "operators", "Operators"
    wanted = record.section.get("profile")
    if record.profile is None:
        mend = 'No steps were profiled; "trainer": {"profile": {"start": 5, "steps": 3}} records some.'
        if isinstance(wanted, dict):
            mend = f"The run has not come to the steps that trainer.profile names ({wanted.get('start')} and on)."
        return Section(key, title, mend)
    on_device = record.profile.get("device") == "cuda"
    own, inclusive = ("self_device", "device") if on_device else ("self_host", "host")
    rows = [row for row in record.profile["operators"] if row[own] > 0]
    if not rows:
        return Section(key, title, "The profile of the recorded steps has no operator that took time.")
    shares: dict[str, float] = {}
    for row in rows:
        shares[category(row["name"])] = shares.get(category(row["name"]), 0.0) + row[own] / 1000
    top = sorted((row for row in rows if category(row["name"]) != BETWEEN), key=lambda row: -row[own])[:TOP]
    made, (above, below) = figure(1.6 + 0.27 * max(4, len(top)), 2, height_ratios=(0.5, 0.27 * max(4, len(top))))
    colours = dict(zip((*CATEGORIES, REST, BETWEEN), COLOURS, strict=False))
    split_bars(above, {"": shares}, colours, columns=4)
    names = [shown(row["name"]) for row in top]
    tints = [colours[category(row["name"])] for row in top]
    below.barh(range(len(top)), [row[own] / 1000 for row in top], color=tints, height=0.66)
    below.set(yticks=range(len(top)), yticklabels=names, ylim=(len(top) - 0.4, -0.6), xlabel="ms of its own")
    below.grid(False, axis="y")
    where = "the GPU" if on_device else "the host"
    found = profiled_phases(record.profile)
    text = (
        f"Time on {where} of the first rank in steps {found.steps if found else ''}, by category and for the operators "
        f"with most of it, what they call not counted. The whole trace is {FOLDER}/{TRACE}."
    )
    table = [["operator", "category", "calls", "ms of its own", "ms with what it calls"]]
    for row in top:
        cells = (f"{row['calls']:,}", f"{row[own] / 1000:,.2f}", f"{row[inclusive] / 1000:,.2f}")
        table.append([shown(row["name"], 80), category(row["name"]), *cells])
    return Section(key, title, text, made, table)


def category(name: str) -> str:
    if name.startswith((PREFIX, "PP:", "FSDP::")) or "#" in name or name.startswith("autograd::engine"):
        return BETWEEN  # a span in which operators are called: what is its own is Python's
    return next((kind for kind, words in CATEGORIES.items() if re.search(words, name, re.IGNORECASE)), REST)
