"""`trainer.activation_checkpointing` "auto": the cheapest mode that fits, and who says so."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaMLP

from tests.support.commands import ROOT, run, write_job
from tests.support.messages import raises, shows
from trainer.certify.tiny_run import tiny_run
from trainer.config import RECOMPUTE, load, recomputing
from trainer.distributed.ranks import Ranks
from trainer.engines import Machine
from trainer.engines.devices import DEVICES, GIB
from trainer.errors import ConfigError, Problem
from trainer.layout import Recompute
from trainer.recipes.causal_lm.subject import LanguageSubject
from trainer.recipes.images.subject import ImageSubject
from trainer.run.prepare import Purpose, RecomputeChoice, prepare
from trainer.tools.planner import memory_check, recompute_modes
from trainer.tools.planner.cluster import RESERVED, Cluster, gib, recomputed
from trainer.tools.planner.extrapolate import Plan
from trainer.tools.planner.recompute_choice import choose_recompute
from trainer.tools.planner.recompute_modes import MODES, cheapest, reason

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
AUTO = f"{RECOMPUTE}=auto"
MODEL = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
}
PLANNED = {
    "layout": "",
    "engine": "mesh",
    "fits": True,
    "needed": 3 * GIB,
    "room": 4 * GIB,
    "recompute": {"mode": "selective", "reason": "selective, 3.00 GiB of 4.00 GiB; too much: ..."},
}


def machine(device: torch.device) -> Machine:
    return Machine(device, Ranks(0, 1))


def many_activations(tmp_path) -> Any:
    return load(
        write_job(
            tmp_path,
            engine="mesh",
            activation_checkpointing="auto",
            model={"config": MODEL},
            data={"sequence_length": 256},
        ),
        ["zero_optimization.stage=1", "train_batch_size=8", "gradient_accumulation_steps=1"],
    )


def small(room: float) -> Cluster:
    device = replace(DEVICES["h100-80gb"], name="small", memory=RESERVED + room)
    return Cluster(1, 1, device)


def test_the_modes_are_in_the_order_of_their_cost(tmp_path):
    config = many_activations(tmp_path)
    costs = []
    for mode in MODES:
        name, _, every = mode.partition(":")
        layout = SimpleNamespace(recompute=Recompute(name, int(every or 1)))  # type: ignore[arg-type]
        costs.append(recomputed(layout))  # type: ignore[arg-type]
        assert recomputing(config, mode, "").trainer.activation_checkpointing == mode
    assert costs == sorted(costs)


@pytest.mark.more
def test_with_less_memory_more_is_recomputed(tmp_path, monkeypatch):
    """The needs are simulated once; then the room shrinks from one to the next."""
    config = many_activations(tmp_path)
    simulated = {one.mode: one.plan for one in cheapest(config, small(1))}
    needs = [simulated[mode].needed for mode in MODES]
    assert needs[:4] == sorted(needs[:4], reverse=True)
    calls: list[str] = []

    def planned(config: Any, cluster: Cluster) -> Plan:
        calls.append(config.trainer.activation_checkpointing)
        return replace(simulated[calls[-1]], cluster=cluster)

    monkeypatch.setattr(recompute_modes, "planned", planned)
    for number, mode in enumerate(MODES):
        fits = needs[number]
        if fits >= min([*needs[:number], float("inf")]):
            continue  # a cheaper mode takes no more
        calls.clear()
        tried = cheapest(config, small(fits))
        assert calls == [*MODES[: number + 1]] == [one.mode for one in tried]  # each once
        text = reason(tried)
        shows(text, f"{mode}, {gib(fits)} of {gib(fits)}")
        assert ("too much" in text) is (number > 0)
        for cheaper in MODES[:number]:
            shows(text, f"{cheaper} {gib(simulated[cheaper].needed)}")
    tried = cheapest(config, small(min(needs) - 1))
    assert tried[-1].plan.needed == min(needs) and not tried[-1].plan.fits
    shows(reason(tried), "no mode fits")


def test_a_mode_that_cannot_run_is_left_out(tmp_path, monkeypatch):
    lacking = ConfigError(Problem("engine mesh", "it", "another"))

    def planned(config: Any, cluster: Cluster) -> Any:
        mode = config.trainer.activation_checkpointing
        if mode.startswith(refused):
            raise lacking
        return SimpleNamespace(needed=9.0, room=5.0, fits=mode == "full")

    monkeypatch.setattr(recompute_modes, "planned", planned)
    refused = "selective"
    tried = cheapest(many_activations(tmp_path), small(5))
    assert [one.mode for one in tried] == ["none", "full"]
    refused = "none"  # the config itself is wrong
    with raises(ConfigError, "engine mesh"):
        cheapest(many_activations(tmp_path), small(5))


def choice(tmp_path, monkeypatch, device: torch.device, *overrides: str, **options: Any) -> Any:
    """Return what is chosen, where the plan is PLANNED or an error."""
    plan = options.get("plan", PLANNED)

    def planned(*_: Any) -> Any:
        if isinstance(plan, Exception):
            raise plan
        return plan

    monkeypatch.setattr(memory_check, "planned", planned)
    monkeypatch.setattr(memory_check, "device_of", lambda machine: DEVICES["t4-16gb"])
    config = load(options.get("config", write_job(tmp_path)), [AUTO, *overrides])
    subject = options.get("kind", LanguageSubject)(
        SimpleNamespace(blocks=options.get("blocks", ("block",))), None, None
    )
    subject = SimpleNamespace(
        spec=subject.spec,
        is_named=subject.is_named,
        settled=lambda config: config,
        describe_to=lambda section: None,
    )
    composed = SimpleNamespace(config=config)
    return choose_recompute(subject, composed, "mesh", machine(device))  # type: ignore[arg-type]


def test_a_run_asks_the_plan_where_its_memory_is_checked(tmp_path, monkeypatch):
    planned = choice(tmp_path, monkeypatch, GPU)
    assert planned == RecomputeChoice("selective", PLANNED["recompute"]["reason"], PLANNED)  # type: ignore[index]
    assert choice(tmp_path, monkeypatch, CPU, "trainer.plan=warn") == planned
    for device, override in ((CPU, ()), (GPU, ("trainer.plan=off",))):
        mode, why, plan = choice(tmp_path, monkeypatch, device, *override)
        assert (mode, plan) == ("none", None)
        shows(why, "none, as", "CPU" if device is CPU else "trainer.plan")


def test_without_a_plan_it_is_the_safe_one(tmp_path, monkeypatch):
    handed_in = {
        "config": ROOT / "examples" / "digits.json",
        "kind": ImageSubject,
    }
    override = "trainer.model.name_or_path=null"
    mode, why, plan = choice(tmp_path, monkeypatch, GPU, override, **handed_in)
    assert (mode, plan) == ("full", None)
    shows(why, "does not name all", "no plan")
    mode, why, _ = choice(tmp_path, monkeypatch, GPU, override, blocks=(), **handed_in)
    assert mode == "none"
    shows(why, "no blocks")
    mode, why, _ = choice(tmp_path, monkeypatch, GPU, plan=ValueError("more than 1 seconds"))
    assert mode == "full"
    shows(why, "more than 1 seconds")


def test_a_prepared_run_has_one_mode_and_its_plan(tmp_path, monkeypatch):
    """All that sees a config or a layout sees the mode; its memory is not planned again."""
    engines = []

    def chosen(subject: Any, composed: Any, engine: str, machine: Machine) -> RecomputeChoice:
        engines.append(engine)
        return RecomputeChoice("selective:2", "selective:2, for its own reason", plan)

    config = load(write_job(tmp_path), [AUTO, "trainer.plan=warn"])
    plan: dict[str, Any] = {**PLANNED, "engine": "deepspeed"}
    prepared = prepare(config, machine(CPU), purpose=Purpose(False, choose_recompute=chosen))
    assert engines == [prepared.engine.name]
    assert prepared.layout.recompute == Recompute("selective", 2)
    assert prepared.config.trainer.activation_checkpointing == "selective:2"
    shows(prepared.config.origins[RECOMPUTE], "auto: selective:2, for", "its own reason")
    (note,) = [note for note in prepared.config.notes if RECOMPUTE in note]
    shows(note, '"auto"', "for its own reason")
    monkeypatch.setattr(memory_check, "planned", lambda *_, **__: {"fits": True})
    device = DEVICES["t4-16gb"]
    assert memory_check.simulated(prepared, machine(CPU), device) == {"fits": True}
    plan |= {"layout": prepared.layout.describe(), "engine": prepared.engine.name}
    assert memory_check.simulated(prepared, machine(CPU), device) is plan


def test_blocks_that_differ_when_they_are_computed_again_are_kept(tmp_path, monkeypatch):
    """Where the plan takes a mode that the model can't have, no other can be had either."""

    def in_backward(mlp: LlamaMLP, hidden: torch.Tensor) -> torch.Tensor:
        return plain(mlp, hidden * (2 if torch._C._current_graph_task_id() >= 0 else 1))

    plain = LlamaMLP.forward
    monkeypatch.setattr(LlamaMLP, "forward", in_backward)
    chosen = RecomputeChoice("selective", "selective, for its own reason", PLANNED)
    purpose = Purpose(False, choose_recompute=lambda *_: chosen)
    prepared = prepare(load(write_job(tmp_path), [AUTO]), machine(CPU), purpose=purpose)
    assert prepared.layout.recompute.mode == "none" and prepared.predicted is None
    shows(prepared.config.origins[RECOMPUTE], "auto: none:", "computed again")


