"""A cluster of devices, described by their data sheets, and an estimate of a step's time on it.

FLOPs take time at a device's peak rate, bytes at its bandwidths (the roofline model; Williams et
al., 2009). A message takes its latency plus its bytes over the bandwidth (Hockney, 1994).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from trainer.engines.devices import DEVICES, GIB, Device
from trainer.errors import ConfigError, Problem
from trainer.layout import Layout

RESERVED = 2 * GIB
"""Bytes left free: the CUDA context, libraries' workspaces and NCCL's buffers take 1 to 2 GiB."""

NUMBERS = ("memory", "peak", "bandwidth", "link", "network", "latency")
UNITS = {"k": 1, "m": 2, "g": 3, "t": 4, "p": 5, "": 0}
"""The power of 1000 of each prefix, or of 1024 if an `i` follows: 80GB, 74.5GiB."""
LARGE = re.compile(r"(\d+(?:\.\d*)?) ?([kmgtp]?)(i?)([a-z/]*)", re.IGNORECASE)
SHORT = re.compile(r"(\d+(?:\.\d*)?) ?(m|u|)s")
SUFFIXES = {"memory": ("", "B", "b"), "peak": ("", "FLOPS", "flops", "FLOP/s", "flop/s")}
"""The accepted units of some numbers; the others take RATES: bytes/s, as bits/s are common, too."""
RATES = ("", "B/s", "B")
EXAMPLE = "memory=80GB,peak=989TFLOPS,bandwidth=3.35TB/s,link=450GB/s"


@dataclass(frozen=True)
class Cluster:
    """Nodes with `devices` devices each, all of one kind."""

    nodes: int
    devices: int
    device: Device

    @property
    def world_size(self) -> int:
        return self.nodes * self.devices

    def __str__(self) -> str:
        return f"{self.nodes} x {self.devices} {self.device.name}"


def gib(size: float) -> str:
    return f"{size / GIB:,.2f} GiB" if size >= GIB / 100 else f"{size / 2**20:,.2f} MiB"


def device_of(text: str) -> Device:
    """Return a device by name, or from numbers as in EXAMPLE. Raises ConfigError for other text."""
    if text in DEVICES:
        return DEVICES[text]
    numbers: dict[str, Any] = {}
    for part in text.split(",") if "=" in text else []:
        key, _, value = (word.strip() for word in part.partition("="))
        number = _number(key, value)
        if key not in NUMBERS or number is None:
            names = ", ".join(NUMBERS)
            examples = "memory=80GB, network=50GB/s or latency=20us"
            expected = f"one of {names} with a number: {examples}"
            raise ConfigError(Problem("--device", part, expected))
        numbers[key] = number
    missing = [name for name in NUMBERS[:4] if name not in numbers]
    if missing:
        fault = f"without {', '.join(missing)}" if numbers else "which is not in the table"
        alike = [name for name in DEVICES if name.startswith(f"{text.lower()}-")]
        meant = f"Did you mean {' or '.join(alike)}? " if alike else ""
        hint = f"{meant}Give its numbers: --device {EXAMPLE}"
        names = f"one of {', '.join(DEVICES)}"
        raise ConfigError(Problem("--device", f"{text}, {fault}", names, hint))
    return Device("custom device", **numbers)


def described(device: Device) -> str:
    """Return the text from which `device_of` makes a device with the same numbers."""
    numbers = [f"{name}={getattr(device, name):.0f}" for name in NUMBERS if name != "latency"]
    return ",".join([*numbers, f"latency={device.latency:.9f}s"])


def _number(key: str, text: str) -> float | None:
    """Parse one of a device's numbers, above zero; None for any other text."""
    if key == "latency":
        match = SHORT.fullmatch(text)
        return float(match[1]) / {"": 1, "m": 1e3, "u": 1e6}[match[2]] if match else None
    match = LARGE.fullmatch(text)
    if match is None or match[4] not in SUFFIXES.get(key, RATES) or not float(match[1]):
        return None
    return float(match[1]) * (1024 if match[3] else 1000) ** UNITS[match[2].lower()]


# The time of a step

HOST = 25e9
"""Bytes/s at which a device's offloaded state is moved and updated: PCIe 4 x16."""


@dataclass(frozen=True)
class Traffic:
    """The messages that one rank sends in a step over one kind of link."""

    count: float
    size: float
    """Bytes."""

    def seconds(self, device: Device, inside: bool) -> float:
        """Return the time that a device takes to send them, inside its node or to others."""
        return self.count * device.latency + self.size / (device.link if inside else device.network)


@dataclass(frozen=True)
class Time:
    """The parts of a step's time, in seconds."""

    compute: float
    """Matrix products, with recomputation."""
    bubble: float
    inside: float
    between: float
    """Messages inside nodes, and between them, of the rank that sends longest."""
    update: float
    """The optimizer's update, at the memory's bandwidth."""
    host: float
    """Moving and updating the offloaded state."""

    @property
    def least(self) -> float:
        """The time of a step if communication overlaps with all of the computation."""
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
    traffic: tuple[Traffic, Traffic],
    state: float,
    on_host: float,
) -> Time:
    """Estimate the parts of a step's time for a layout.

    `flops` are those of all ranks, without recomputation; `traffic`, inside a node and between
    nodes, is that of the rank that sends longest; `state` and `on_host` are bytes of training
    state on a device, and offloaded.
    """
    # float32 is counted as half the 16-bit rate: TF32, on tensor cores
    rate = device.peak / 2 if layout.precision == "float32" else device.peak
    compute = flops * (1 + recomputed(layout)) / layout.world_size / rate
    waits = layout.schedule.bubble(layout.accumulation, layout.pipeline)
    bubble = compute * waits / (1 - waits)
    inside, between = traffic
    wires = inside.seconds(device, inside=True), between.seconds(device, inside=False)
    return Time(compute, bubble, *wires, 2 * state / device.bandwidth, 2 * on_host / HOST)


def recomputed(layout: Layout) -> float:
    """Return the share of FLOPs that recomputation adds: a forward pass is a third of a step."""
    mode = layout.recompute.mode
    every = layout.recompute.every
    return {"none": 0.0, "selective": 1 - 1 / every}.get(mode, 1 / every) / 3
