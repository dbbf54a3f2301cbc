"""Every optimizer and parameter of the table, by engine, against its library, or refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from inspect import Parameter, signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.messages import raises, shows
from tests.support.training import (
    GPT2,
    LLAMA,
    Case,
    assert_same,
    resume_by_engine,
    train_by_engine,
    train_plainly,
)
from trainer.config import load
from trainer.config.keys import OPTIMIZERS
from trainer.errors import ConfigError
from trainer.optim.builders import LACKS, MUON, ROWS, No, in_deepspeed, in_torch

COLUMNS = ("torch", "deepspeed", "offloaded")
CHOICES = {"adam_w_mode", "torch_adam"}
"""Parameters that choose the class."""
OTHER = {
    "AdamW": ["deepspeed.ops.adam.FusedAdam"],
    "Adam": ["torch.optim.AdamW", "deepspeed.ops.adam.FusedAdam"],
}
"""Classes that are built besides those of the rows."""

# each parameter at a value that is not its default
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "AdamW": [
        {"betas": [0.8, 0.9], "eps": 1e-2, "weight_decay": 0.2, "foreach": True},
        {"amsgrad": True, "eps": 1e-3, "fp32_optimizer_states": True},
        {
            "adam_w_mode": False,
            "torch_adam": True,
            "bias_correction": True,
            "eps": 1e-3,
            "weight_decay": 0.2,
        },
    ],
    "Adam": [
        {"betas": [0.8, 0.9], "eps": 1e-2, "weight_decay": 0.2, "foreach": True},
        {
            "adam_w_mode": False,
            "torch_adam": True,
            "eps": 1e-3,
            "weight_decay": 0.2,
            "amsgrad": True,
        },
        {
            "adam_w_mode": False,
            "eps": 1e-3,
            "bias_correction": True,
            "fp32_optimizer_states": False,
        },
    ],
    "Muon": [
        {"muon_lr": 5e-3, "eps": 1e-2, "weight_decay": 0.2, "betas": [0.8, 0.9], "momentum": 0.9},
        {
            "adjust_lr_fn": "match_rms_adamw",
            "nesterov": False,
            "ns_steps": 3,
            "foreach": True,
            "eps": 1e-2,
            "adam_lr": 5e-3,
        },
        {
            "amsgrad": True,
            "eps": 1e-3,
            "fp32_optimizer_states": True,
            "adam_w_mode": True,
            "torch_adam": True,
            "bias_correction": True,
            "ns_method": "gram",
        },
    ],
    "SGD": [
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.2},
        {"momentum": 0.9, "dampening": 0.3, "fused": True, "weight_decay": 0.2},
        {"maximize": True, "foreach": True},
    ],
    "Adagrad": [
        {"lr_decay": 0.1, "initial_accumulator_value": 0.5, "eps": 1e-2, "foreach": True},
        {"maximize": True, "fp32_optimizer_states": True, "weight_decay": 0.2, "eps": 1e-2},
    ],
    "RMSprop": [
        {"alpha": 0.8, "momentum": 0.5, "centered": True, "eps": 1e-2, "weight_decay": 0.2},
        {"maximize": True, "foreach": True, "eps": 1e-2},
    ],
    "NAdam": [
        {"betas": [0.8, 0.9], "momentum_decay": 0.01, "eps": 1e-2, "weight_decay": 0.2},
        {
            "decoupled_weight_decay": True,
            "weight_decay": 0.2,
            "maximize": True,
            "foreach": True,
            "eps": 1e-2,
        },
    ],
    "RAdam": [
        {"betas": [0.8, 0.9], "eps": 1e-2, "weight_decay": 0.2},
        {
            "decoupled_weight_decay": True,
            "weight_decay": 0.2,
            "maximize": True,
            "foreach": True,
            "eps": 1e-2,
        },
    ],
    "Adamax": [
        {"betas": [0.8, 0.9], "eps": 1e-2, "weight_decay": 0.2},
        {"maximize": True, "foreach": True},
    ],
    "Adadelta": [
        {"rho": 0.8, "eps": 1e-2, "weight_decay": 0.2},
        {"maximize": True, "foreach": True},
    ],
}
CASES = [(name, variant) for name, variants in VARIANTS.items() for variant in variants]
BUILT = [
    (name, engine)
    for engine in ("mesh", "accelerate", "deepspeed")
    for name in VARIANTS
    if (name, engine) != ("Muon", "deepspeed")
]
BY_ELEMENT = [case for case in CASES if case[0] != "Muon"]
"""Those whose updates don't need to know of other shards; Muon has tests of its own."""


