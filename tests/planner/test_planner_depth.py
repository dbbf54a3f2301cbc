"""What is drawn on from a few blocks is what all of them take."""

from __future__ import annotations

import json
import multiprocessing
from typing import Any

import pytest

from tests.support import bases
from tests.support.certify.certifying import DEEPSEEK
from tests.support.models.stateful import STATEFUL
from tests.support.training import spec_of
from trainer.config import load
from trainer.engines.devices import DEVICES
from trainer.models.tiny import LARGEST
from trainer.probes.questions import stages
from trainer.tools.planner import extrapolate as planner
from trainer.tools.planner.cluster import Cluster
from trainer.tools.planner.depths import are_first, repetition
from trainer.tools.planner.fakes.ledger import Ledger
from trainer.tools.planner.from_config import model_on, planned

MODEL = dict(
    model_type="llama", hidden_size=64, intermediate_size=160, num_attention_heads=4, vocab_size=256
)
CASES: dict[str, dict[str, Any]] = {
    "mesh, zero3": dict(engine="mesh", stage=3),
    "mesh, zero2, full": dict(engine="mesh", stage=2, recompute="full"),
    "mesh, two stages, full": dict(engine="mesh", stage=2, recompute="full", stages=2),
    "mesh, two stages": dict(engine="mesh", stage=2, stages=2),
    # the fullest moment of the first step is another with few blocks
    "mesh, zero3, full": dict(engine="mesh", stage=3, recompute="full", blocks=18, accumulation=1),
    # with few blocks at the loss, with many when all gradients are there
    "mesh, zero3, large vocabulary": dict(
        engine="mesh", stage=3, recompute="full", blocks=30, accumulation=1, vocabulary=8192
    ),
    "deepspeed, zero3": dict(engine="deepspeed", stage=3),
    "deepspeed, two stages": dict(engine="deepspeed", stage=1, stages=2),
}


def config_of(model: dict[str, Any], **trainer: Any) -> dict[str, Any]:
    """A run of a model under ZeRO-3, with these keys of the section `trainer`."""
    return {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "trainer": {
            "steps": 100,
            "data": {"sequence_length": 64},
            "model": {"config": model},
            **trainer,
        },
    }