@pytest.mark.more
def test_a_run_of_two_ranks_says_which_and_why(tmp_path):
    """With a limit to keep: the plan of each mode, by a process of its own, on what the host has.
    The run's files name the mode; the same config as it was given is there, too."""
    path = write_job(tmp_path, activation_checkpointing="auto", plan="warn", engine="mesh")
    result = run("meshloom", "train", "--config", path, "--processes", "2")
    assert result.code == 0, result.output
    (note,) = [line for line in result.lines if RECOMPUTE in line]
    assert note.startswith(f'note    {RECOMPUTE} "auto": none, 4.') and "MiB of" in note
    assert any(line.startswith("memory  4.") for line in result.lines), result.output
    folder = tmp_path / "runs" / "job"
    written = json.loads((folder / "config.json").read_text())
    assert written["trainer"]["activation_checkpointing"] == "none"
    assert json.loads((folder / "plan.json").read_text())["recompute"]["mode"] == "none"
    environment = json.loads((folder / "environment.json").read_text())
    assert environment["request"]["trainer"]["activation_checkpointing"] == "auto"
    assert environment["layout"]["recompute"]["mode"] == "none"


@pytest.mark.more
def test_the_plan_shows_the_mode(tmp_path):
    path = write_job(tmp_path, activation_checkpointing="auto", engine="mesh")
    numbers = "peak=300TFLOPS,bandwidth=2TB/s,link=100GB/s"
    device = f"memory={RESERVED + 1:.0f},{numbers}"
    arguments = "plan", "--config", path, "--gpus", "2", "--device", device
    result = run("meshloom", *arguments)
    assert result.code == 1, result.output
    (line,) = [line for line in result.lines if line.startswith("note    ") and RECOMPUTE in line]
    shows(line, '"auto": offload, which needs', "no mode fits", "selective:2 4.")
    assert "recompute offload" in next(line for line in result.lines if "layout" in line)


def test_a_certificate_is_of_a_definite_mode(tmp_path):
    """On a tiny copy every mode fits, so that the plan of it would always take none."""
    tiny = tiny_run(write_job(tmp_path), [AUTO], 2)
    assert tiny.layout.recompute.mode == "full"
    assert tiny.own.layout.recompute.mode == "full"
    (note,) = [note for note in tiny.changes if RECOMPUTE in note]
    shows(note, '"full"', '"auto"')
    assert tiny.with_blocks(["block"]) is tiny
    other = tiny.with_blocks([])
    assert other.layout.recompute.mode == "none" == other.config.trainer.activation_checkpointing
    (last,) = [note for note in other.changes if RECOMPUTE in note]
    shows(last, "no blocks")
    named = tiny_run(write_job(tmp_path), [], 2)
    assert named.layout.recompute.mode == "none" and named.with_blocks([]) is named
