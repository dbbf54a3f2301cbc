"""`trainer.adapter`: LoRA by PEFT under every engine and layout, against PEFT's own model in one
process.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from tests.support.certify.certifying import certified
from tests.support.certify.faults import gradients, updates
from tests.support.commands import ROOT, write_job
from tests.support.layouts import (
    CONTEXT,
    DATA,
    FAMILIES,
    HSDP,
    LLAMA_4,
    SECOND,
    SPLIT,
    SPLIT_4,
    STAGES,
    STAGES_4,
    TIED,
    by_engine,
)
from tests.support.messages import raises, shows
from tests.support.models.lora import LORA, UNTIED, job, train_here, write_base
from tests.support.training import (
    GPT2,
    LLAMA,
    Case,
    assert_same,
    spec_in,
    spec_of,
    train_by_engine,
    train_plainly,
)
from trainer.config.sections.adapter import AdapterSection
from trainer.errors import ConfigError
from trainer.models.finetuning import lora, lora_weights
from trainer.models.finetuning.lora import adapted
from trainer.models.finetuning.lora_weights import made_up
from trainer.models.materialise import materialise
from trainer.models.opened import opened
from trainer.models.spec import ModelFiles

DRY = {"r": 4, "alpha": 16}
SOME = {"r": 2, "alpha": 6, "dropout": 0.1, "targets": ["q_proj", "down_proj"], "rslora": True}
HEAD = SOME | {"modules_to_save": ["lm_head", "model.norm"]}
LAYOUTS = {
    "one rank": replace(DATA, world_size=1, adapter=LORA),
    "ddp": replace(DATA, zero_stage=0, adapter=LORA),
    "zero1": replace(DATA, zero_stage=1, adapter=LORA),
    "zero2": replace(DATA, zero_stage=2, adapter=LORA),
    "zero3": replace(DATA, zero_stage=3, adapter=LORA),
    "zero2, a head that is trained": replace(DATA, zero_stage=2, model=UNTIED, adapter=HEAD),
    "zero3, a head that is trained": replace(DATA, zero_stage=3, model=UNTIED, adapter=HEAD),
    "zero3, gpt2, biases, full": replace(
        DATA, zero_stage=3, model=GPT2, recompute="full", adapter=LORA | {"bias": "lora_only"}
    ),
    "zero2, dora": replace(DATA, zero_stage=2, adapter=SOME | {"dora": True}),
    "zero3, dora": replace(DATA, zero_stage=3, adapter=SOME | {"dora": True}),
    "zero3, full": replace(DATA, zero_stage=3, adapter=LORA, recompute="full"),
    "zero3, selective": replace(DATA, zero_stage=3, adapter=LORA, recompute="selective"),
    "zero3, tiled, MLPs alone": replace(  # no gradient enters the first block
        DATA, zero_stage=3, tile=4, adapter=DRY | {"targets": ["up_proj", "down_proj"]}
    ),
    "zero3, tiled, selective": replace(
        DATA, zero_stage=3, tile=4, recompute="selective", adapter=DRY
    ),
    "zero3, all on the host": replace(
        DATA, offload_optimizer="cpu", offload_param="cpu", zero_stage=3, adapter=LORA
    ),
    "pipeline": replace(STAGES, adapter=LORA),
    "pipeline, a head that is trained": replace(
        STAGES, model={**LLAMA_4, "tie_word_embeddings": False}, adapter=HEAD
    ),
    "pipeline, ZBVZeroBubble": replace(STAGES, schedule="ZBVZeroBubble", adapter=LORA),
    "tensor": replace(SPLIT, adapter=DRY),
    "tensor x zero2": replace(
        SPLIT_4, zero_stage=2, adapter=DRY | {"targets": ["q_proj", "o_proj", "down_proj"]}
    ),
    "tensor x zero3, biases": replace(
        SPLIT_4, zero_stage=3, model=FAMILIES["llama, biases"], adapter=DRY | {"bias": "all"}
    ),
    "pipeline x tensor": replace(
        SPLIT_4, pipeline=2, model=TIED | {"num_hidden_layers": 4}, adapter=DRY
    ),
    "hsdp": replace(HSDP, zero_stage=3, adapter=LORA),
    "context": replace(CONTEXT, adapter=LORA),
    "context x zero3, full": replace(CONTEXT, zero_stage=3, recompute="full", adapter=LORA),
    "hpZ": replace(SECOND, adapter=LORA),
    "hpZ, full": replace(SECOND, adapter=DRY, recompute="full"),
    "pipeline x zero2": replace(STAGES_4, zero_stage=2, adapter=LORA),
    "pipeline x zero3": replace(STAGES_4, zero_stage=3, adapter=LORA),
}
CASES = {
    name: case
    for name, case in by_engine(LAYOUTS).items()
    if not name.startswith("deepspeed-tensor")
}


@pytest.mark.first("deepspeed-zero3")
@pytest.mark.parametrize("name", CASES)
def test_it_trains_as_peft_does_in_one_process(pools, name):
    case = CASES[name]
    reference = train_plainly(case)
    for outcome in pools[case.world_size].run(train_by_engine, case=case):
        assert_same(outcome, reference, 2e-6)


# Whole runs


IDS = torch.arange(1, 13)[None]


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS, use_cache=False).logits


RUNS = {
    "mesh-3": ("mesh", 3, {}, 2),
    "mesh-2": ("mesh", 2, {}, 2),
    "accelerate-2, bias": ("accelerate", 2, {"bias": "lora_only"}, 2),
    "deepspeed-2": ("deepspeed", 2, {}, 2),
    "deepspeed-3": ("deepspeed", 3, {}, 2),
    "accelerate-3, dora": ("accelerate", 3, {"dora": True}, 2),
    "mesh-3, gpt2": ("mesh", 3, {"bias": "lora_only"}, 2),
    "mesh-0, pipeline": ("mesh", 0, {"modules_to_save": ["lm_head"], "rslora": True}, 2),
    "mesh-3, deepseek": ("mesh", 3, {"dropout": 0.0}, 2),
    "deepspeed-3, deepseek, MLPs alone": (
        *("deepspeed", 3),
        {"targets": ["gate_proj", "up_proj", "down_proj"], "rslora": True},
        2,
    ),
}


@pytest.mark.first("mesh-3")
@pytest.mark.parametrize("name", RUNS)
def test_what_is_saved_opens_in_peft_with_the_same_logits(pools, tmp_path, name):
    from peft import AutoPeftModelForCausalLM
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    engine, stage, more, world_size = RUNS[name]
    wide = {"vocab_size": 4096, "tie_word_embeddings": True}
    changes = {"gpt2": {**GPT2, **wide}, "deepseek": DEEPSEEK}
    of = next((of for key, of in changes.items() if key in name), {})
    base = write_base(tmp_path / "base", **of)
    before = {file.name: file.read_bytes() for file in base.iterdir()}
    path = job(tmp_path, base, engine, stage, LORA | {"merge": True} | more)
    stages = ["pipeline.stages=2"] if "pipeline" in name else []
    losses = pools[world_size].run(train_here, path=path, overrides=stages)
    assert not isinstance(losses[0], str), losses[0]
    assert losses[0] == losses[1] and losses[0][-1] < losses[0][0]
    run = tmp_path / "runs" / "job"
    model = AutoPeftModelForCausalLM.from_pretrained(run / "final")
    plain = logits_of(AutoModelForCausalLM.from_pretrained(base))
    logits = logits_of(model)
    assert (logits - plain).abs().max() > 0.05  # it has learnt something
    merged = logits_of(AutoModelForCausalLM.from_pretrained(run / "final-merged"))
    torch.testing.assert_close(merged, logits, rtol=0, atol=2e-5 * float(logits.abs().max()))
    torch.testing.assert_close(
        logits_of(model.merge_and_unload()), merged, rtol=0, atol=1e-5 * float(logits.abs().max())
    )
    assert {file.name: file.read_bytes() for file in base.iterdir()} == before
    saved = run / "checkpoints" / "step-000004" / "model"
    names = {file.name for file in saved.glob("*.safetensors*")}
    assert (
        names
        == {"adapter_model.safetensors"}
        == {file.name for file in (run / "final").glob("*.safetensors*")}
    )
    final = load_file(run / "final" / "adapter_model.safetensors")
    assert all(
        torch.equal(value, final[key])
        for key, value in load_file(saved / "adapter_model.safetensors").items()
    )
    assert not any(".q_proj.weight" in key or "embed_tokens" in key for key in final)


CERTIFIED = {
    "zero2": 2,
    "zero3": 2,
    "fsdp": 2,
    "hsdp": 4,
    "pipeline_zero2": 4,
    "tensor_zero2": 4,
}


@pytest.mark.more
@pytest.mark.parametrize("name", CERTIFIED)
def test_what_ships_is_certified_with_an_adapter(pools, tmp_path, name):
    base, world_size = write_base(tmp_path / "base", attention_dropout=0.0), CERTIFIED[name]
    dropout = 0.0 if "tensor" in name else 0.1
    overrides = [
        f"trainer.model.name_or_path={base}",
        f"trainer.adapter.dropout={dropout}",
        *("trainer.adapter.r=4", "trainer.adapter.merge=true"),
    ]
    path = str(ROOT / "ds_configs" / f"{name}.json")
    for passed, _, table in pools[world_size].run(
        certified, path=path, world_size=world_size, overrides=overrides
    ):
        assert passed, table


DEEPSEEK: dict[str, Any] = {
    **{"model_type": "deepseek_v3", "num_hidden_layers": 3, "num_key_value_heads": 4},
    **{"first_k_dense_replace": 1, "n_routed_experts": 4, "n_shared_experts": 1},
    **{"num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 2, "topk_group": 1},
    **{"q_lora_rank": 16, "kv_lora_rank": 16, "v_head_dim": 8, "head_dim": 8},
    **{"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "attention_dropout": 0.0},
}
"""A dense layer, and two with experts and a shared MLP."""


@contextmanager
def merged_without_shared_mlps() -> Iterator[None]:
    own = lora_weights.MergedWeights.read

    def read(self: Any, name: str) -> Any:
        return self.base.read(name) if "shared_experts" in name else own(self, name)

    with mock.patch.object(lora_weights.MergedWeights, "read", read):
        yield


@contextmanager
def merged_by_another_factor() -> Iterator[None]:
    own = lora_weights.MergedWeights.read

    def read(self: Any, name: str) -> Any:
        value, base = own(self, name), self.base.read(name)
        return base if value is None or base is None else (base + 0.9 * (value - base))

    with mock.patch.object(lora_weights.MergedWeights, "read", read):
        yield


@contextmanager
def saved_with_names_that_peft_reads_as_experts() -> Iterator[None]:
    def plain(build: Any, config: Any, targets: Any, *_: Any) -> Any:
        return replace(config, target_modules=list(targets), inference_mode=True)

    with mock.patch.object(lora, "loadable", plain):
        yield


def certified_with(fault: str, **arguments: Any) -> tuple[bool, str, str]:
    """Runs on each rank: `certified`, with a fault in what is written at the end."""
    with globals()[fault]() if fault else nullcontext():
        return certified(**arguments)


FAULTS = {
    "": "",
    "merged_without_shared_mlps": "merged",
    "merged_by_another_factor": "merged",
    "saved_with_names_that_peft_reads_as_experts": "saved adapter",
}


@pytest.mark.more
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_what_is_saved_or_merged_is_caught(pools, tmp_path, fault):
    base = write_base(tmp_path / "base", **DEEPSEEK)
    overrides = [
        f"trainer.model.name_or_path={base}",
        *("trainer.adapter.r=4", "trainer.adapter.merge=true", "trainer.engine=mesh"),
    ]
    path = str(ROOT / "ds_configs" / "zero3.json")
    for passed, first, table in pools[2].run(
        certified_with, fault=fault, path=path, world_size=2, overrides=overrides
    ):
        assert first == FAULTS[fault] and passed == (not fault), table
        assert "merged " in table


@pytest.mark.more
def test_a_run_goes_on_from_adapters_alone_and_only_with_their_base(pools, tmp_path):
    from safetensors.torch import load_file

    base = write_base(tmp_path / "base")
    path = job(tmp_path, base, "mesh", 3, LORA)
    whole = pools[2].run(train_here, path=path)[0]
    assert not isinstance(whole, str), whole
    saved = tmp_path / "runs" / "job" / "checkpoints" / "step-000002"
    state = [name for file in saved.glob("optimizer/*.safetensors") for name in load_file(file)]
    assert state and all("lora_" in name for name in state)
    final = load_file(tmp_path / "runs" / "job" / "final" / "adapter_model.safetensors")
    again = pools[2].run(train_here, path=path, resume=str(saved))[0]
    assert again == whole[2:]
    resumed = load_file(tmp_path / "runs" / "job-2" / "final" / "adapter_model.safetensors")
    assert all(torch.equal(value, final[name]) for name, value in resumed.items())
    other = ["trainer.engine=deepspeed", "zero_optimization.stage=2"]
    elsewhere = pools[2].run(train_here, path=path, overrides=other, resume=str(saved))[0]
    torch.testing.assert_close(elsewhere, whole[2:], rtol=1e-5, atol=0)

    start = [
        f"trainer.adapter.path={tmp_path / 'runs' / 'job' / 'final'}",
        "optimizer.params.lr=1e-12",
    ]
    assert not isinstance(pools[2].run(train_here, path=path, overrides=start)[0], str)
    started = load_file(tmp_path / "runs" / "job-4" / "final" / "adapter_model.safetensors")
    assert all(
        torch.allclose(value, final[name], rtol=0, atol=1e-9) for name, value in started.items()
    )

    wrong = {
        "trainer.adapter.r=8": "adapter.r 4 -> 8",
        "trainer.adapter.alpha=8": "adapter.alpha 16",
        'trainer.adapter.targets=["q_proj"]': "adapter.targets",
    }
    for override, message in wrong.items():
        error = pools[2].run(train_here, path=path, overrides=[override], resume=str(saved))[0]
        assert isinstance(error, str) and message in error, error
    write_base(tmp_path / "base", seed=1)
    error = pools[2].run(train_here, path=path, resume=str(saved))[0]
    assert isinstance(error, str)
    assert "trainer.model.name_or_path" in error
    shows(error, "base of the")


@pytest.mark.more
def test_dropout_of_an_adapter_that_is_not_replayed_is_caught(pools, tmp_path):
    base = write_base(tmp_path / "base", attention_dropout=0.0)
    overrides = [
        *(
            f"trainer.model.name_or_path={base}",
            "trainer.adapter.dropout=0.3",
            "trainer.adapter.r=4",
        ),
        *("trainer.activation_checkpointing=full", "trainer.engine=accelerate"),
    ]
    path = str(ROOT / "ds_configs" / "fsdp.json")
    for fault, passes in ((None, True), (gradients.dropout_not_replayed, False)):
        for passed, first, table in pools[2].run(
            certified, path=path, world_size=2, overrides=overrides, fault=fault
        ):
            assert passed == passes, table
            assert first == ("" if passes else "gradient"), table
            assert passes or "lora_" in table.splitlines()[-1], table


@pytest.mark.more
@pytest.mark.parametrize(
    "fault, check", [(gradients.norm_of_one_rank, "norm"), (updates.no_update, "update")]
)
def test_a_planted_fault_is_caught_with_an_adapter(pools, tmp_path, fault, check):
    base = write_base(tmp_path / "base", attention_dropout=0.0)
    overrides = [f"trainer.model.name_or_path={base}", "trainer.adapter.r=4", "trainer.engine=mesh"]
    path = str(ROOT / "ds_configs" / "zero3.json")
    for passed, first, table in pools[2].run(
        certified, path=path, world_size=2, overrides=overrides, fault=fault
    ):
        assert not passed
        assert first == check, table


def dtypes_of(case: Case) -> dict[str, str]:
    """Runs on each rank of a pool."""
    import torch.distributed as dist

    from tests.support.training import build

    engine = build(case, dist.get_rank())
    results = {
        entry.name: str(entry.dtype) for entry in engine.state_tensors() if entry.key == "weight"
    }
    engine.close()
    return results


@pytest.mark.more
@pytest.mark.parametrize(
    "engine, learned", [("mesh", "torch.float32"), ("deepspeed", "torch.bfloat16")]
)
def test_the_base_is_kept_in_the_precision_that_it_computes_in(pools, engine, learned):
    case = replace(
        DATA, engine=engine, zero_stage=3, precision="bfloat16", adapter=LORA | {"dropout": 0.0}
    )
    case = replace(case, model=LLAMA | {"attention_dropout": 0.0})
    for result in pools[2].run(dtypes_of, case=case):
        assert {dtype for name, dtype in result.items() if "lora_" not in name} == {
            "torch.bfloat16"
        }
        assert {dtype for name, dtype in result.items() if "lora_" in name} == {learned}
    reference = train_plainly(case)
    for outcome in pools[2].run(train_by_engine, case=case):
        torch.testing.assert_close(outcome.losses, reference.losses, rtol=0.02, atol=0)


# Without processes


@pytest.mark.parametrize(
    "adapter, keys",
    [
        ({"r": 0}, ("trainer.adapter.r: saw 0", "at least 1")),
        ({"r": -3}, ("trainer.adapter.r: saw -3",)),
        ({"dropout": 1}, ("trainer.adapter.dropout: saw 1", "expected a number below 1")),
        ({"alpah": 3}, ('Did you mean "alpha"?',)),
        ({"type": "ia3"}, ('trainer.adapter.type: saw "ia3"', 'expected "lora"')),
        ({"targets": []}, ("trainer.adapter.targets",)),
        ({"targets": "(q_proj"}, ("a regular expression (missing )",)),
        ({}, ("Name the base", "trainer.model.name_or_path")),
    ],
)
def test_a_section_that_is_wrong(tmp_path, adapter, keys):
    from trainer.config import load

    with raises(ConfigError, *keys):
        load(write_job(tmp_path, adapter=adapter))


@pytest.mark.parametrize(
    "changes, keys",
    [
        (
            {"targets": ["q_prj"]},
            ('trainer.adapter.targets[0]: "q_prj"', "no linear layer"),
        ),
        (
            {"targets": ["q_proj", "k_prjo"]},
            ('targets[1]: "k_prjo"', "no linear layer"),
        ),
        ({"targets": ["q_prj"]}, ('Did you mean "q_proj" or "v_proj"?',)),
        ({"targets": ["embed_tokens"]}, ("model.embed_tokens is Embedding",)),
        (
            {"targets": r".*q_prj"},
            ('".*q_prj" matches no module', "the blocks alone"),
        ),
        ({"targets": r"(.*up_proj|lm_head)"}, ("matches lm_head",)),
        ({"targets": ["lm_head"]}, ("modules_to_save", "a whole")),
        (
            {"modules_to_save": ["lmhead"]},
            ('modules_to_save[0]: "lmhead"', "no module"),
        ),
        ({"modules_to_save": ["self_attn"]}, ("which has an adapter",)),
        ({"modules_to_save": ["lm_head"]}, ("which is tied",)),
    ],
)
def test_what_the_model_has_not(changes, keys):
    with raises(ConfigError, *keys):
        adapted(spec_of(LLAMA), AdapterSection(**changes))


@pytest.mark.more
@pytest.mark.parametrize(
    "pattern", [r"model\.layers\.[01]\.self_attn\.(q|v)_proj", r".*\.(up|down)_proj", "q_proj"]
)
def test_a_text_as_targets_means_the_modules_that_it_means_to_peft(pattern):
    from peft import LoraConfig, inject_adapter_in_model

    try:
        theirs = inject_adapter_in_model(LoraConfig(target_modules=pattern), spec_of(LLAMA).build())
    except ValueError as error:
        assert "not found" in str(error)
        with pytest.raises(ConfigError, match="matches no module"):
            adapted(spec_of(LLAMA), AdapterSection(targets=pattern))
        return
    ours = adapted(spec_of(LLAMA), AdapterSection(targets=pattern)).build()
    adapters = [
        {name for name, _ in model.named_modules() if name.endswith("lora_A")}
        for model in (ours, theirs)
    ]
    assert adapters[0] == adapters[1] and adapters[0]


@pytest.mark.more
def test_an_adapter_is_no_base(tmp_path):
    from trainer.models.language.model_config import read_config

    spec_in(Case(adapter=DRY)).files.save_config(tmp_path, None)
    options = SimpleNamespace(name_or_path=str(tmp_path), revision=None, trust_remote_code=False)
    with raises(ConfigError, "an adapter", "no model"):
        read_config(options)


def test_all_linear_says_which_matrices_it_leaves_out():
    """Fused experts and the router are parameters of modules of their own."""
    from tests.support.layouts import family

    mixtral = family("mixtral", num_local_experts=4, output_router_logits=True)
    message = adapted(spec_of(mixtral), AdapterSection()).notes
    assert (
        "model.layers.*.mlp.experts.gate_up_proj" in message[0]
        and "without an adapter" in message[0]
    )
    named = adapted(spec_of(mixtral), AdapterSection(targets=["q_proj"])).notes
    dense = adapted(spec_of(LLAMA), AdapterSection()).notes
    assert not any("without an adapter" in line for line in (*named, *dense))


def test_the_adapters_config_names_its_base_and_the_revision(tmp_path):
    spec = replace(spec_of(LLAMA), name="some/base", files=ModelFiles(revision="v2"))
    adapted(spec, AdapterSection()).files.save_config(tmp_path, None)
    saved = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (saved["base_model_name_or_path"], saved["revision"]) == ("some/base", "v2")
    adapted(replace(spec, name=str(tmp_path)), AdapterSection()).files.save_config(tmp_path, None)
    assert (
        json.loads((tmp_path / "adapter_config.json").read_text())["revision"] is None
    )  # of a folder


def saved_by_peft(folder: Path, **more: Any) -> dict[str, torch.Tensor]:
    """An adapter that has learnt something, in a folder that PEFT's own `save_pretrained` wrote."""
    from peft import LoraConfig, get_peft_model
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(1)
    messages = {
        "r": 3,
        "lora_alpha": 5,
        "target_modules": ["q_proj", "down_proj"],
        "modules_to_save": ["lm_head"],
    }
    config = LoraConfig(**messages | more, use_rslora=True)
    model = get_peft_model(AutoModelForCausalLM.from_config(AutoConfig.for_model(**UNTIED)), config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape), alpha=0.1)
    model.save_pretrained(folder)
    return load_file(folder / "adapter_model.safetensors")


