"""Faults that would hang a run are found without running it, and named; what is sound is found
sound.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import replace
from functools import cache
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.conformance.agreement import disagreements
from tests.support.conformance.agreement.batches import InBatch, noting_batches
from tests.support.layouts import LAYOUTS
from tests.support.messages import shows
from tests.support.planned import subject
from tests.support.training import LLAMA
from trainer.layout import AXES, PIPELINE_SCHEDULES, Layout, Recompute
from trainer.tools.planner.fakes.ledger import Ledger
from trainer.tools.planner.fakes.messages import Message
from trainer.tools.planner.simulate import Trace, simulate_all

# Real engines


SMALL = "two stages x two shards"
CASES = LAYOUTS | {
    SMALL: replace(
        LAYOUTS["pipeline x zero2"], micro_batch=2, model=LLAMA | {"num_hidden_layers": 2}
    ),
}


def simulated(rank: int, engine: str = "mesh", name: str = SMALL) -> Trace:
    """What a rank does, as the engine's code is now."""
    case = replace(CASES[name], engine=engine)
    with noting_batches():
        return simulate_all([(subject(case), rank)], case.world_size)[0]


@cache
def sound(engine: str, name: str) -> tuple[tuple[Trace, ...], Layout]:
    case = replace(CASES[name], engine=engine)
    return tuple(simulated(rank, engine, name) for rank in range(case.world_size)), subject(
        case
    ).layout


SOUND = [
    ("mesh", SMALL),
    ("deepspeed", "zero2"),
    ("accelerate", "zero3"),
    ("mesh", "ddp"),
    ("mesh", "zero3, all on the host"),
    ("mesh", "pipeline, GPipe"),
    ("mesh", "pipeline x zero2, InterleavedZeroBubble"),
    ("mesh", "pipeline x zero2, ZBVZeroBubble"),
    ("mesh", "pipeline x zero2, DualPipeV"),
    ("mesh", "pipeline x zero3, Interleaved1F1B"),
    ("mesh", "pipeline, a head tied within itself, beside the table"),
    ("mesh", "four stages of five blocks"),
    ("mesh", "hsdp, zero3"),
    ("mesh", "hpZ"),
    ("mesh", "hpZ, pipeline"),
    ("mesh", "tensor x zero3"),
    ("mesh", "tensor, phi3"),
    ("mesh", "pipeline x tensor x zero3"),
    ("mesh", "tensor x hsdp"),
    ("mesh", "pipeline x hsdp"),
    ("accelerate", "ddp"),
    ("accelerate", "hsdp, zero3"),
    ("deepspeed", "zero1"),
    ("deepspeed", "zero3"),
    ("deepspeed", "pipeline x zero1"),
    ("deepspeed", "four stages, zero1"),
    ("deepspeed", "pipeline, a head tied within itself, beside the table"),
    ("deepspeed", "tensor x zero2"),
]


@pytest.mark.more
@pytest.mark.parametrize(
    ("engine", "name"), SOUND, ids=[f"{engine}-{name}" for engine, name in SOUND]
)
def test_engines_agree(engine, name):
    traces, layout = sound(engine, name)
    assert any(result.messages for result in traces)
    assert disagreements(traces, layout) == []
    first_data_rank = [result for result in traces if layout.data_rank(result.rank) == 0]
    assert disagreements(first_data_rank, layout) == []


def faulty(rank: int) -> bool:
    return torch.distributed.get_rank() == rank


def skips_one(monkeypatch):
    from trainer.parallel.parallel_mesh import ParallelMesh

    plain = ParallelMesh.sum
    monkeypatch.setattr(
        ParallelMesh,
        "sum",
        lambda self, x, what: x if faulty(1) and what == "norm" else plain(self, x, what),
    )


def issues_one_more(monkeypatch):
    from trainer.parallel.gradients import GradientNorm

    def clip(self: Any, limit: float) -> Any:
        if faulty(1):
            self._mesh.sum(torch.zeros(()), "norm")
        return plain(self, limit)

    plain = GradientNorm.clip
    monkeypatch.setattr(GradientNorm, "clip", clip)


def swaps_two(monkeypatch):
    """The count of the targets comes after the norm."""
    from trainer.parallel.parallel_mesh import ParallelMesh

    def begin(self: Any, tensor: torch.Tensor, what: str) -> Any:
        if faulty(3):
            plain(self, torch.zeros((), dtype=torch.float32), what)
            return lambda: tensor
        return plain_begin(self, tensor, what)

    def total(self: Any, tensor: torch.Tensor, what: str) -> torch.Tensor:
        if faulty(3):
            plain_begin(self, torch.zeros((), dtype=torch.int64), what)
            return tensor
        return plain(self, tensor, what)

    plain_begin, plain = ParallelMesh.begin_sum, ParallelMesh.sum
    monkeypatch.setattr(ParallelMesh, "begin_sum", begin)
    monkeypatch.setattr(ParallelMesh, "sum", total)


