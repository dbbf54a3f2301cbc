"""The plan of a run: the memory and messages of each kind of rank, and an estimate of the time of a
step.

Ranks of one kind do the same, so one is simulated for each place in the pipeline. If all blocks are
alike, a few are simulated at two depths and the rest is extrapolated linearly; so is the number of
micro-batches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property

from torch import nn

from trainer.layout import Layout
from trainer.models.spec import ModelSpec, units
from trainer.parallel.partition import block_ranges
from trainer.tools.planner.cluster import RESERVED, Cluster, Time, Traffic, time_of
from trainer.tools.planner.ledger import Peak
from trainer.tools.planner.messages import Message
from trainer.tools.planner.simulate import Trace, Workload, simulate_all

STEADY = "step 2"
"""The phase that stands for all later steps."""
LONG = 4
"""The most pipeline ranks of which all are simulated, and with all their micro-batches."""

Axes = tuple[str, ...]


@dataclass(frozen=True)
class Sent:
    """The messages of one kind that one rank sends in a step along one set of axes."""

    name: str
    """The collective or message: all-gather, reduce-scatter, all-reduce, send, ..."""
    axes: Axes
    """The axes along which the ranks of the group differ."""
    ranks: int
    """The number of ranks in the group."""
    inside: bool
    """True if all of them are in one node."""
    count: float
    size: float
    """Bytes that the rank sends, in rings."""


@dataclass(frozen=True)
class Role:
    """The simulated memory and traffic of all ranks of one kind."""

    name: str
    rank: int
    """The rank that was simulated."""
    peaks: tuple[Peak, ...]
    sent: tuple[Sent, ...]
    copied: float
    """Bytes on the host that a background save copies."""

    def traffic(self, inside: bool) -> Traffic:
        """Return the traffic of a step inside the rank's node, or to other nodes."""
        return sum(
            (Traffic(sent.count, sent.size) for sent in self.sent if sent.inside is inside),
            Traffic(),
        )

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
    """The most bytes on the host that each process takes while it loads the model: those of the
    largest unit.
    """

    @property
    def background_copy(self) -> float:
        """Bytes on the host of a process that a background save copies."""
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
        """Bytes of tensors on the fullest device, as its allocator rounds them, without those
        offloaded to the host.
        """
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
        """Return the traffic of a step, inside nodes or between them, of the rank that takes
        longest to send it.
        """
        device = self.cluster.device
        bandwidth = device.link if inside else device.network
        return max(
            (role.traffic(inside) for role in self.roles),
            key=lambda t: t.seconds(bandwidth, device.latency),
        )

    def on_device(self, kinds: Iterable[str]) -> float:
        """Return the bytes of these kinds that are on the device at the fullest moment."""
        away = offloaded(self.workload)
        return sum(self.fullest.peak.by_kind.get(kind, 0) for kind in kinds if kind not in away)

    @cached_property
    def time(self) -> Time:
        state = self.on_device(("weights", "gradients", "optimizer"))
        layout, device, wires = (
            self.workload.layout,
            self.cluster.device,
            map(self.traffic, (True, False)),
        )
        return time_of(layout, device, self.step_flops, *wires, state=state, on_host=self.on_host)


def offloaded(workload: Workload) -> tuple[str, ...]:
    """Return the kinds of memory on the host: FSDP2 offloads all of a shard, DeepSpeed as the
    layout says.
    """
    layout = workload.layout
    if not layout.offloads:
        return ()
    if workload.engine_name != "deepspeed" or layout.offload_param != "none":
        return ("weights", "gradients", "optimizer")
    if layout.zero_stage == 3:
        return ("gradients", "optimizer")
    return ("optimizer",)


def plan_of(make: Callable[[int | None, int], Workload], cluster: Cluster) -> Plan:
    """Simulate a run and build its plan.

    `make(blocks, accumulation)` returns a workload to simulate: with `blocks` in each stage, or all
    if None, and with that many micro-batches. Raises ConfigError for a model or layout that does
    not run on fake tensors.
    """
    full = make(None, 0)
    layout = full.layout
    model = full.spec.build()
    held = blocks_held(full, model)
    depths = depths_of(full, model, held)
    grid: list[Point] = [
        (depth, micro) for micro in micro_batches_of(layout) for depth in (depths or (None,))
    ]
    workloads = {point: make(*point) for point in grid}
    stand = representatives(layout)
    jobs = [(rank, point) for _, rank in stand for point in grid]
    found = dict(
        zip(
            jobs,
            simulate_all([(workloads[point], rank) for rank, point in jobs], cluster.devices),
            strict=True,
        )
    )
    roles = []
    for name, rank in stand:
        goal = (
            held[layout.coordinates(rank)["pipeline"]] / layout.stages_per_rank,
            layout.accumulation,
        )
        points = {point: found[rank, point] for point in grid}
        copied = _plane({point: trace.copied for point, trace in points.items()}, goal)
        roles.append(
            Role(
                name,
                rank,
                _peaks(points, goal),
                tuple(_sent(points, goal, layout, cluster)),
                copied,
            )
        )
    return Plan(full, cluster, tuple(roles), loaded_at_once(full, model))


