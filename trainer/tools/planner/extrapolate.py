"""The plan of a run: memory and messages of each kind of rank, and an estimate of a step's time.

Ranks at one place in the pipeline do the same, so one of them is simulated, and of the middle
places only some. If blocks repeat, a few are simulated at two depths and the rest is extrapolated
linearly; so is the number of micro-batches.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

from torch import nn

from trainer.layout import Layout
from trainer.models.names import units
from trainer.tools.planner.cluster import RESERVED, Cluster, Time, Traffic, time_of
from trainer.tools.planner.depths import are_first, depths_of
from trainer.tools.planner.fakes.memory_history import Peak, alike
from trainer.tools.planner.fakes.messages import Message
from trainer.tools.planner.simulate import Trace, Workload, simulate_all

STEADY = "step 2"
STATE = ("weights", "gradients", "optimizer")
"""The phase that stands for all later steps, and the kinds of memory that last."""
LONG = 4
"""The most pipeline ranks that are not long; of a longer pipeline less is simulated."""

INNER = {1: "second stage", 2: "third stage"}
"""The names of the places inside a pipeline that is not long."""

Axes = tuple[str, ...]
Point = tuple[int | None, int]
"""The blocks per stage (None: all) and the micro-batches of one simulation."""
Kind = tuple[str, Axes, int, bool]
"""The first four fields of `Sent`."""
Totals = dict[Kind, tuple[int, float]]
"""Kind of message -> the number of them, and the bytes sent."""


@dataclass(frozen=True)
class Sent:
    """The messages of one kind that one rank sends in a step along one set of axes."""

    name: str
    """The same as `Message.name`."""
    axes: Axes
    """The axes along which the ranks of the group differ."""
    ranks: int
    inside: bool
    """True if all of them are in one node."""
    count: float
    size: float
    """Bytes, as `Message.sent`."""


@dataclass(frozen=True)
class Role:
    """The simulated memory and traffic of all ranks of one kind."""

    name: str
    rank: int
    peaks: tuple[Peak, ...]
    sent: tuple[Sent, ...]
    copied: float
    """Bytes that a background save copies to the host."""

    def traffic(self, inside: bool) -> Traffic:
        """Return the traffic of a step inside the rank's node, or to other nodes."""
        sent = [sent for sent in self.sent if sent.inside is inside]
        return Traffic(sum(one.count for one in sent), sum(one.size for one in sent))

    @property
    def peak(self) -> Peak:
        """The peak of the phase with the most memory in use."""
        return max(self.peaks, key=lambda peak: peak.size)


@dataclass(frozen=True)
class Plan:
    """The simulated memory, traffic and time of a run."""

    workload: Workload
    cluster: Cluster
    roles: tuple[Role, ...]
    loaded: float
    """The most bytes on the host that a process takes to load the model (`loaded_at_once`)."""

    @property
    def background_copy(self) -> float:
        return max(role.copied for role in self.roles)

    @cached_property
    def fullest(self) -> Role:
        return max(self.roles, key=lambda role: role.peak.size)

    @property
    def room(self) -> float:
        """Bytes of a device that tensors may take."""
        return self.cluster.device.memory - RESERVED

    @property
    def needed(self) -> float:
        """Bytes of tensors on the fullest device, as its allocator rounds them."""
        peak = self.fullest.peak
        return peak.size + peak.rounding - self.on_host

    @property
    def on_host(self) -> float:
        """Bytes that each process has offloaded to the host at the fullest moment."""
        return sum(self.fullest.peak.by_kind.get(kind, 0) for kind in offloaded(self.workload))

    @property
    def fits(self) -> bool:
        return self.needed <= self.room

    @property
    def step_flops(self) -> float:
        """FLOPs of a step on all ranks, without recomputation."""
        return self.workload.sample.flops * self.workload.layout.train_batch

    def traffic(self, inside: bool) -> Traffic:
        """Return a step's traffic, inside nodes or between, of the rank that sends longest."""
        device = self.cluster.device
        traffics = [role.traffic(inside) for role in self.roles]
        return max(traffics, key=lambda traffic: traffic.seconds(device, inside))

    def on_device(self, kinds: Iterable[str]) -> float:
        """Return the bytes of these kinds that are on the device at the fullest moment."""
        away = offloaded(self.workload)
        return sum(self.fullest.peak.by_kind.get(kind, 0) for kind in kinds if kind not in away)

    @cached_property
    def time(self) -> Time:
        layout = self.workload.layout
        device = self.cluster.device
        state = self.on_device(STATE)
        traffic = self.traffic(inside=True), self.traffic(inside=False)
        return time_of(layout, device, self.step_flops, traffic, state, self.on_host)