def sums_in_another_dtype(monkeypatch):
    from trainer.parallel.parallel_mesh import ParallelMesh

    plain = ParallelMesh.sum
    monkeypatch.setattr(
        ParallelMesh,
        "sum",
        lambda self, x, what: plain(
            self, x.view(torch.int32) if faulty(2) and what == "norm" else x, what
        ),
    )


def sends_another_size(monkeypatch):
    plain = torch.distributed.send
    monkeypatch.setattr(
        torch.distributed,
        "send",
        lambda x, **to: plain(x[:, 1:].contiguous() if faulty(0) else x, **to),
    )


def skips_a_receive(monkeypatch):
    from trainer.parallel.pipeline import PipelineRun

    plain = PipelineRun._received
    monkeypatch.setattr(
        PipelineRun,
        "_received",
        lambda self, index, batch: (
            self._hidden(batch, self._stages[index].blocks.start)
            if faulty(3)
            else plain(self, index, batch)
        ),
    )


def does_not_evaluate(monkeypatch):
    from trainer.engines.torch.engine import TorchEngine

    plain = TorchEngine.evaluate
    monkeypatch.setattr(
        TorchEngine, "evaluate", lambda self, batches: None if faulty(3) else plain(self, batches)
    )


def reduces_after_the_norm(monkeypatch):
    """Two groups, each in order, and yet neither can be first."""
    from trainer.parallel.gradients import GradientNorm, GradientSync

    def clip(self: Any, limit: float) -> Any:
        norm = clips(self, limit)
        if faulty(2):
            reduces(kept.pop())
        return norm

    kept: list[Any] = []
    reduces, clips = GradientSync.reduce, GradientNorm.clip
    monkeypatch.setattr(
        GradientSync, "reduce", lambda self: kept.append(self) if faulty(2) else reduces(self)
    )
    monkeypatch.setattr(GradientNorm, "clip", clip)


SUM, EVALUATE = "trainer/parallel/parallel_mesh.py", "trainer/parallel/pipeline.py"
FAULTS = {
    skips_one: (
        1,
        "step 1",
        SUM,
        "leaves out all-reduce of 4 bytes of float32",
        "as ranks 0, 2, 3 do",
    ),
    issues_one_more: (
        1,
        "step 1",
        SUM,
        "one more all-reduce of 4 bytes of float32",
        "as ranks 0, 2, 3 do",
    ),
    swaps_two: (
        3,
        "step 1",
        SUM,
        " sum) before all-reduce of 8 bytes of int64",
        "as ranks 0, 1, 2 do",
    ),
    sums_in_another_dtype: (2, "step 1", SUM, "4 bytes of int32", "4 bytes of float32"),
    sends_another_size: (
        0,
        "evaluation",
        EVALUATE,
        "send to rank 2 of 7,936 bytes",
        "receive from rank 0 of 8,192",
    ),
    skips_a_receive: (3, "evaluation", EVALUATE, "leaves out send to rank 3", "as rank 1 does"),
    does_not_evaluate: (3, "evaluation", "trainer", "leaves out", "as rank"),
    reduces_after_the_norm: (
        2,
        "step 1",
        SUM,
        "hangs at all-reduce",
        "rank 0, which is in step 1 at all-reduce",
    ),
}


@pytest.mark.more
@pytest.mark.parametrize("plant", FAULTS, ids=[plant.__name__ for plant in FAULTS])
def test_a_planted_fault_is_named(monkeypatch, plant):
    rank, phase, place, actual, expected = FAULTS[plant]
    others, layout = sound("mesh", SMALL)
    plant(monkeypatch)
    problems = disagreements([*others[:rank], simulated(rank), *others[rank + 1 :]], layout)
    assert [
        problem
        for problem in problems
        if problem.place.startswith(f"rank {rank}, {phase}, {place}")
        and actual in problem.actual
        and expected in problem.expected
    ], "\n".join(map(str, problems))
    assert any("hangs" in problem.actual for problem in problems)


# Programs that are made up

FAST = torch.float32


def layout(pipeline: int, replicate: int, shard: int, tensor: int) -> Layout:
    return Layout(
        pipeline=pipeline,
        replicate=replicate,
        shard=shard,
        tensor=tensor,
        micro_batch=1,
        accumulation=8,
        zero_stage=0,
        offload_optimizer="none",
        offload_param="none",
        precision="float32",
        recompute=Recompute(),
        schedule=PIPELINE_SCHEDULES["1F1B"],
    )


Program = dict[int, list[Message]]