def class_of(library: str) -> Any:
    module, _, name = library.rpartition(".")
    return getattr(import_module(module), name)


def known_to(library: str) -> Mapping[str, Parameter]:
    """Return the parameters of a class and their defaults; Muon's are those of its parts."""
    parts = [MUON, "trainer.optim.muon.Iteration", "torch.optim.AdamW"]
    known: dict[str, Parameter] = {}
    for part in parts if library == MUON else [library]:
        known = {**signature(class_of(part)).parameters, **known}
    return known


def live(name: str) -> set[str]:
    """Return an optimizer's parameters that are neither refused nor without effect."""
    return {key for key, rule in OPTIMIZERS[name].items() if not (rule.refused or rule.idle)}


def compiled(folder: Path, name: str, params: dict[str, Any], **more: Any) -> Any:
    path = folder / "config.json"
    path.write_text(json.dumps({"optimizer": {"type": name, "params": params}, **more}))
    return load(path)


# The table itself


def test_the_table_has_every_optimizer_and_a_class_or_a_reason_in_each_column():
    assert ROWS.keys() == OPTIMIZERS.keys()
    for row in ROWS.values():
        for column in COLUMNS:
            entry = getattr(row, column)
            assert (len(entry) > 30) if isinstance(entry, No) else isinstance(class_of(entry), type)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_parameter_is_taken_by_the_class_or_listed_as_lacking(name):
    libraries = {getattr(ROWS[name], column) for column in COLUMNS} | set(OTHER.get(name, []))
    for library in libraries:
        if isinstance(library, No):
            continue
        known, lacks = set(known_to(library)), set(LACKS.get(library, {}))
        assert lacks <= live(name)
        if library == "deepspeed.ops.adam.DeepSpeedCPUAdam":
            known |= {"adam_w_mode"}
        assert live(name) - CHOICES == (live(name) - CHOICES) & (known | lacks), library
        refused = {key for key in lacks if LACKS[library][key].refused}
        assert not (known - {"amsgrad"}) & refused


def test_every_parameter_is_tried():
    for name, row in ROWS.items():
        if not isinstance(row.torch, No):
            tried = {key for variant in VARIANTS[name] for key in variant}
            assert live(name) - {"lr"} == tried, name


@pytest.mark.parametrize(
    "name", [name for name in OPTIMIZERS if not isinstance(ROWS[name].deepspeed, No)]
)
def test_a_missing_parameter_has_the_default_of_the_class_that_deepspeed_makes(tmp_path, name):
    config = compiled(tmp_path, name, {})
    libraries = [ROWS[name].deepspeed, ROWS[name].offloaded]
    if name in ("Adam", "AdamW"):
        libraries[0] = "deepspeed.ops.adam.FusedAdam"
    for library in libraries:
        known = signature(class_of(library)).parameters
        for key, value in config.optimizer.params.items():
            if key in known:
                default = known[key].default
                assert value == (list(default) if isinstance(default, tuple) else default), (
                    library,
                    key,
                )
            else:
                assert key in LACKS[library]
    needed = {key for key, rule in OPTIMIZERS[name].items() if rule.kind in ("float", "list")}
    assert config.optimizer.params.keys() == needed
    assert {config.origins[f"optimizer.params.{key}"] for key in needed} == {"default"}


@pytest.mark.more
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_parameter_that_is_left_out_and_not_filled_in_is_one_thing_in_every_class_that_is_made(
    name,
):
    libraries = {getattr(ROWS[name], column) for column in COLUMNS} | set(OTHER.get(name, []))
    signatures = [known_to(library) for library in libraries if not isinstance(library, No)]
    for key in live(name) - CHOICES:
        if OPTIMIZERS[name][key].default is None:
            assert len({str(known[key].default) for known in signatures if key in known}) <= 1, key


def test_with_torch_adam_the_default_decay_is_that_of_the_class_that_it_asks_for(tmp_path):
    for name, params, decay in (
        ("AdamW", {"torch_adam": True}, 0.01),
        ("AdamW", {"torch_adam": True, "adam_w_mode": False}, 0.01),
        ("Adam", {"torch_adam": True}, 0.01),
        ("Adam", {"torch_adam": True, "adam_w_mode": False}, 0),
        ("Adam", {"torch_adam": False}, 0),
        ("AdamW", {}, 0),
    ):
        assert compiled(tmp_path, name, params).optimizer.params["weight_decay"] == decay


