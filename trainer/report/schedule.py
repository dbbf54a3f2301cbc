"""The timeline of a pipeline: the order is that of PyTorch's schedule, the lengths are units."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from matplotlib.collections import PolyCollection

from trainer.layout import Layout
from trainer.report.records import RunRecord
from trainer.report.style import BLUE, OCHRE, PALE, TEAL, Section, bare, figure, legend_above

UNITS = {"F": 1, "B": 2, "I": 1, "W": 1}
"""Lengths: a backward pass is two forward ones, one for the gradients of activations and one for those of weights."""
KINDS = {
    "F": ("forward", BLUE),
    "B": ("backward", TEAL),
    "I": ("backward, gradients of activations", TEAL),
    "W": ("backward, gradients of weights", OCHRE),
}
ROWS, NUMBERED = 16, 1100
"""Pipeline ranks that are drawn, and passes up to which micro-batches are numbered."""


@dataclass(frozen=True)
class Pass:
    """One micro-batch in one stage, forward or backward; `kind` is a key of UNITS."""

    rank: int
    stage: int
    kind: str
    micro_batch: int
    start: int

    @property
    def end(self) -> int:
        return self.start + UNITS[self.kind]


def passes(layout: Layout) -> list[Pass]:
    """All of a step, each begun as soon as its rank is free and what it takes has come, without time for sending."""
    waiting = {rank: deque(actions) for rank, actions in _order(layout).items()}
    free = dict.fromkeys(waiting, 0)
    ends: dict[tuple[int, str, int], int] = {}
    found: list[Pass] = []
    while any(waiting.values()):
        before = len(found)
        for rank, actions in waiting.items():
            while actions:
                stage, kind, micro_batch = actions[0]
                needs = _needs(stage, kind, micro_batch, layout.stages)
                if not needs <= ends.keys():
                    break
                made = Pass(rank, stage, kind, micro_batch, max([free[rank], *(ends[need] for need in needs)]))
                free[rank] = ends[stage, "B" if kind == "I" else kind, micro_batch] = made.end
                found.append(made)
                actions.popleft()
        if len(found) == before:
            raise ValueError(f"{layout.schedule.name} waits for itself")
    return found


def idle(made: list[Pass], ranks: int) -> float:
    """The share of all ranks' time in which they wait: the bubble."""
    return 1 - sum(UNITS[one.kind] for one in made) / (ranks * max(one.end for one in made))


def _needs(stage: int, kind: str, micro_batch: int, stages: int) -> set[tuple[int, str, int]]:
    if kind == "F":
        return {(stage - 1, "F", micro_batch)} if stage else set()
    if kind == "W":
        return {(stage, "B", micro_batch)}
    return {(stage, "F", micro_batch)} | ({(stage + 1, "B", micro_batch)} if stage + 1 < stages else set())


def _order(layout: Layout) -> dict[int, list[tuple[int, str, int]]]:
    """Pipeline rank -> (stage, kind, micro-batch) in the order in which they run."""
    if layout.schedule.stages_per_rank > 1:
        return _order_of_several(layout)
    order = {}
    for rank in range(layout.pipeline):
        count = layout.accumulation
        # GPipe: all forward passes first (arXiv 1811.06965); 1F1B: what keeps those behind at work (2104.04473)
        ahead = count if layout.schedule.name == "GPipe" else min(count, layout.pipeline - rank)
        row = [(rank, "F", index) for index in range(ahead)]
        for index in range(count):
            row.append((rank, "B", index))
            row += [(rank, "F", index + ahead)] if index + ahead < count else []
        order[rank] = row
    return order


def _order_of_several(layout: Layout) -> dict[int, list[tuple[int, str, int]]]:
    """Of a schedule with several stages on a rank, as PyTorch's own class has it."""
    from torch import nn
    from torch.distributed.pipelining.schedules import get_schedule_class

    kind: Any = get_schedule_class(layout.schedule.name)
    # the order is wanted, not the sends and receives that are derived from it
    ordered = type("Ordered", (kind,), {"_prepare_schedule_with_comms": lambda self, order: None})
    stages = [
        SimpleNamespace(
            stage_index=index, num_stages=layout.stages, group_size=layout.pipeline, group_rank=0, is_first=index == 0,
            is_last=index == layout.stages - 1, has_backward=True, device=None, submod=nn.Identity(),
        )
        for index in layout.stages_of(0)
    ]  # fmt: skip
    found = ordered(stages, n_microbatches=layout.accumulation, loss_fn=lambda *_: None).pipeline_order
    order = {}
    for rank, row in found.items():
        flat = [part for one in row if one for part in one.sub_actions or (one,)]
        triples = [(one.stage_index, one.computation_type.value, one.microbatch_index) for one in flat]
        order[rank] = [one for one in triples if one[1] in UNITS]
    return order


def pipeline(record: RunRecord) -> Section:
    key, title, layout = "pipeline", "The pipeline's schedule", record.layout
    if layout is None:
        return Section(key, title, "The run's layout is not known: neither environment.json nor a checkpoint has it.")
    if layout.pipeline == 1:
        return Section(key, title, "The run has no pipeline: each rank runs all blocks.")
    made = passes(layout)
    total, ranks = max(one.end for one in made), min(layout.pipeline, ROWS)
    drawn, (axes,) = figure(0.9 + max(0.9, 0.34 * ranks))
    for rank in range(ranks):
        axes.barh(rank, total, height=0.84, color=PALE, label="idle" if rank == 0 else "_")
    later = {stage for rank in range(layout.pipeline) for stage in layout.stages_of(rank)[1:]}
    for kind, (name, colour) in KINDS.items():
        boxes = [one for one in made if one.kind == kind and one.rank < ranks]
        for label, second in ((name, False), ("_", True)):
            chosen = [_corners(one) for one in boxes if (one.stage in later) == second]
            if chosen:
                look: dict[str, Any] = {"facecolor": colour, "alpha": 0.62 if second else 1.0, "edgecolor": "white"}
                axes.add_collection(PolyCollection(chosen, linewidth=0.4, label=label, **look))
    width = 9.0 * 72 / total  # points a unit
    if len(made) <= NUMBERED and width > 7:
        for one in (one for one in made if one.rank < ranks):
            middle = (one.start + one.end) / 2
            size = min(8.0, width * 0.55)
            axes.text(middle, one.rank, str(one.micro_batch), ha="center", va="center", color="white", fontsize=size)
    bare(axes)
    axes.set(xlim=(0, total), ylim=(ranks - 0.5, -0.5), yticks=range(ranks))
    axes.set_yticklabels([f"rank {r}: stage {' and '.join(map(str, layout.stages_of(r)))}" for r in range(ranks)])
    axes.tick_params(length=0)
    axes.set_xlabel("time, in units of a forward pass")
    legend_above(axes, columns=3)
    paler = " Paler is the second stage of a rank." if later else ""
    more = f" The first {ranks} of {layout.pipeline} ranks are drawn." if ranks < layout.pipeline else ""
    text = (
        f"One step of {layout.accumulation} micro-batches by {layout.schedule.name}: its order, not measured. "
        "With a backward pass that takes twice a forward pass, stages all alike and sending free, ranks are idle for "
        f"{idle(made, layout.pipeline):.0%} of the step.{paler}{more}"
    )
    return Section(key, title, text, drawn)


def _corners(one: Pass) -> list[tuple[float, float]]:
    low, high = one.rank - 0.42, one.rank + 0.42
    return [(one.start, low), (one.end, low), (one.end, high), (one.start, high)]