def programs(layout: Layout, events: list[Any], ranks: list[int] | None = None) -> Program:
    """What each rank says, or each of these, where all go through the same events in one order."""
    at = list(product(*(range(getattr(layout, axis)) for axis in AXES)))
    messages: Program = {
        rank: [] for rank in (range(layout.world_size) if ranks is None else ranks)
    }
    for number, (kind, axes, stage, dtype, size) in enumerate(events):
        phase, place = f"step {1 + 2 * number // len(events)}", f"code.py:{number} event"
        for rank in messages:
            here = at[rank]
            if kind == "collective":
                along = [AXES.index(axis) for axis in axes]
                group = tuple(r for r, there in enumerate(at) if _differ_only(here, there, along))
                stands = 0 in along or here[0] == stage % layout.pipeline
                if len(group) > 1 and stands:
                    messages[rank].append(Message("all-reduce", group, dtype, size, phase, place))
            elif layout.pipeline > 1:
                for name, peer in _ends(kind, rank, here[0], stage % (layout.pipeline - 1), layout):
                    pair = tuple(sorted((rank, peer)))
                    batch = number if kind == "exchange" else None
                    messages[rank].append(
                        InBatch(name, pair, dtype, size, phase, place, peer, batch)
                    )
    return messages


def _differ_only(here: tuple[int, ...], there: tuple[int, ...], along: list[int]) -> bool:
    return all(
        a == b for axis, (a, b) in enumerate(zip(here, there, strict=True)) if axis not in along
    )


def _ends(kind: str, rank: int, at: int, stage: int, layout: Layout) -> list[tuple[str, int]]:
    """The ends that a rank has of a message from a stage to the next, or of one in each
    direction.
    """
    stride = layout.world_size // layout.pipeline
    if at == stage:
        return [("send", rank + stride), ("receive", rank + stride)][: 1 + (kind == "exchange")]
    if at == stage + 1:
        return [("receive", rank - stride), ("send", rank - stride)][: 1 + (kind == "exchange")]
    return []


NO_MEMORY = Ledger().history()


def checked(layout: Layout, said: Program, ranks: Any = None) -> list[Any]:
    chosen = range(layout.world_size) if ranks is None else ranks
    traces = [Trace(rank, NO_MEMORY, tuple(said[rank])) for rank in chosen]
    return disagreements(traces, layout)


LAYOUT = st.builds(
    layout, *(st.sampled_from(sizes) for sizes in ((1, 2, 3), (1, 2), (1, 2, 3), (1, 2)))
)
EVENT = st.tuples(
    st.sampled_from(("collective", "collective", "message", "exchange")),
    st.sets(st.sampled_from(AXES), min_size=1).map(sorted),
    st.integers(0, 2),
    st.sampled_from((torch.float32, torch.bfloat16)),
    st.sampled_from((4, 8, 4096)),
)
EVENTS = st.lists(EVENT, min_size=2, max_size=14)


def representatives(layout: Layout) -> list[int]:
    """First and last tensor and data rank of each stage."""
    data, tensor = (0, layout.data_ranks - 1), (0, layout.tensor - 1)
    return [
        rank
        for rank in range(layout.world_size)
        if layout.data_rank(rank) in data and rank % layout.tensor in tensor
    ]


@given(LAYOUT, EVENTS)
def test_ranks_in_one_order_agree(layout, events):
    message = programs(layout, events)
    assert checked(layout, message) == []
    assert checked(layout, message, representatives(layout)) == []


@given(LAYOUT, EVENTS, st.data())
def test_any_fault_of_one_rank_is_found(layout, events, data):
    messages = programs(layout, events)
    able = [rank for rank in messages if messages[rank]]
    if not able:
        return
    rank = data.draw(st.sampled_from(able))
    index = data.draw(st.integers(0, len(messages[rank]) - 1))
    mine, message = messages[rank], messages[rank][index]
    fault = data.draw(st.sampled_from(("skip", "twice", "dtype", "size")))
    messages[rank] = {
        "skip": [*mine[:index], *mine[index + 1 :]],
        "twice": [*mine[:index], message, *mine[index:]],
        "dtype": [*mine[:index], replace(message, dtype=torch.float64), *mine[index + 1 :]],
        "size": [*mine[:index], replace(message, size=message.size + 4), *mine[index + 1 :]],
    }[fault]
    problems = checked(layout, messages)
    named = re.compile(rf"ranks? (\d+, )*{rank}\b")
    # of a row of like sends, the last has no receive, whichever was left out
    place = message.place if message.peer is None else ""
    assert [
        p for p in map(str, problems) if named.search(p) and message.phase in p and place in p
    ], problems
    if rank in representatives(layout) and _compared(layout, rank, message):
        assert checked(layout, messages, representatives(layout))


