"""What is proposed in place of a config that does not fit, or that could be faster."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.planned import planned, subject
from tests.support.training import LLAMA, Case
from trainer.config import load
from trainer.engines.devices import DEVICES
from trainer.errors import ConfigError
from trainer.layout import Layout, Recompute
from trainer.tools.planner.candidates import (
    MOST_CHANGES,
    Estimates,
    ModelSizes,
    candidates,
    differences,
    least_bytes,
    promising,
    rank,
)
from trainer.tools.planner.cluster import RESERVED, Cluster
from trainer.tools.planner.extrapolate import Plan

MODEL = {
    **LLAMA,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "attention_dropout": 0.0,
}
RAW = {
    "train_batch_size": 32,
    "train_micro_batch_size_per_gpu": 4,
    "zero_optimization": {"stage": 2},
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "trainer": {
        "steps": 3,
        "engine": "mesh",
        "model": {"config": MODEL},
        "data": {"sequence_length": 64},
    },
}
"""On four devices: activations are most of what it takes."""


def cluster(room: float, **numbers: float) -> Cluster:
    """Two nodes of two devices, with so many bytes for tensors."""
    return Cluster(
        2, 2, replace(DEVICES["h100-80gb"], name="small", memory=RESERVED + room, **numbers)
    )


def plan(raw, where: Cluster) -> Plan:
    from trainer.tools.planner.from_config import planned as plan_of_config

    return plan_of_config(load(raw), where)


@pytest.fixture(scope="module")
def needed() -> float:
    return plan(RAW, cluster(1e12)).needed


@pytest.fixture(scope="module")
def close(needed):
    """A device that is a tenth too small, the plan for it, and what is proposed."""
    from trainer.tools.planner.search import proposals

    where = cluster(0.9 * needed)
    before = plan(RAW, where)
    return (
        where,
        before,
        proposals(load(RAW), where, before, most=2, seconds=600.0),
    )  # few cores, many tests


def test_what_misses_by_a_little_needs_one_change(close):
    _, before, found = close
    assert not before.fits and found[0].plan.fits
    assert any(len(set(p.changes) - {"train_batch_size"}) == 1 for p in found if p.plan.fits)
    keys = [rank(p.plan, p.changes) for p in found]
    assert keys == sorted(keys)
    for proposal in found:
        assert proposal.plan.workload.layout.train_batch == before.workload.layout.train_batch
        assert "less activations per GPU" in proposal.reason


def test_what_is_written_loads_and_plans_the_same(close, tmp_path):
    from trainer.tools.planner.search import write

    where, _, found = close
    source, target = tmp_path / "mine.json", tmp_path / "better.json"
    source.write_text(json.dumps(RAW | {"gradient_clipping": 0.5}))
    write(source, ["trainer.seed=7"], found[0], target)
    written = json.loads(target.read_text())
    assert written["gradient_clipping"] == 0.5 and written["trainer"]["seed"] == 7
    again = plan(written, where)
    assert again.workload.layout == found[0].plan.workload.layout
    assert again.needed == found[0].plan.needed

    with pytest.raises(ConfigError, match="is there already"):
        write(source, [], found[0], target)
    write(source, [], found[0], source)
    assert (
        load(source).trainer.seed == 0
        and json.loads(source.read_text())["gradient_clipping"] == 0.5
    )


def test_what_fits_nowhere_is_told_by_how_much():
    from trainer.tools.planner.search import proposals

    where = cluster(100e3)
    found = proposals(load(RAW), where, plan(RAW, where))
    assert not any(proposal.plan.fits for proposal in found)
    missing = (found[0].plan.needed - 100e3) / 2**20
    tried = len([proposal for proposal in found if proposal.changes])
    assert re.match(
        rf"of [{tried}-8] layouts that were tried none fits 2 x 2 small; ", found[0].reason
    )
    assert f"misses by {missing:,.2f} MiB of 0.10 MiB, and would fit " in found[0].reason
    assert "devices of 3 GiB (t4-16gb)" in found[0].reason
    assert found[0].plan.needed == min(p.plan.needed for p in found)


def test_more_nodes_that_would_do_are_named():
    """State is most of it: with a long vocabulary and a short sequence, each node more holds a part
    of it.
    """
    from trainer.tools.planner.search import nodes_enough

    model = {**MODEL, "vocab_size": 20_000, "num_hidden_layers": 1, "tie_word_embeddings": False}
    raw = RAW | {"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 1}
    raw |= {
        "trainer": {
            "steps": 3,
            "engine": "mesh",
            "model": {"config": model},
            "data": {"sequence_length": 8},
        }
    }
    raw["trainer"]["mesh"] = {"shard": -1}
    alone = plan(raw, cluster(1e12))
    more = plan(raw, replace(cluster(1e12), nodes=4))
    where = cluster((alone.needed + more.needed) / 2)
    nodes = nodes_enough(load(raw), where, plan(raw, where), [])
    assert nodes is not None and 4 <= nodes <= 16


def test_what_fits_is_told_what_is_faster(needed):
    """Every gather of ZeRO-3 crosses a slow network once for each micro-batch; there is room for
    less of it.
    """
    from trainer.tools.planner.search import proposals

    raw = RAW | {"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 1}
    raw["trainer"] = {**RAW["trainer"], "mesh": {"shard": -1}}
    where = cluster(10 * needed, network=1e6)
    before = plan(raw, where)
    found = proposals(load(raw), where, before, most=2)
    assert found and all(p.plan.fits and p.seconds < before.time.middle for p in found)
    assert "less time per step" in found[0].reason
    assert [rank(p.plan, p.changes) for p in found] == sorted(
        rank(p.plan, p.changes) for p in found
    )


def test_after_its_time_nothing_else_is_tried(monkeypatch):
    """One candidate, and then neither another one nor more nodes: each is a simulation."""
    from trainer.tools.planner import search

    where, simulated = cluster(100e3), []
    before, real = plan(RAW, where), search.planned

    def counted(config, cluster):
        simulated.append(cluster.nodes)
        return real(config, cluster)

    monkeypatch.setattr(search, "planned", counted)
    (found, *_) = search.proposals(load(RAW), where, before, seconds=0.0)
    assert simulated == [2] and found.reason.startswith("of 1 layouts that were tried none fits")


def test_where_few_changes_do_not_fit_more_are_tried():
    """Of 405 B on 1,024 GPUs, 16 stages of 8 tensor ranks: five changes from one stage that has all
    state on each.
    """
    sizes = ModelSizes(405e9, 405e9, 126, True, 8192 * 16384, 2, 8, 2.4e15 * 512)
    where = Cluster(128, 8, DEVICES["h100-80gb"])
    base = Layout(
        **{
            "world_size": 1024,
            "pipeline": 1,
            "replicate": 1024,
            "shard": 1,
            "tensor": 1,
            "zero_stage": 0,
        },
        **{"micro_batch": 4, "accumulation": 1, "train_batch": 4096, "precision": "bfloat16"},
        **{"offload_optimizer": "none", "offload_param": "none", "recompute": Recompute()},
    )
    room = where.device.memory - RESERVED
    few, more = promising(candidates(base, where, 126), base, room, Estimates(sizes, where))
    known = {"pipeline": 16, "tensor": 8, "shard": 8, "zero_stage": 1, "micro_batch": 1}
    assert any(
        all(getattr(one, key) == value for key, value in known.items())
        and one.recompute.mode == "full"
        for one in more
    )
    assert all(len(differences(base, one)) <= MOST_CHANGES for one in few)


SMALL = st.builds(
    Case,
    engine=st.sampled_from(["deepspeed", "accelerate", "mesh"]),
    world_size=st.sampled_from([1, 2, 4]),
    zero_stage=st.integers(0, 3),
    pipeline=st.sampled_from([1, 1, 2]),
    tensor=st.sampled_from([1, 1, 2]),
    micro_batch=st.sampled_from([1, 2]),
    precision=st.sampled_from(["float32", "bfloat16"]),
    recompute=st.sampled_from(["none", "full", "selective"]),
    offload_optimizer=st.sampled_from(["none", "none", "cpu"]),
    model=st.sampled_from([LLAMA | {"num_hidden_layers": 4}, MODEL]),
)


@settings(
    max_examples=10, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
@given(case=SMALL)
def test_nothing_is_left_out_that_fits(case):
    """What can't be less than a closed form is not less in the simulation, whatever the layout."""
    if case.world_size % (case.pipeline * case.tensor) or 8 % (case.micro_batch * case.data_ranks):
        return
    try:
        found = subject(case)
        if found.engine.refusal(found.layout):
            return
        found.engine.check(found.spec, found.layout)
    except ConfigError:
        return
    stages = range(0, case.world_size, case.world_size // case.pipeline)
    peaks = [max(peak.size for peak in plan.peaks.values()) for plan in planned(case, *stages)]
    spec, sample = found.spec, found.sample
    sizes = ModelSizes(
        parameters=spec.parameters,
        learned=spec.parameters,
        blocks=len(spec.blocks),
        splits=True,
        hidden=sample.hidden,
        kept=sample.kept,
        moments=8,
        flops=0.0,
    )
    assert least_bytes(found.layout, sizes) <= max(peaks)
