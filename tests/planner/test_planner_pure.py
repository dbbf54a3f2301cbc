"""What the planner reckons with: places in the mesh, bytes in rings, devices, straight lines."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.layouts import LAYOUTS
from tests.support.messages import raises
from tests.support.training import layout_of
from trainer.engines.devices import DEVICES, device_named
from trainer.errors import ConfigError
from trainer.layout import AXES
from trainer.tools.planner.cluster import NUMBERS, described, device_of
from trainer.tools.planner.extrapolate import _plane, _straight, representatives
from trainer.tools.planner.fakes.messages import Message

SIZES = st.tuples(*[st.integers(1, 4)] * 4)
PLAIN = layout_of(LAYOUTS["ddp"])


def mesh(sizes: tuple[int, ...]):
    pipeline, replicate, shard, tensor = sizes
    axes = dict(pipeline=pipeline, replicate=replicate, shard=shard, tensor=tensor)
    return replace(PLAIN, **axes, micro_batch=1, accumulation=8)


@given(SIZES)
def test_ranks_are_counted_row_by_row(sizes):
    layout = mesh(sizes)
    places = [
        tuple(layout.coordinates(rank)[axis] for axis in AXES) for rank in range(layout.world_size)
    ]
    assert places == list(product(*(range(getattr(layout, axis)) for axis in AXES)))
    stages = [list(layout.ranks_of(stage)) for stage in range(layout.pipeline)]
    assert stages == [
        [rank for rank, place in enumerate(places) if place[0] == stage]
        for stage in range(layout.pipeline)
    ]


@pytest.mark.parametrize(("stages", "places"), [(1, 1), (2, 2), (3, 3), (4, 4), (8, 3)])
def test_every_stage_of_a_short_pipeline_is_simulated(stages, places):
    chosen = representatives(mesh((stages, 1, 2, 1)))
    assert len({rank for _, rank in chosen}) == len({name for name, _ in chosen}) == places
    assert [rank for _, rank in chosen][:: max(1, places - 1)] == [0, 2 * (stages - 1)][:places]


@given(SIZES, st.sets(st.sampled_from(AXES), min_size=1), st.data())
def test_a_group_lies_along_the_axes_in_which_its_ranks_differ(sizes, axes, data):
    layout = mesh(sizes)
    at = layout.coordinates(data.draw(st.integers(0, layout.world_size - 1)))
    group = [
        rank
        for rank in range(layout.world_size)
        if all(
            place == at[axis]
            for axis, place in layout.coordinates(rank).items()
            if axis not in axes
        )
    ]
    assert layout.axes_of(group) == tuple(
        axis for axis in AXES if axis in axes and getattr(layout, axis) > 1
    )


def message(name: str, ranks: int, size: int) -> Message:
    return Message(name, tuple(range(ranks)), None, size, "", "")


@given(st.integers(1, 1024), st.integers(0, 2**40))
def test_a_ring(ranks, size):
    """An all-reduce is a reduce-scatter and an all-gather, each of which sends all but one of
    `ranks` parts.
    """
    gathered = message("all-gather", ranks, size).sent
    assert (
        gathered
        == message("reduce-scatter", ranks, size).sent
        == pytest.approx(size - size / ranks)
    )
    assert message("all-reduce", ranks, size).sent == 2 * gathered
    assert message("send", 2, size).sent == size
    assert message("receive", 2, size).sent == 0


UNIT = st.sampled_from([("", 1.0), ("K", 1e3), ("M", 1e6), ("G", 1e9), ("T", 1e12), ("P", 1e15)])
LARGE = NUMBERS[:-1]
GIVEN = st.fixed_dictionaries({name: st.tuples(st.integers(1, 10**6), UNIT) for name in LARGE})


@given(GIVEN, st.permutations(LARGE), st.booleans(), st.booleans())
def test_a_device_by_its_numbers(values, order, bare, small):
    def written(name):
        number, (unit, _) = values[name]
        suffix = {"memory": "b" if small else "B", "peak": "FLOPS"}.get(name, "B/s")
        return f"{name}={number}{unit.lower() if small else unit}{'' if bare else suffix}"

    result = device_of(",".join(map(written, order)))
    for name, (number, (_, unit)) in values.items():
        assert getattr(result, name) == number * unit


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [("memory=80GiB", "memory", 80 * 2**30), ("latency=20us", "latency", 20e-6), ("latency=1.5ms", "latency", 1.5e-3),
     ("latency=0.25s", "latency", 0.25)],
)  # fmt: skip
def test_units_that_are_no_powers_of_ten(text, name, value):
    rest = {"memory": 1, "peak": 1, "bandwidth": 1, "link": 1}
    rest.pop(name, None)
    result = device_of(",".join([text, *(f"{key}={number}" for key, number in rest.items())]))
    assert getattr(result, name) == pytest.approx(value)


WRONG = (
    "memory=80GX memory=80TFLOPS memory=1.2.3 memory= memory=0 latency=20 latency=20GB "
    "peak=20us network=400Gb/s link=0"
)


@pytest.mark.parametrize("part", WRONG.split())
def test_a_unit_that_is_none_is_an_error(part):
    with raises(ConfigError, "number: memory=80GB, network=50GB/s", "latency=20us"):
        device_of(f"{part},memory=1,peak=1,bandwidth=1,link=1")


def test_a_device_in_words_and_back():
    for device in DEVICES.values():
        result = device_of(described(device))
        for name in NUMBERS:
            assert getattr(result, name) == pytest.approx(getattr(device, name))


@given(st.text(max_size=40).filter(lambda text: text not in DEVICES))
def test_anything_else_is_an_error(text):
    with pytest.raises(ConfigError):
        device_of(text)


def test_a_device_by_name():
    assert [device_of(name) for name in DEVICES] == list(DEVICES.values())


WHOLE = st.integers(-(10**6), 10**6)


@given(WHOLE, WHOLE, st.integers(1, 50), st.integers(1, 50), st.integers(1, 500))
def test_a_line_is_found_again(start, slope, low, step, goal):
    values = {depth: start + slope * depth for depth in (low, low + step)}
    assert _straight(values, goal) == pytest.approx(start + slope * goal, abs=1e-3)


@given(
    st.lists(st.integers(0, 1000), min_size=3, max_size=3), st.integers(4, 100), st.integers(2, 100)
)
def test_a_plane_is_found_again(parts, depth, micro):
    constant, by_depth, by_micro = parts
    values = {(d, m): constant + by_depth * d + by_micro * m for d in (4, 6) for m in (2, 3)}
    assert _plane(values, (depth, micro)) == pytest.approx(
        constant + by_depth * depth + by_micro * micro
    )


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA A100-SXM4-40GB", 312e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L4", 121e12),
        ("Tesla V100-SXM2-16GB", 125e12),
        ("NVIDIA GeForce RTX 4090", 165e12),
        ("NVIDIA L400", None),
        ("cpu", None),
    ],
)
def test_a_device_is_known_by_its_name(name, peak):
    result = device_named(name)
    assert (result and result.peak) == peak


def test_of_devices_of_one_name_the_memory_tells():
    assert device_named("NVIDIA A100-SXM4-40GB", 39 * 2**30) is DEVICES["a100-40gb"]
    assert device_named("NVIDIA A100-SXM4-80GB", 79 * 2**30) is DEVICES["a100-80gb"]