def test_a_run_may_start_from_an_adapter(tmp_path):
    theirs = saved_by_peft(tmp_path / "one")
    section = AdapterSection(path=str(tmp_path / "one"), dropout=0.1)
    base = spec_of(UNTIED)
    spec = adapted(base.with_weights(made_up(base)), section)
    model = spec.build()
    materialise(model, spec, seed=3)
    named = dict(model.named_parameters())
    assert set(spec.files.published.values()) == set(theirs)
    assert all(
        torch.equal(named[ours], theirs[name]) for ours, name in spec.files.published.items()
    )
    layer = model.get_submodule("model.layers.0.self_attn.q_proj")
    assert (layer.scaling["default"], layer.lora_dropout["default"].p) == (5 / 3**0.5, 0.1)
    spec.files.save_config(tmp_path / "two", None)
    before, after = (
        json.loads((tmp_path / name / "adapter_config.json").read_text()) for name in ("one", "two")
    )
    assert all(
        before[key] == after[key]
        for key in ("r", "lora_alpha", "use_rslora", "modules_to_save", "use_dora")
    )
    assert "starts as that of" in spec.notes[-1]


@pytest.mark.parametrize(
    ("more", "section", "model", "keys"),
    [
        ({}, {"r": 4}, {}, ("trainer.adapter.r: saw 4", "expected 3, as in")),
        ({}, {"targets": ["q_proj"]}, {}, ("trainer.adapter.targets",)),
        ({"rank_pattern": {"q_proj": 7}}, {}, {}, ("rank_pattern",)),
        ({"target_modules": ".*q_proj"}, {}, {}, ("target_modules",)),
        ({}, {}, {"num_hidden_layers": 2}, ("have no place",)),
        ({}, {}, {"num_hidden_layers": 5}, ("tensors are not there",)),
        (
            {},
            {},
            {"intermediate_size": 64},
            ("down_proj.lora_A.weight", "[3, 48]", "[3, 64]"),
        ),
    ],
)
def test_an_adapter_to_start_from_that_does_not_fit(tmp_path, more, section, model, keys):
    saved_by_peft(tmp_path, **more)
    with raises(ConfigError, *keys):
        adapted(spec_of(UNTIED | model), AdapterSection(path=str(tmp_path), **section))