def offloaded(workload: Workload) -> tuple[str, ...]:
    """Return the kinds of memory that are on the host: block inputs, and offloaded state.

    FSDP2 offloads weights, gradients and optimizer together, as DeepSpeed does with
    `offload_param`. With `offload_optimizer` alone DeepSpeed keeps weights on the device, and in
    stages 1 and 2 gradients too.
    """
    layout = workload.layout
    kept = 0  # the first kinds of STATE that are on the device
    if not layout.offloads:
        kept = len(STATE)
    elif workload.engine_name == "deepspeed" and layout.offload_param == "none":
        kept = 1 if layout.zero_stage == 3 else 2
    return (*STATE[kept:], "block inputs")


def plan_of(make: Callable[[int | None, int], Workload], cluster: Cluster) -> Plan:
    """Simulate a run and build its plan.

    `make(blocks, accumulation)` returns a workload with so many blocks in each stage (None: all)
    and so many micro-batches (0: those of the layout). Raises ConfigError for what does not run on
    fake tensors.
    """
    full = make(None, 0)
    layout = full.layout
    model = full.spec.build()
    blocks_of = blocks_per_rank(full)
    depths: Sequence[int | None] | None = depths_of(full, model, blocks_of)
    if depths is None or not are_first(make(depths[0], 0).spec, full.spec, model):
        depths = [None]
    grid: list[Point] = [(depth, micro) for micro in micro_batches_of(layout) for depth in depths]
    workloads = [make(*point) for point in grid]
    places = representatives(layout)
    jobs = [(workload, rank) for _, rank in places for workload in workloads]
    traces = iter(simulate_all(jobs, cluster.devices))
    roles = []
    for name, rank in places:
        blocks = blocks_of[layout.coordinates(rank)["pipeline"]] / layout.stages_per_rank
        points = {point: next(traces) for point in grid}
        goal = blocks, layout.accumulation
        copied = _plane({point: trace.copied for point, trace in points.items()}, goal)
        totals = {p: _totals(trace.messages, layout, cluster) for p, trace in points.items()}
        sent = tuple(_sent(totals, goal))
        roles.append(Role(name, rank, _peaks(points, goal), sent, copied))
    return Plan(full, cluster, tuple(roles), loaded_at_once(full, model))