@pytest.mark.parametrize("params", [{"differentiable": True}, {"capturable": True}])
def test_what_no_step_here_can_do_is_refused_by_name(tmp_path, params):
    with pytest.raises(ConfigError, match=f"optimizer.params.{next(iter(params))}: saw true"):
        compiled(tmp_path, "RAdam", params)


# Refusals


ZERO = Case(engine="deepspeed", zero_stage=2)


def layout_of(case: Case) -> Any:
    from trainer.run.describe import _plain_layout

    shard = {"shard": 2} if case.zero_stage else {"replicate": 2}
    given = {
        "zero_stage": case.zero_stage,
        "offload_optimizer": case.offload_optimizer,
        "precision": case.precision,
    }
    return _plain_layout({**shard, **given})


@pytest.mark.parametrize("name", ["Lion", "Lamb", "MuAdam", "MuAdamW", "MuSGD"])
def test_what_is_not_of_pytorch_is_refused_by_every_engine_on_a_cpu(tmp_path, name):
    from trainer.engines import select

    with pytest.raises(ConfigError) as caught:
        select("auto", layout_of(ZERO), compiled(tmp_path, name, {}), "cpu")
    text = str(caught.value)
    assert all(
        f"engine {engine}: the optimizer {name}, ZeRO-2, on cpu" in text
        for engine in ("deepspeed", "mesh")
    )


@pytest.mark.parametrize(
    ("name", "params", "more", "case", "device", "chosen"),
    [
        ("SGD", {}, {}, ZERO, "cpu", "accelerate"),
        ("SGD", {}, {"zero_allow_untested_optimizer": True}, ZERO, "cpu", "deepspeed"),
        ("sgd", {}, {}, replace(ZERO, zero_stage=0), "cpu", "deepspeed"),
        ("Adagrad", {"weight_decay": 0.1}, {}, ZERO, "cpu", "accelerate"),
        (
            "Adagrad",
            {"weight_decay": 0.1},
            {"trainer": {"weight_decay_excludes": "nothing"}},
            ZERO,
            "cpu",
            "deepspeed",
        ),
        ("Adagrad", {}, {}, ZERO, "cpu", "deepspeed"),
        (
            "AdamW",
            {"amsgrad": True},
            {},
            replace(ZERO, offload_optimizer="cpu"),
            "cpu",
            "accelerate",
        ),
        ("AdamW", {"bias_correction": False}, {}, ZERO, "cpu", "deepspeed"),
        ("Lion", {}, {}, ZERO, "cuda", "deepspeed"),
        ("Lion", {}, {}, replace(ZERO, offload_optimizer="cpu"), "cpu", "deepspeed"),
    ],
)
def test_auto_takes_an_engine_that_runs_the_layout_and_the_optimizer(
    tmp_path, name, params, more, case, device, chosen
):
    from trainer.engines import select

    config = compiled(tmp_path, name, params, **more)
    assert select("auto", layout_of(case), config, device)[0] == chosen
    if chosen != "deepspeed":
        with raises(ConfigError, "engine deepspeed", f"optimizer {config.optimizer.type}"):
            select("deepspeed", layout_of(case), config, device)


@pytest.mark.parametrize(
    ("name", "more", "case", "device", "words"),
    [
        ("AdamW", {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}},
         replace(ZERO, zero_stage=3, offload_optimizer="cpu"), "cuda", "no learning-rate schedule"),
        ("Adagrad", {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
         replace(ZERO, zero_stage=1, precision="bfloat16"), "cpu", "Adagrad's first state"),
    ],
)  # fmt: skip
def test_what_deepspeed_would_get_wrong_is_refused(tmp_path, name, more, case, device, words):
    settings = compiled(tmp_path, name, {}, **more).settings
    assert words in in_deepspeed(settings, layout_of(case), device, False)


def test_what_changes_nothing_is_noted_by_name():
    settings = {
        "optimizer": {
            "type": "AdamW",
            "params": {"torch_adam": False, "fp32_optimizer_states": False},
        }
    }
    for result in (in_torch, in_deepspeed):
        notes = result(settings, layout_of(ZERO), "cpu", True).notes
        assert [note.split(" has")[0] for note in notes] == [
            "optimizer.params.fp32_optimizer_states",
            "optimizer.params.torch_adam",
        ]