@pytest.mark.more
def test_a_folder_without_an_adapter_is_no_start(tmp_path):
    with pytest.raises(ConfigError, match="trainer.adapter.path: .*adapter_config.json"):
        adapted(spec_of(LLAMA), AdapterSection(path=str(tmp_path)))
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "IA3"}')
    with raises(ConfigError, "adapter", "LORA"):
        adapted(spec_of(LLAMA), AdapterSection(path=str(tmp_path)))


@pytest.mark.more
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("r", "eight"),
        ("r", 0),
        ("lora_alpha", None),
        ("target_modules", [3, "q_proj"]),
        ("bias", "some"),
        ("modules_to_save", {"head": 1}),
        ("use_dora", "maybe"),
    ],
)
def test_a_damaged_config_of_an_adapter_is_one_sentence(tmp_path, key, value):
    saved_by_peft(tmp_path)
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
    with pytest.raises(ConfigError, match="adapter_config.json: trainer.adapter"):
        adapted(spec_of(UNTIED), AdapterSection(path=str(tmp_path)))


@pytest.mark.more
def test_what_is_refused_under_tensor_parallelism():
    from tests.support.training import layout_of
    from trainer.engines import ENGINES

    for case, engine, message in (
        (
            replace(SPLIT, adapter=LORA),
            "mesh",
            "draws random numbers (dropout) inside what is split",
        ),
        (replace(SPLIT, adapter=DRY | {"dora": True}), "mesh", "a tiny copy of it fails in parts"),
        (
            replace(SPLIT, adapter=DRY),
            "deepspeed",
            "an adapter, and AutoTP would take each of its matrices for a layer",
        ),
    ):
        with pytest.raises(ConfigError) as caught:
            ENGINES[engine].check(spec_in(case), layout_of(case))
        assert message in str(caught.value)


def test_without_peft_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError, match="pip install peft"):
        adapted(spec_of(LLAMA), AdapterSection())


@pytest.mark.more
def test_an_adapter_is_not_opened_without_peft(tmp_path, monkeypatch):
    (tmp_path / "adapter_config.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "peft", None)
    with raises(ConfigError, "peft", "pip install", "peft"):
        opened(tmp_path, None)


def test_values_are_pefts_and_the_names_those_of_its_files():
    spec = spec_in(Case(adapter=DRY))
    model = spec.build()
    materialise(model, spec, seed=3)
    named = dict(model.named_parameters())
    first = named["model.layers.0.self_attn.q_proj.lora_A.default.weight"]
    assert first.abs().max() <= 1 / 32**0.5 and first.std() > 0.05  # uniform, by the inputs alone
    assert not any(value.any() for name, value in named.items() if "lora_B" in name)
    assert {name for name, p in named.items() if p.requires_grad} == set(spec.files.published)
    assert spec.files.published["model.layers.1.mlp.up_proj.lora_B.default.weight"] == (
        "base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"
    )
    again = spec.build()
    materialise(again, spec, seed=3)
    first = next(iter(spec.files.published))
    assert torch.equal(dict(again.named_parameters())[first], named[first])