def representatives(layout: Layout) -> list[tuple[str, int]]:
    """Return name and rank of the places to simulate: the first, the last and some in the middle.

    Of a pipeline of at most LONG ranks all are simulated. A place's rank is its first data and
    tensor rank, which has the largest shards.
    """
    last = layout.pipeline - 1
    if last == 0:
        return [("each rank", 0)]
    places = {0: "first stage", last: "last stage"}
    if layout.pipeline <= LONG:
        places |= {place: INNER[place] for place in range(1, last)}
    else:
        places[last // 2] = "a middle stage"
    return [(places[place], layout.ranks_of(place)[0]) for place in sorted(places)]


def blocks_per_rank(workload: Workload) -> list[int]:
    """Count the blocks of each pipeline rank."""
    layout = workload.layout
    ranges = workload.ranges if workload.spec.blocks else [range(0)]
    stages = [layout.stages_of(place) for place in range(layout.pipeline)]
    return [sum(len(ranges[stage]) for stage in own_stages) for own_stages in stages]


def loaded_at_once(workload: Workload, model: nn.Module) -> float:
    """Return the bytes of the largest unit in float32; of the whole model for AutoTP."""
    if workload.engine_name == "deepspeed" and workload.layout.tensor > 1:
        return 4.0 * workload.spec.parameters
    sizes = (
        sum(part.numel() for _, module in unit for part in module.parameters(recurse=False))
        for unit in units(model, workload.spec.blocks)
    )
    return 4.0 * max(sizes)


def micro_batches_of(layout: Layout) -> list[int]:
    """Choose one or two numbers of micro-batches to simulate, which fill a pipeline or accumulate.

    One is enough for a long pipeline, except with GPipe: memory no longer grows with the number,
    and messages are in proportion to it (`_sent`).
    """
    if layout.pipeline == 1:
        enough = 2
        more = 3
    else:
        enough = layout.stages
        more = layout.stages + layout.pipeline
    if layout.accumulation <= more:
        return [layout.accumulation]
    one = layout.pipeline > LONG and layout.schedule.name != "GPipe"
    return [enough] if one else [enough, more]


def _peaks(points: Mapping[Point, Trace], goal: tuple[float, int]) -> tuple[Peak, ...]:
    """Extrapolate each phase's peak to the blocks and micro-batches in `goal`."""
    rows: dict[int, dict[str, Peak]] = {}
    for accumulation in dict.fromkeys(a for _, a in points):
        traces = {depth: trace for (depth, a), trace in points.items() if a == accumulation}
        rows[accumulation] = _at_depth(traces, goal[0])
    phases = next(iter(rows.values()))
    return tuple(_drawn({a: row[phase] for a, row in rows.items()}, goal[1]) for phase in phases)


def _at_depth(traces: Mapping[int | None, Trace], goal: float) -> dict[str, Peak]:
    """Return the peak of each phase with `goal` blocks.

    It is the fullest of all moments that two depths have in common, each extrapolated by itself.
    """
    if len(traces) == 1:
        return {peak.phase: peak for peak in next(iter(traces.values())).peaks}
    low, high = sorted(depth for depth in traces if depth is not None)
    few = traces[low].history
    more = traces[high].history
    peaks: dict[str, Peak] = {}
    for (phase, first), (_, second) in zip(few.ranges(), more.ranges(), strict=True):
        moments = max(
            ({low: here, high: there} for here, there in alike(few, more, first, second)),
            key=lambda at: _straight({low: few.sizes[at[low]], high: more.sizes[at[high]]}, goal),
        )
        peak = _drawn({low: few.at(moments[low], phase), high: more.at(moments[high], phase)}, goal)
        if phase not in peaks or peak.size > peaks[phase].size:
            peaks[phase] = peak
    return peaks


def _drawn(peaks: Mapping[int, Peak], goal: float) -> Peak:
    """Extrapolate a moment, known at one or two numbers of blocks or micro-batches."""
    kinds = _each({number: peak.by_kind for number, peak in peaks.items()}, goal)
    consumers = _each({number: peak.by_consumer for number, peak in peaks.items()}, goal)
    # with two numbers of micro-batches they may be two moments, of which nothing may be negative
    for name, size in consumers.items():
        consumers[name] = min(size, kinds[name.partition(" of ")[0]])
    rounding = max(0, round(_straight({n: float(p.rounding) for n, p in peaks.items()}, goal)))
    phase = next(iter(peaks.values())).phase
    return Peak(phase, sum(kinds.values()), kinds, consumers, rounding)


def _each(values: Mapping[int, Mapping[str, float]], goal: float) -> dict[str, int]:
    """Extrapolate each named value."""
    names = dict.fromkeys(name for named in values.values() for name in named)
    return {
        name: max(0, round(_straight({n: named.get(name, 0) for n, named in values.items()}, goal)))
        for name in names
    }


def _sent(totals: Mapping[Point, Totals], goal: tuple[float, int]) -> Iterator[Sent]:
    """Extrapolate the messages of each kind to the blocks and micro-batches in `goal`."""
    micros = {accumulation for _, accumulation in totals}
    few = min(micros)
    for key in dict.fromkeys(key for total in totals.values() for key in total):
        at = {point: total.get(key, (0, 0.0)) for point, total in totals.items()}
        count = _plane({point: number for point, (number, _) in at.items()}, goal)
        size = _plane({point: sent for point, (_, sent) in at.items()}, goal)
        if len(micros) == 1 and all(number % few == 0 for number, _ in at.values()):
            # a fixed number of times per micro-batch
            count = count * goal[1] / few
            size = size * goal[1] / few
        yield Sent(*key, count, size)


def _totals(messages: Iterable[Message], layout: Layout, cluster: Cluster) -> Totals:
    """Count the messages of a step, and the bytes sent, of each kind."""
    axes_of = cache(layout.axes_of)
    counts = Counter[Kind]()
    sizes = defaultdict[Kind, float](float)
    for message in messages:
        if message.phase == STEADY and message.name != "receive":
            inside = len({rank // cluster.devices for rank in message.group}) == 1
            key = (message.name, axes_of(message.group), len(message.group), inside)
            counts[key] += 1
            sizes[key] += message.sent
    return {key: (counts[key], sizes[key]) for key in counts}


def _plane(values: Mapping[Point, float], goal: tuple[float, int]) -> float:
    """Extrapolate linearly, first in depth, then in micro-batches."""
    rows = {}
    for accumulation in dict.fromkeys(a for _, a in values):
        line = {depth: value for (depth, a), value in values.items() if a == accumulation}
        rows[accumulation] = _straight(line, goal[0])
    return max(0.0, _straight(rows, goal[1]))


def _straight(values: Mapping[int | None, float] | Mapping[int, float], goal: float) -> float:
    if len(values) == 1:
        return next(iter(values.values()))
    (low, first), (high, second) = sorted((d, v) for d, v in values.items() if d is not None)
    return first + (second - first) * (goal - low) / (high - low)
