"""What is proposed in place of a config that does not fit, or that could be faster."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import numpy as np
import pytest

from tests.support.counted import layout_of
from tests.support.messages import shows
from tests.support.planned import LLAMA_8B
from tests.support.training import LLAMA
from trainer.config import load
from trainer.engines.devices import DEVICES
from trainer.errors import ConfigError
from trainer.tools.planner.candidates import differences
from trainer.tools.planner.cluster import RESERVED, Cluster
from trainer.tools.planner.extrapolate import Plan
from trainer.tools.planner.proposals import ClosedForm, grid, rank, shortlist
from trainer.tools.planner.rendering import MEMORY, compared

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


def less(old: Plan, new: Plan, part: str) -> bool:
    """Return True if a part of the memory of a GPU is smaller."""
    return new.on_device(MEMORY[part]) < old.on_device(MEMORY[part])


@pytest.fixture(scope="module")
def needed() -> float:
    return plan(RAW, cluster(1e12)).needed


@pytest.fixture(scope="module")
def close(needed):
    """A device that is a tenth too small, the plan for it, and what is proposed."""
    from trainer.tools.planner.proposals import proposals

    where = cluster(0.9 * needed)
    before = plan(RAW, where)
    return (
        where,
        before,
        proposals(load(RAW), where, before, most=2, seconds=600.0),
    )  # few cores, many tests


@pytest.mark.more
def test_what_misses_by_a_little_needs_one_change(close):
    _, before, result = close
    assert not before.fits and result[0].plan.fits
    assert any(len(set(p.changes) - {"train_batch_size"}) == 1 for p in result if p.plan.fits)
    keys = [rank(p) for p in result]
    assert keys == sorted(keys)
    for proposal in result:
        assert proposal.plan.workload.layout.train_batch == before.workload.layout.train_batch
        assert re.search("(activations|state) .* -> ", proposal.comparison)
    assert less(before, result[0].plan, "activations")
    shows(result[0].comparison, "activations", "->")


@pytest.mark.more
def test_an_estimate_is_corrected_by_the_plan_at_hand(close):
    """Of the layout that was planned it says at least what was simulated."""
    _, before, _ = close
    assert ClosedForm.of(before).bytes(before.workload.layout) >= 0.999 * before.needed


@pytest.mark.more
def test_what_is_written_loads_and_plans_the_same(close, tmp_path):
    from trainer.tools.planner.proposals import write

    where, _, result = close
    source, target = tmp_path / "mine.json", tmp_path / "better.json"
    source.write_text(json.dumps(RAW | {"gradient_clipping": 0.5}))
    write(source, ["trainer.seed=7"], result[0], target)
    written = json.loads(target.read_text())
    assert written["gradient_clipping"] == 0.5 and written["trainer"]["seed"] == 7
    again = plan(written, where)
    assert again.workload.layout == result[0].plan.workload.layout
    assert again.needed == result[0].plan.needed

    with pytest.raises(ConfigError, match="is there already"):
        write(source, [], result[0], target)
    write(source, [], result[0], source)
    assert (
        load(source).trainer.seed == 0
        and json.loads(source.read_text())["gradient_clipping"] == 0.5
    )


@pytest.mark.more
def test_what_fits_nowhere_is_told_by_how_much():
    from trainer.tools.planner.proposals import proposals

    where = cluster(100e3)
    result = proposals(load(RAW), where, plan(RAW, where))
    assert not any(proposal.plan.fits for proposal in result)
    missing = (result[0].plan.needed - 100e3) / 2**20
    tried = len([proposal for proposal in result if proposal.changes])
    assert re.match(rf"none of the [{tried}-8] layouts ", result[0].comparison)
    shows(result[0].comparison, "2 x 2 small")
    shows(result[0].comparison, "misses", f"{missing:,.2f} MiB of 0.10")
    shows(result[0].comparison, "devices of 3 GiB", "(t4-16gb)")
    assert result[0].plan.needed == min(p.plan.needed for p in result)
    shows(result[0].comparison, "sequence_parallel_size can't help")


@pytest.mark.more
def test_rows_are_divided_where_only_that_fits():
    """A block on four nodes of one device: no stages, no tensor ranks, and no smaller batch."""
    from trainer.tools.planner.proposals import proposals

    raw = RAW | {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 1}
    raw["zero_optimization"] = {"stage": 3}
    raw["trainer"] = RAW["trainer"] | {
        "activation_checkpointing": "full",
        "model": {"config": MODEL | {"num_hidden_layers": 1, "max_position_embeddings": 8192}},
        "data": {"sequence_length": 8192},
    }
    where = replace(cluster(1e12), nodes=4, devices=1)
    room = 0.7 * plan(raw, where).needed + RESERVED
    where = replace(where, device=replace(where.device, memory=room))
    (result,) = proposals(load(raw), where, plan(raw, where), most=1)
    assert result.plan.fits and result.changes.get("sequence_parallel_size") in (2, 4), result
    assert less(plan(raw, where), result.plan, "activations")
    shows(result.comparison, "activations", "->")


SPARSE = {
    **{key: value for key, value in MODEL.items() if key != "model_type"},
    **{"model_type": "qwen3_moe", "num_experts": 64, "num_experts_per_tok": 2},
    **{"hidden_size": 256, "moe_intermediate_size": 512},
    **{"decoder_sparse_step": 1, "mlp_only_layers": []},
}


def test_experts_are_spread_where_their_gathers_cost_more_than_their_tokens():
    from trainer.tools.planner.proposals import changed_to

    raw = RAW | {"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 1}
    raw |= {"train_batch_size": 4, "trainer": RAW["trainer"] | {"model": {"config": SPARSE}}}
    where = Cluster(1, 4, DEVICES["h100-80gb"])
    before = plan(raw, where)
    form, old = ClosedForm.of(before), before.workload.layout
    assert (form.experts, form.chosen) == (64, 2)
    only = replace(old, expert=4)
    assert only in grid(before, form) and form.seconds(only) < 0.9 * form.seconds(old)
    changes, changed = changed_to(load(raw), where, old, only)
    assert changes == {"expert_parallel.autoep_size": 4, "expert_parallel.enabled": True}
    after = plan(changed.raw, where)
    assert after.workload.layout == only
    assert after.traffic(True).size < before.traffic(True).size / 2
    assert less(before, after, "communication buffers")
    shows(compared(before, after), "sent inside nodes", "->")
    # more nodes: experts stay inside one; under ZeRO-2 nothing is gathered for a micro-batch
    wide = grid(before, replace(form, cluster=Cluster(2, 2, where.device)))
    assert {one.expert for one in wide if one.zero_stage == 3} == {1, 2}
    assert {one.expert for one in wide if one.zero_stage < 3} == {1}


def test_each_node_keeps_a_copy_where_the_network_is_slow():
    from trainer.tools.planner.proposals import changed_to

    raw = RAW | {"zero_optimization": {"stage": 3}}
    raw["trainer"] = RAW["trainer"] | {"mesh": {"shard": 4}}
    where = cluster(1e12, network=1e6)
    before = plan(raw, where)
    form, old = ClosedForm.of(before), before.workload.layout
    only = replace(old, secondary_shard=2)
    assert only in grid(before, form) and form.seconds(only) < 0.9 * form.seconds(old)
    changes, changed = changed_to(load(raw), where, old, only)
    assert changes == {"zero_optimization.zero_hpz_partition_size": 2}
    after = plan(changed.raw, where)
    assert after.traffic(False).size < 0.8 * before.traffic(False).size
    # one node, tensor ranks, an earlier stage
    inside = grid(before, replace(form, cluster=replace(where, nodes=1, devices=4)))
    copied = [one for one in grid(before, form) if one.secondary_shard > 1]
    assert {one.secondary_shard for one in inside} == {1}
    assert {(one.zero_stage, one.tensor) for one in copied} == {(3, 1)}


def test_an_estimate_counts_a_token_once_for_each_rank_of_its_experts():
    """Of 8 experts among 128 on 8 ranks, 5.34 ranks; of all, 8."""
    over = layout_of(shard=8, expert=8, zero_stage=2, precision="bfloat16")
    where = Cluster(1, 8, replace(DEVICES["h100-80gb"], latency=0.0))
    form = ClosedForm(where, 1, 1, 1, hidden=1 << 30, flops=0.0, experts=128)
    few, all_of_them = (replace(form, chosen=number).seconds(over) for number in (8, 128))
    assert few / all_of_them == pytest.approx(5.34 / 8, rel=1e-3)


@pytest.mark.more
def test_more_nodes_that_would_do_are_named():
    """State is most of it: with a long vocabulary and a short sequence, each node more holds a part
    of it.
    """
    from trainer.tools.planner.proposals import nodes_enough

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
    nodes = nodes_enough(load(raw), where, plan(raw, where))
    assert nodes is not None and 4 <= nodes <= 16


@pytest.mark.more
def test_what_fits_is_told_what_is_faster(needed):
    """Every gather of ZeRO-3 crosses a slow network once for each micro-batch; there is room for
    less of it.
    """
    from trainer.tools.planner.proposals import proposals

    raw = RAW | {"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 1}
    raw["trainer"] = {**RAW["trainer"], "mesh": {"shard": -1}}
    where = cluster(10 * needed, network=1e6)
    before = plan(raw, where)
    result = proposals(load(raw), where, before, most=2)
    assert result and all(p.plan.fits and p.plan.time.middle < before.time.middle for p in result)
    shows(result[0].comparison, "a step", "->")
    assert [rank(p) for p in result] == sorted(rank(p) for p in result)


@pytest.mark.more
def test_after_its_time_nothing_else_is_tried(monkeypatch):
    """One candidate, and then neither another one nor more nodes: each is a simulation."""
    from trainer.tools.planner import proposals as search

    where, simulated = cluster(100e3), []
    before, real = plan(RAW, where), search.planned

    def counted(config, cluster):
        simulated.append(cluster.nodes)
        return real(config, cluster)

    monkeypatch.setattr(search, "planned", counted)
    (result, *_) = search.proposals(load(RAW), where, before, seconds=0.0)
    assert simulated == [2]
    shows(result.comparison, "none", "1 layouts")


LLAMA_405B = LLAMA_8B | dict(
    hidden_size=16384, intermediate_size=53248, num_hidden_layers=126, num_attention_heads=128
)


def large(**trainer: object) -> dict:
    """405 billion parameters under ZeRO-3."""
    return {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "trainer": {
            "steps": 100,
            "data": {"sequence_length": 8192},
            "model": {"config": LLAMA_405B},
            **trainer,
        },
    }


THOUSAND = Cluster(128, 8, DEVICES["h100-80gb"])


@pytest.mark.more
def test_the_list_for_405_billion_parameters_begins_with_what_may_fit(monkeypatch):
    """Each of them needs at least three changes, and all have the same global batch."""
    before = pretended(monkeypatch, large(engine="mesh"), THOUSAND, needed=1331 * 2**30)
    old, form = before.workload.layout, ClosedForm.of(before)
    listed = shortlist(before, form)
    known = {"pipeline": 16, "tensor": 8, "shard": 8, "zero_stage": 1, "micro_batch": 1}
    assert any(all(getattr(one, key) == value for key, value in known.items()) for one in listed)
    assert all(one.train_batch == old.train_batch for one in listed)
    assert all(form.bytes(one) <= before.room for one in listed)
    first, fastest = listed[:2]
    assert len(differences(old, first)) == min(len(differences(old, one)) for one in listed)
    assert form.seconds(fastest) < form.seconds(first)
    assert len(listed) < len(grid(before, form))


@pytest.mark.more
def test_what_fits_is_found_for_405_billion_parameters():
    """On 1,024 GPUs."""
    from trainer.tools.planner.proposals import proposals

    raw = large(engine="mesh")
    before = plan(raw, THOUSAND)
    assert not before.fits
    result = proposals(load(raw), THOUSAND, before, most=1)
    assert result[0].plan.fits and len(result[0].changes) <= 6, result[0].comparison


def pretended(monkeypatch, raw, where: Cluster, needed: int = 2**30) -> Plan:
    """A plan whose ranks are not simulated, and take so many bytes of activations."""
    from trainer.tools.planner import extrapolate
    from trainer.tools.planner.fakes.memory_history import MemoryHistory
    from trainer.tools.planner.simulate import Trace

    def traces(jobs, devices):
        simulated.append(sum(len(workload.spec.blocks) for workload, _ in jobs))
        spans = np.array([[0, 2, needed, 0, 0]])
        consumers = (("activations", "activations of all"),)
        history = MemoryHistory((("step 1", 0), ("step 2", 1)), (), spans, consumers, np.zeros(2))
        return [Trace(rank, history, ()) for _, rank in jobs]

    monkeypatch.setattr(extrapolate, "simulate_all", traces)
    return plan(raw, where)


simulated: list[int] = []
"""The blocks of each pretended plan that would have been simulated."""


@pytest.mark.more
@pytest.mark.parametrize("engine", ["mesh", "deepspeed"])
@pytest.mark.parametrize("stages", [1, 8], ids=["data", "pipeline"])
def test_the_blocks_that_are_simulated_grow_neither_with_depth_nor_ranks(
    monkeypatch, engine, stages
):
    """8 billion parameters on 64 GPUs, 405 billion on 1,024, and four times as deep."""
    changes = {"pipeline": {"stages": stages}, "gradient_accumulation_steps": 64}
    changes["zero_optimization"] = {"stage": 1 if stages > 1 else 3}
    simulated.clear()
    for config, nodes in (
        (LLAMA_8B | {"num_hidden_layers": 64}, 8),
        (LLAMA_405B | {"num_hidden_layers": 128}, 128),
        (LLAMA_405B | {"num_hidden_layers": 512}, 512),
    ):
        raw = large(engine=engine, model={"config": config}) | changes
        pretended(monkeypatch, raw, replace(THOUSAND, nodes=nodes))
    assert simulated[0] and len(set(simulated)) == 1, simulated
