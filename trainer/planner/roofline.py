"""An estimate of the time of a step: FLOPs at a device's rate, bytes at its links' (a roofline; Williams et al., 2009).

A message takes its latency plus its bytes over the bandwidth (Hockney, 1994).
"""

from __future__ import annotations

from dataclasses import dataclass

from trainer.layout import Layout
from trainer.planner.cluster import Device

HOST = 25e9
"""Bytes/s at which each device's offloaded state is moved and updated: PCIe 4 x16, or host memory over 8."""


@dataclass(frozen=True)
class Traffic:
    """The messages that one rank sends in a step over one kind of link."""

    count: float = 0.0
    """The number of messages."""
    size: float = 0.0
    """Bytes."""

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.count + other.count, self.size + other.size)

    def seconds(self, bandwidth: float, latency: float) -> float:
        return self.count * latency + self.size / bandwidth


@dataclass(frozen=True)
class Time:
    """The parts of a step's time, in seconds."""

    compute: float
    """Matrix products, with recomputation."""
    bubble: float
    """The time that the pipeline is idle."""
    inside: float
    """Messages inside nodes, of the rank that takes longest to send them."""
    between: float
    """Messages between nodes."""
    update: float
    """The optimizer's update, at the memory's bandwidth."""
    host: float
    """Moving and updating the offloaded state."""

    @property
    def least(self) -> float:
        """The time of a step if all communication overlaps with computation, as far as that lasts."""
        return max(self.compute, self.inside, self.between) + self.bubble + self.update + self.host

    @property
    def most(self) -> float:
        """The time of a step if nothing overlaps."""
        return self.compute + self.bubble + self.inside + self.between + self.update + self.host

    @property
    def middle(self) -> float:
        """The mean of both, by which layouts are compared."""
        return (self.least + self.most) / 2


def time_of(
    layout: Layout,
    device: Device,
    flops: float,
    inside: Traffic,
    between: Traffic,
    *,
    state: float = 0.0,
    on_host: float = 0.0,
) -> Time:
    """Estimate the parts of a step's time for a layout.

    `flops`: those of all ranks, without recomputation. `inside`, `between`: traffic within a node
    and to others, of the rank that takes longest to send it. `state`: bytes of weights, gradients
    and optimizer state on a device; `on_host`: bytes of it that are offloaded.
    """
    compute = flops * (1 + recomputed(layout)) / layout.world_size / device.rate(layout.precision)
    rounds = layout.accumulation * layout.stages_per_rank
    bubble = compute * (layout.pipeline - 1) / rounds if layout.pipeline > 1 else 0.0
    wires = inside.seconds(device.link, device.latency), between.seconds(device.network, device.latency)
    return Time(compute, bubble, *wires, 2 * state / device.bandwidth, 2 * on_host / HOST)


def recomputed(layout: Layout) -> float:
    """Return the share of a step's FLOPs that recomputation adds: a forward pass is a third of a step."""
    return 1 / (3 * layout.recompute.every) if layout.recompute.mode in ("full", "every") else 0.0