@pytest.mark.more
def test_a_run_and_a_certificate_end_with_the_reasons_before_any_work(tmp_path):
    from tests.support.commands import train, write_job
    from tests.support.training import spec_of
    from trainer.certify.recording import record
    from trainer.certify.tiny_run import tiny_run
    from trainer.distributed.ranks import Ranks
    from trainer.engines import Machine

    job = write_job(tmp_path)
    result = train("--config", job, "optimizer.type=lion")
    assert result.code == 64, result.output
    shows(result.output, "engine mesh", "Lion", "ZeRO-2", "cpu")
    assert not (tmp_path / "runs").exists() or not list((tmp_path / "runs").glob("*/checkpoints/*"))
    with raises(ConfigError, "reference", "PyTorch"):
        tiny_run(str(job), ["optimizer.type=lion"], 1)
    small = tiny_run(str(job), ["optimizer.type=sgd", "trainer.engine=deepspeed"], 1)
    with pytest.raises(ConfigError, match="zero_allow_untested_optimizer"):
        machine = Machine(torch.device("cpu"), Ranks(0, 1))
        subject: Any = SimpleNamespace(spec=spec_of(LLAMA))
        sources: Any = None
        record(small, subject, sources, machine, tmp_path)


@pytest.mark.whole
@pytest.mark.parametrize(("name", "params"), CASES, ids=str)
def test_each_passes_its_certificate(pools, tmp_path, name, params):
    from tests.support.certify.certifying import certified
    from tests.support.certify.certifying import config as verified

    path = verified(tmp_path, "auto", 2)
    content = json.loads(Path(path).read_text())
    content["optimizer"] = {"type": name, "params": {"lr": 1e-3, **params}}
    Path(path).write_text(json.dumps(content))
    for passed, _, table in pools[2].run(certified, path=path, world_size=2, overrides=[]):
        assert passed, table


# Steps


def settings_of(name: str, params: dict[str, Any]) -> dict[str, Any]:
    return {"optimizer": {"type": name, "params": {"lr": 1e-2, "weight_decay": 0.0, **params}}}