@pytest.mark.more
@pytest.mark.parametrize("name", CASES)
def test_a_line_through_two_depths(tmp_path, monkeypatch, name):
    case = CASES[name]
    blocks = case.get("blocks", 12)
    model = MODEL | {"num_hidden_layers": blocks, "tie_word_embeddings": False}
    model |= {"vocab_size": case.get("vocabulary", 256)}
    recompute = case.get("recompute", "none")
    config = config_of(model, engine=case["engine"], activation_checkpointing=recompute)
    config |= {
        "gradient_accumulation_steps": case.get("accumulation", 2),
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": case["stage"]},
        **({"pipeline": {"stages": case["stages"]}} if "stages" in case else {}),
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    cluster = Cluster(1, 4, DEVICES["h100-80gb"])
    drawn = planned(load(path), cluster)
    monkeypatch.setattr(planner, "depths_of", lambda *_: None)
    whole = planned(load(path), cluster)
    assert len(drawn.workload.spec.blocks) == blocks
    for line, exact in zip(drawn.roles, whole.roles, strict=True):
        for peak, whole_peak in zip(line.peaks, exact.peaks, strict=True):
            if peak.phase == "step 1":  # it never takes more than the second, which counts
                assert peak.size <= 1.01 * line.peak.size
                continue
            assert peak.size == pytest.approx(whole_peak.size, rel=1e-2), peak.phase
            for name, size in peak.by_consumer.items():
                assert size <= peak.by_kind[name.partition(" of ")[0]]
        assert [(s.name, s.axes, s.count, s.size) for s in line.sent] == [
            (s.name, s.axes, pytest.approx(s.count), pytest.approx(s.size)) for s in exact.sent
        ]


@pytest.mark.parametrize(
    ("kinds", "repeats"),
    [
        ("aaaa", (0, 1)),
        ("aabaabaab", (0, 3)),
        ("ddeeee", (2, 1)),
        ("daabaab", (1, 3)),
        ("abcd", (0, 4)),
    ],
)
def test_where_blocks_repeat(kinds, repeats):
    assert repetition([((kind, (2, 2), True),) for kind in kinds]) == repeats


GROUPS = {
    "groups of three": STATEFUL["lfm2"]
    | {"num_hidden_layers": 18, "layer_types": ["conv", "conv", "full_attention"] * 6}
    | {"hidden_size": 512, "intermediate_size": 1536},
    "dense ones first": DEEPSEEK
    | {"num_hidden_layers": 17, "first_k_dense_replace": 2, "vocab_size": 61},
}


@pytest.mark.more
@pytest.mark.parametrize("name", GROUPS)
def test_a_line_through_repetitions(monkeypatch, name):
    config = config_of(GROUPS[name], activation_checkpointing="full")
    config["bf16"] = {"enabled": True}
    simulated: list[int] = []
    plain = planner.simulate_all

    def counted(jobs: Any, devices: int) -> Any:
        simulated.extend(len(workload.spec.blocks) for workload, _ in jobs)
        return plain(jobs, devices)

    monkeypatch.setattr(planner, "simulate_all", counted)
    cluster = Cluster(1, 4, DEVICES["h100-80gb"])
    drawn = planned(load(config), cluster)
    monkeypatch.setattr(planner, "depths_of", lambda *_: None)
    whole = planned(load(config), cluster)
    few, more, every = simulated
    assert few < more and few + more < every
    for line, exact in zip(drawn.roles, whole.roles, strict=True):
        assert line.peak.size == pytest.approx(exact.peak.size, rel=1e-3)
        assert line.sent == exact.sent


def test_all_blocks_are_simulated_if_others_come_with_them():
    """Each block of Gemma 4 has a part of a row of one table."""
    gemma = bases.FAMILIES["gemma4"]["text_config"] | {"hidden_size_per_layer_input": 8}
    for config, expected in ((gemma | {"model_type": "gemma4_text"}, False), (MODEL, True)):
        spec = spec_of(config | {"num_hidden_layers": 4})
        assert spec.tiny.first_blocks is not None
        few = spec.tiny.first_blocks(2)
        assert are_first(few, spec, spec.build()) is expected


def test_what_a_plan_tries_with_values_is_tiny(monkeypatch):
    """Nothing of a large model is there but its shapes: not of few of its blocks, either."""
    values: list[int] = []
    real = stages.materialise

    def counted(model: Any, *arguments: Any, **options: Any) -> None:
        values.append(sum(parameter.numel() for parameter in model.parameters()))
        real(model, *arguments, **options)

    monkeypatch.setattr(stages, "materialise", counted)
    large = MODEL | {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32}
    config = config_of(large) | {"gradient_accumulation_steps": 4, "pipeline": {"stages": 2}}
    del config["zero_optimization"]
    source = model_on(load(config), Cluster(1, 4, DEVICES["h100-80gb"]))
    stages.check_cut(source.with_blocks(2, 2).spec, 2)
    assert values and max(values) <= LARGEST


def test_whole_parameters_are_on_the_host_while_the_model_is_built():
    model = MODEL | {"hidden_size": 512, "num_hidden_layers": 1}
    plan = planned(load(config_of(model, engine="mesh")), Cluster(8, 8, DEVICES["h100-80gb"]))
    built = next(peak for peak in plan.fullest.peaks if peak.phase == "build")
    assert 0 < built.size < plan.loaded


@pytest.mark.more
def test_what_is_simulated_does_not_grow_with_the_ranks(tmp_path, monkeypatch):
    """DeepSpeed's ZeRO-3 makes a view of each rank's part of each parameter: minutes for a thousand
    ranks.
    """
    counts = multiprocessing.Array("q", 2)
    plain = Ledger.__torch_dispatch__
    config = config_of(MODEL | {"num_hidden_layers": 2}, engine="deepspeed")
    for number, nodes in enumerate((1, 64)):

        def counted(self: Any, *arguments: Any, number: int = number) -> Any:
            counts[number] += 1  # in the process that pretends to be a rank
            return plain(self, *arguments)

        monkeypatch.setattr(Ledger, "__torch_dispatch__", counted)
        planned(load(config), Cluster(nodes, 8, DEVICES["h100-80gb"]))
    assert 0 < counts[1] < 1.2 * counts[0], counts[:]


@pytest.mark.more
def test_deepspeed_loops_over_ranks():
    """What `trainer/tools/planner/fakes/patches.py` is for: it can go when neither function does."""
    import inspect

    from deepspeed.runtime.comm import coalesced_collectives
    from deepspeed.runtime.zero import partition_parameters

    gathers = inspect.getsource(partition_parameters).split("class AllGatherCoalescedHandle", 1)[1]
    assert "for rank in range(self.world_size)" in gathers.split("\nclass ", 1)[0]
    assert "for rank in range(world_sz)" in inspect.getsource(coalesced_collectives)
