"""About how long a step takes: FLOPs at a device's rate, bytes at its links' (a roofline; Williams et al., 2009).

A message takes its latency and its bytes over the bandwidth (Hockney, 1994).
"""

from __future__ import annotations

from dataclasses import dataclass

from trainer.layout import Layout
from trainer.planner.cluster import Device

HOST = 25e9
"""Bytes/s that each device's state on the host is moved and updated with: PCIe 4 x16, or a host's memory over 8."""


@dataclass(frozen=True)
class Traffic:
    """What one rank sends in a step over one kind of wire."""

    count: float = 0.0
    """Messages."""
    size: float = 0.0
    """Bytes."""

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.count + other.count, self.size + other.size)

    def seconds(self, bandwidth: float, latency: float) -> float:
        return self.count * latency + self.size / bandwidth


@dataclass(frozen=True)
class Time:
    """A step's parts, seconds."""

    compute: float
    """Matrix products, what is computed again included."""
    bubble: float
    """Of the pipeline: idle."""
    inside: float
    """Messages inside nodes, of the rank that sends most."""
    between: float
    """Messages between nodes."""
    update: float
    """The optimizer, at the memory's bandwidth."""
    host: float
    """What is offloaded: moved, and updated there."""

    @property
    def least(self) -> float:
        """If all that is sent is hidden behind what is computed, where that is longer."""
        return max(self.compute, self.inside, self.between) + self.bubble + self.update + self.host

    @property
    def most(self) -> float:
        """If nothing is hidden."""
        return self.compute + self.bubble + self.inside + self.between + self.update + self.host

    @property
    def middle(self) -> float:
        """Midway: by it layouts are compared."""
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
    """The parts of a step of a layout.

    `flops`: of all ranks, without what is computed again. `inside`, `between`: what goes within a node and to others,
    of the rank that takes longest to send it. `state`: bytes of weights, gradients and optimizer state on a device;
    `on_host`: off it.
    """
    compute = flops * (1 + recomputed(layout)) / layout.world_size / device.rate(layout.precision)
    rounds = layout.accumulation * layout.stages_per_rank
    bubble = compute * (layout.pipeline - 1) / rounds if layout.pipeline > 1 else 0.0
    wires = inside.seconds(device.link, device.latency), between.seconds(device.network, device.latency)
    return Time(compute, bubble, *wires, 2 * state / device.bandwidth, 2 * on_host / HOST)


def recomputed(layout: Layout) -> float:
    """The share of a step's products that is computed again: its forward pass is a third of it."""
    return 1 / (3 * layout.recompute.every) if layout.recompute.mode in ("full", "every") else 0.0