def steps_on_shards(cases: list[tuple[str, dict[str, Any]]]) -> list[float]:
    """The largest difference of weights after three steps, sharded over two ranks, to PyTorch's own
    on whole tensors.

    Some parameters are whole, some on a mesh of their own, one has nothing on the second rank. Runs
    on each rank.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    from tests.support.training import plain_optimizer
    from trainer.optim.optimizer import optimizer_of

    line, square = init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (1, 2))
    where: dict[str, Any] = {
        "linear.weight": (line, [Shard(0)], (5, 3)),
        "linear.bias": (line, [Shard(0)], (1,)),
        "other.weight": (square, [Replicate(), Shard(0)], (4, 2)),
        "norm.weight": (None, None, (3,)),
    }
    worst = []
    for name, params in cases:
        torch.manual_seed(0)
        plain = torch.nn.ModuleDict()
        for path, (_, _, shape) in where.items():
            module, _, key = path.rpartition(".")
            if module not in plain:
                plain[module] = torch.nn.Module()
            plain[module].register_parameter(key, torch.nn.Parameter(torch.randn(shape)))
        own = {
            path: torch.nn.Parameter(
                distribute_tensor(p.detach().clone(), *where[path][:2])
                if where[path][0]
                else p.detach().clone()
            )
            for path, p in plain.named_parameters()
        }
        settings = settings_of(name, params)
        recipe = in_torch(settings, None, "cpu", True)
        named = [(f"model.{path}", p) for path, p in own.items()]
        ours = optimizer_of(recipe, named, {"linear.bias": 1, "norm.weight": 3}, {})
        theirs = plain_optimizer(Case(optimizer=settings["optimizer"]), plain)
        for _ in range(3):
            for path, p in plain.named_parameters():
                p.grad = torch.randn(p.shape)
                mine, (mesh, placements, _) = own[path], where[path]
                mine.grad = (
                    distribute_tensor(p.grad.clone(), mesh, placements) if mesh else p.grad.clone()
                )
            ours.step()
            theirs.step()
        worst.append(
            max(
                float(((own[path].full_tensor() if where[path][0] else own[path]) - p).abs().max())
                for path, p in plain.named_parameters()
            )
        )
    return worst


@pytest.mark.more
def test_every_parameter_steps_shards_as_pytorch_steps_the_whole(pools):
    for worst in pools[2].run(steps_on_shards, cases=BY_ELEMENT):
        assert {
            str(case): error
            for case, error in zip(BY_ELEMENT, worst, strict=True)
            if not error <= 1e-6
        } == {}


def trained(name: str, params: dict[str, Any], **layout: Any) -> Case:
    untested = {"zero_allow_untested_optimizer": True}
    return Case(optimizer=settings_of(name, params)["optimizer"], top=untested, **layout)


@pytest.mark.first("mesh-NAdam", "accelerate-Adagrad", "deepspeed-RMSprop")
@pytest.mark.parametrize(
    ("engine", "name"), [(engine, name) for name, engine in BUILT if name != "AdamW"]
)
def test_trains_as_one_process_does(pools, name, engine):
    stage = 2 if engine == "deepspeed" else 3
    case = trained(name, VARIANTS[name][0], engine=engine, zero_stage=stage)
    if (name, engine) == ("Adagrad", "deepspeed"):
        case = replace(case, weight_decay_excludes="nothing")
    reference = train_plainly(case)
    for outcome in pools[2].run(train_by_engine, case=case):
        # Muon multiplies in bfloat16: a gradient's last bit can move an entry by 2^-8
        assert_same(outcome, reference, 2e-4 if name == "Muon" else 4e-6)


WHOLE = [
    (name, variant, engine, stage)
    for name, variant in CASES
    for engine, stage in (
        ("mesh", 2),
        ("accelerate", 0),
        ("deepspeed", 0),
        ("deepspeed", 1),
        ("deepspeed", 3),
    )
    if (name, engine) != ("Muon", "deepspeed")
]


@pytest.mark.whole
@pytest.mark.parametrize(("name", "variant", "engine", "stage"), WHOLE, ids=str)
def test_every_parameter_trains_as_one_process_does(pools, name, variant, engine, stage):
    case = trained(name, variant, engine=engine, zero_stage=stage)
    if (name, engine) == ("Adagrad", "deepspeed"):
        case = replace(case, weight_decay_excludes="nothing")
    reference = train_plainly(case)
    for outcome in pools[2].run(train_by_engine, case=case):
        assert_same(outcome, reference, 4e-6)


OF_DEEPSPEED = [
    ("SGD", {"momentum": 0.9, "weight_decay": 0.2}, "cpu"),
    ("NAdam", {"eps": 1e-2, "weight_decay": 0.2}, "cpu"),
    ("Adagrad", {"eps": 1e-2, "weight_decay": 0.2}, "cpu"),
    ("Lion", {"betas": [0.8, 0.9], "weight_decay": 0.2}, "cpu"),
    ("AdamW", {"bias_correction": False, "eps": 1e-2, "weight_decay": 0.2}, "cpu"),
    ("AdamW", {"torch_adam": True, "eps": 1e-2, "weight_decay": 0.2}, "cpu"),
    ("AdamW", {"bias_correction": False, "eps": 1e-2, "weight_decay": 0.2}, "none"),
]


@pytest.mark.whole  # DeepSpeed compiles a kernel for each class of its own
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize(("name", "params", "offload"), OF_DEEPSPEED, ids=str)
def test_what_deepspeed_has_of_its_own_trains_as_one_process_does(
    pools, name, params, offload, stage
):
    case = trained(name, params, engine="deepspeed", zero_stage=stage, offload_optimizer=offload)
    reference = train_plainly(case)
    for outcome in pools[2].run(train_by_engine, case=case):
        assert_same(outcome, reference, 4e-6)


# What decays


DECAY = {
    "type": "AdamW",
    "params": {"lr": 1e-2, "betas": [0.9, 0.95], "eps": 1e-3, "weight_decay": 0.9},
}
LAYOUTS = {
    "mesh, zero3": Case("mesh", zero_stage=3, model=GPT2),
    "accelerate, ddp": Case("accelerate", zero_stage=0, model=GPT2),
    "deepspeed, zero0": Case("deepspeed", zero_stage=0, model=GPT2),
    "deepspeed, zero1": Case("deepspeed", zero_stage=1, model=GPT2),
    "deepspeed, zero3": Case("deepspeed", zero_stage=3, model=GPT2),
    "deepspeed, zero2, on the host": Case("deepspeed", zero_stage=2, offload_optimizer="cpu"),
    "deepspeed, pipeline": Case("deepspeed", zero_stage=1, pipeline=2),
    "mesh, pipeline": Case("mesh", zero_stage=2, pipeline=2),
    "deepspeed, tensor": Case(
        "deepspeed", zero_stage=1, tensor=2, model={**LLAMA, "attention_dropout": 0.0}
    ),
    "mesh, tensor": Case("mesh", zero_stage=0, tensor=2, model={**LLAMA, "attention_dropout": 0.0}),
}


@pytest.mark.first("deepspeed, zero3-norms_and_biases")
@pytest.mark.parametrize("excludes", ["norms_and_biases", "nothing"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_weight_decay_reaches_what_it_is_to_reach(pools, name, excludes):
    case = replace(LAYOUTS[name], optimizer=DECAY, weight_decay_excludes=excludes)
    reference = train_plainly(case)
    for outcome in pools[2].run(train_by_engine, case=case):
        assert_same(outcome, reference, 2e-6)


@pytest.mark.first("llama")
@pytest.mark.parametrize(
    "model", ["llama", "gpt2", "opt", "bloom", "mamba", "qwen2", "gpt_neox", "olmo", "stablelm"]
)
def test_what_is_spared_is_what_the_trainer_of_transformers_spares(model):
    from transformers import AutoConfig, AutoModelForCausalLM, Trainer

    from trainer.optim.decay import norms_and_biases

    config = AutoConfig.for_model(model)
    for key in ("num_hidden_layers", "n_layer", "num_layers"):
        if hasattr(config, key):
            setattr(config, key, 1)
    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(config)
    decayed = Trainer.get_decay_parameter_names(None, whole)
    assert set(norms_and_biases(whole)) == {name for name, _ in whole.named_parameters()} - set(
        decayed
    )


@pytest.mark.more
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (Case("deepspeed", zero_stage=2), Case("mesh", zero_stage=3)),
        (Case("mesh", zero_stage=3), Case(zero_stage=1)),
    ],
    ids=["deepspeed-mesh", "mesh-deepspeed"],
)
def test_a_checkpoint_of_all_decayed_goes_on_where_norms_are_not(pools, tmp_path, before, after):
    """Return a state as written before there were groups: with names, without group numbers."""
    params = {
        **DECAY["params"],
        "weight_decay": 1e-12,
    }  # there are groups, and they differ by nothing that shows
    before = replace(before, weight_decay_excludes="nothing", optimizer={**DECAY, "params": params})
    after = replace(after, optimizer=before.optimizer)
    for losses, weights in pools[2].run(
        resume_by_engine, before=before, after=after, folder=tmp_path
    ):
        assert losses[0] == pytest.approx(losses[1], rel=2e-6)
        assert all(
            torch.allclose(weights[0][name], weights[1][name], rtol=0, atol=2e-6)
            for name in weights[1]
        )


@pytest.mark.whole
@pytest.mark.parametrize(
    ("name", "engine"), BUILT, ids=[f"{engine}-{name}" for name, engine in BUILT]
)
def test_a_resumed_run_repeats_the_uninterrupted_one_bit_for_bit(pools, tmp_path, name, engine):
    case = trained(name, VARIANTS[name][0], engine=engine, zero_stage=2)
    if (name, engine) == ("Adagrad", "deepspeed"):
        case = replace(case, weight_decay_excludes="nothing")
    for losses, weights in pools[2].run(resume_by_engine, before=case, after=case, folder=tmp_path):
        assert losses[0] == losses[1]
        assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[1])


def optimizer_table() -> str:
    """Return the table of optimizers by engine, as Markdown."""
    lines = [
        "| optimizer | `mesh`, `accelerate` | `deepspeed` | `deepspeed`, optimizer on the host |",
        "| --- " * 4 + "|",
    ]
    reasons: dict[str, int] = {}

    def cell(entry: Any) -> str:
        if not isinstance(entry, No):
            return f"`{entry}`"
        return f"no [{reasons.setdefault(str(entry), len(reasons) + 1)}]"

    for name, row in ROWS.items():
        cells = [cell(entry) for entry in (row.torch, row.deepspeed, row.offloaded)]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", *(f"{number}. {why}" for why, number in reasons.items())])


def test_the_table_in_the_docs_is_the_one_that_is_built_from():
    assert (
        optimizer_table()
        in (Path(__file__).parent.parent.parent / "docs" / "optimizers.md").read_text()
    )