def representatives(layout: Layout) -> list[tuple[str, int]]:
    """Choose a rank for each kind: in each place, the first data and tensor rank, which has the
    largest shards.
    """
    last = layout.pipeline - 1
    if last == 0:
        return [("each rank", 0)]
    places = {0: "first stage", last: "last stage"}
    if last > 1:
        places[last // 2] = "a middle stage"
    if 1 < last < LONG:
        places[1] = "second stage"
    return [(places[place], layout.rank_at(pipeline=place)) for place in sorted(places)]


def blocks_held(workload: Workload, model: nn.Module) -> list[int]:
    """Count the blocks of each pipeline rank."""
    layout, spec = workload.layout, workload.spec
    ranges = (
        block_ranges(model, spec, layout.partition, layout.stages) if spec.blocks else [range(0)]
    )
    return [
        sum(len(ranges[stage]) for stage in layout.stages_of(place))
        for place in range(layout.pipeline)
    ]


def loaded_at_once(workload: Workload, model: nn.Module) -> float:
    """Return the bytes of the largest unit in float32; of the whole model under AutoTP, which
    splits a loaded one.
    """
    if workload.engine_name == "deepspeed" and workload.layout.tensor > 1:
        return 4.0 * workload.spec.parameters
    return 4.0 * max(
        sum(
            parameter.numel()
            for _, module in unit
            for parameter in module.parameters(recurse=False)
        )
        for unit in units(model, workload.spec.blocks)
    )


def depths_of(workload: Workload, model: nn.Module, held: Sequence[int]) -> list[int] | None:
    """Choose two numbers of blocks per stage to extrapolate from; None if all blocks are simulated.

    All are simulated if they differ from one another, or if they are no more than the blocks of
    both depths.
    """
    spec, layout = workload.spec, workload.layout
    step = layout.recompute.every
    # whole groups of blocks recomputed together; more of them where FSDP2 prefetches
    few, more = (2 * step, step) if layout.pipeline > 1 else (_whole(4, step), _whole(2, step))
    depths = [few, few + more]
    gains = max(held) > sum(depths) * layout.stages_per_rank
    return depths if gains and spec.tiny.first_blocks is not None and alike(spec, model) else None


def _whole(least: int, step: int) -> int:
    """Return the first multiple of `step` that is at least `least`."""
    return -(-least // step) * step


def alike(spec: ModelSpec, model: nn.Module) -> bool:
    """Return True if all blocks have the same parameters."""
    shapes = [
        sorted(
            (name, tuple(p.shape), p.requires_grad)
            for name, p in model.get_submodule(block).named_parameters()
        )
        for block in spec.blocks
    ]
    return all(shape == shapes[0] for shape in shapes[1:])


def micro_batches_of(layout: Layout) -> list[int]:
    """Choose one or two numbers of micro-batches, enough to fill a pipeline or to accumulate
    gradients.

    For a long pipeline one is enough: what occurs once per micro-batch then grows with their number
    (`_sent`).
    """
    if layout.pipeline == 1:
        enough, more = 2, 3
    else:
        enough, more = layout.stages, layout.stages + layout.pipeline
    if layout.accumulation <= more:
        return [layout.accumulation]
    return (
        [enough] if layout.pipeline > LONG and layout.schedule.name != "GPipe" else [enough, more]
    )


Point = tuple[int | None, int]


def _peaks(points: Mapping[Point, Trace], goal: tuple[float, int]) -> tuple[Peak, ...]:
    """Extrapolate each phase's peak to the depth and micro-batches in `goal`."""
    found = []
    for peak in next(iter(points.values())).peaks:
        at = {point: trace.peak(peak.phase) for point, trace in points.items()}
        kinds, users = (
            {
                name: round(_plane({p: read(found).get(name, 0) for p, found in at.items()}, goal))
                for name in names
            }
            for read, names in (
                (
                    lambda p: p.by_kind,
                    dict.fromkeys(kind for p in at.values() for kind in p.by_kind),
                ),
                (
                    lambda p: p.by_consumer,
                    dict.fromkeys(user for p in at.values() for user in p.by_consumer),
                ),
            )
        )
        rounding = round(_plane({point: p.rounding for point, p in at.items()}, goal))
        found.append(Peak(peak.phase, sum(kinds.values()), kinds, users, rounding))
    return tuple(found)


def _sent(
    points: Mapping[Point, Trace], goal: tuple[float, int], layout: Layout, cluster: Cluster
) -> Iterator[Sent]:
    totals = {point: _totals(trace.messages, layout, cluster) for point, trace in points.items()}
    micros = {accumulation for _, accumulation in points}
    few = min(micros)
    for key in dict.fromkeys(key for total in totals.values() for key in total):
        count, size = (
            _plane({p: total.get(key, (0, 0))[i] for p, total in totals.items()}, goal)
            for i in (0, 1)
        )
        if len(micros) == 1 and all(
            total.get(key, (0,))[0] % few == 0 for total in totals.values()
        ):
            count, size = (
                count * goal[1] / few,
                size * goal[1] / few,
            )  # a fixed number of times per micro-batch
        yield Sent(*key, count, size)


def _totals(
    messages: Iterable[Message], layout: Layout, cluster: Cluster
) -> dict[tuple[str, Axes, int, bool], tuple[float, float]]:
    axes_of = cache(layout.axes_of)
    counts: Counter[tuple[str, Axes, int, bool]] = Counter()
    sizes: Counter[tuple[str, Axes, int, bool]] = Counter()
    for message in messages:
        if message.phase == STEADY and message.name != "receive":
            inside = len({rank // cluster.devices for rank in message.group}) == 1
            key = (message.name, axes_of(message.group), len(message.group), inside)
            counts[key] += 1
            sizes[key] += message.sent  # type: ignore[assignment]
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


def with_blocks(
    workload: Workload, spec: ModelSpec, blocks: int | None, accumulation: int
) -> Workload:
    """Return the workload with another number of blocks per stage and of micro-batches, otherwise
    the same.
    """
    layout = workload.layout
    few = accumulation or layout.accumulation
    changed = replace(
        layout,
        accumulation=few,
        partition="uniform" if blocks is not None else layout.partition,
    )
    batches = {"train_batch_size": changed.train_batch, "gradient_accumulation_steps": few}
    return replace(workload, layout=changed, spec=spec, deepspeed={**workload.deepspeed, **batches})