def _compared(layout: Layout, rank: int, message: Message) -> bool:
    """Whether some other representative has to be there, too."""
    return any(
        other != rank and (other in message.group or other == message.peer)
        for other in representatives(layout)
    )


@given(LAYOUT, EVENTS, st.data())
def test_an_order_across_groups_stands_still_where_events_wait_in_a_circle(layout, events, data):
    """Compared with another way of telling: by a circle of events of which each is before the next on
    some rank.
    """
    message = programs(layout, [event for event in events if event[0] != "exchange"])
    able = [rank for rank in message if len(message[rank]) > 1]
    if not able:
        return
    rank = data.draw(st.sampled_from(able))
    index = data.draw(st.integers(0, len(message[rank]) - 2))
    one, two = message[rank][index : index + 2]
    if (one.group, one.phase) == (two.group, one.phase) or one.phase != two.phase:
        return
    message[rank][index : index + 2] = [two, one]
    problems = checked(layout, message)
    assert bool(problems) == _circular(message)
    assert all("hangs" in problem.actual for problem in problems)


def _circular(said: Program) -> bool:
    after: dict[Any, set[Any]] = defaultdict(set)
    for messages in said.values():
        for before, behind in pairwise(messages):
            after[before.place, before.group].add((behind.place, behind.group))
    events = set(after) | {event for result in after.values() for event in result}
    while events:
        last = {event for event in events if not after[event] & events}
        if not last:
            return True
        events -= last
    return False


def test_an_exchange_needs_a_batch():
    """Two ranks that both receive first wait for each other, unless sending is under way beside
    it.
    """
    two = layout(2, 1, 1, 1)

    def program(batch: int | None) -> Program:
        return {
            rank: [
                InBatch(name, (0, 1), FAST, 4, "step 1", f"code.py:{rank} {name}", 1 - rank, batch)
                for name in ("receive", "send")
            ]
            for rank in range(2)
        }

    assert checked(two, program(7)) == []
    first, second = checked(two, program(None))
    shows(first.place, "rank 0, step 1", "code.py:0 receive")
    shows(first.actual, "receive", "1 of 4 bytes", "float32 (code.py:0", "1 to rank 0")
    shows(first.expected, "rank 1", "1 at receive", "0 of 4 bytes", "float32 (code.py:1")
    assert second.place.startswith("rank 1,")


def test_the_odd_one_of_a_pair_is_told_by_other_pairs():
    """Of two ranks that differ, the one whose row no other group has is named."""
    four = layout(1, 1, 2, 2)
    events = [("collective", ["tensor"], 0, FAST, size) for size in (4, 8)]
    message = programs(four, events)
    message[0] = message[0][:1]
    (problem,) = [problem for problem in checked(four, message) if "hangs" not in problem.actual]
    shows(problem.place, "rank 0, step 2", "code.py:1 event")
    shows(problem.actual, "leaves", "all-reduce", "8 bytes", "float32 (code.py:1")
    shows(problem.expected, "1 message among ranks", "0, 1 in step", "2", "1 does, not 0")


def test_one_left_out_of_a_long_row_of_like_ones_is_named():
    three = layout(1, 1, 3, 1)
    message = programs(three, [("collective", ["shard"], 0, FAST, 4)] * 3000)
    left_out = message[2].pop(700)
    problem = checked(three, message)[0]
    assert left_out.place == "code.py:700 event"
    assert problem.place.startswith("rank 2, step 1")
    assert problem.place.endswith(left_out.place)
    shows(
        problem.expected,
        "1500 messages among ranks",
        "0, 1, 2 in",
        "step 1",
        "ranks 0, 1 do",
        "not 1499",
    )


def test_representatives_stand_for_a_thousand_ranks():
    large = layout(8, 4, 16, 2)
    events = [
        *(("message", (), stage, FAST, 4096) for stage in range(7)),
        ("collective", ["shard"], 3, FAST, 64),
        ("collective", ["pipeline", "shard", "tensor"], 0, FAST, 4),
    ]
    chosen = [rank for rank in representatives(large) if rank // 128 in (0, 1, 3, 7)]
    messages = programs(large, events, chosen)
    assert checked(large, messages, chosen) == []
    last = max(rank for rank in chosen if rank // 128 == 3)
    messages[last] = [
        replace(message, size=65) if message.size == 64 else message for message in messages[last]
    ]
    problem = checked(large, messages, chosen)[0]
    shows(problem.place, f"{last}, step 2, code.py:7", "event")
    shows(problem.actual, "among 16 ranks", "pipeline 3, tensor 1")
    messages = programs(large, events, chosen)
    receiver = min(rank for rank in chosen if rank // 128 == 1)
    messages[receiver] = messages[receiver][1:]
    assert [
        p
        for p in checked(large, messages, chosen)
        if p.place.startswith(f"rank {receiver}, step 1, code.py:0")
    ]
