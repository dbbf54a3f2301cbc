"""In every family the matrices that get an adapter are those that the file has, that PEFT opens, and
that merging changes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.conformance.sweep import NEEDED, TABLE
from tests.support.training import spec_of
from trainer.config.sections.adapter import AdapterSection
from trainer.config.sections.model_and_data import ModelSection
from trainer.errors import ConfigError, DiskError
from trainer.models.finetuning.lora import adapted
from trainer.models.finetuning.lora_experts import stacks_of
from trainer.models.finetuning.lora_targets import LINEAR
from trainer.models.huggingface import spec_of as spec_from
from trainer.models.language.model_config import read_config
from trainer.models.materialise import on_host
from trainer.models.spec import ModelSpec
from trainer.probes.probe import drawn

IDS = torch.arange(1, 13)[None]
MLPS = ["gate_proj", "up_proj", "down_proj"]
READS_OTHERWISE = pytest.mark.skipif(
    not find_spec("peft.utils.transformers_weight_conversion"),
    reason="this PEFT, before 0.19, reads names as they are",
)
SAMPLE = ("deepseek_v3", "glm4_moe", "qwen3_moe", "ernie4_5_moe")
TRAINED = [
    family for family, row in json.loads(TABLE.read_text()).items() if row["ZeRO-3"] == "pass"
]
"""The families that can be trained."""


class Adapted(NamedTuple):
    """A tiny model of a family with an adapter that has learnt something, in folders."""

    spec: ModelSpec
    model: Any
    base: Path
    adapter: Path


def write_base(family: str, folder: Path, **config: Any) -> Path:
    """Write a tiny model of a family as `save_pretrained` does, with its kinds of blocks."""
    values = {"model_type": family, **NEEDED.get(family, {}), **config}
    plain = spec_of(values)
    assert plain.tiny.copy is not None
    model: Any = drawn(plain.tiny.copy(3, 1))
    model.save_pretrained(folder)
    return folder


def adapted_in(folder: Path, base: Path, **options: Any) -> Adapted:
    """Adapt the model in `base`, and write the adapter with random values."""
    section = ModelSection(name_or_path=str(base))
    spec = spec_from(read_config(section), section)
    spec = adapted(spec, AdapterSection(**{"r": 2, "alpha": 6, "merge": True, **options}))
    model, adapter = on_host(spec), folder / "adapter"
    adapter.mkdir()
    torch.manual_seed(1)
    named = dict(model.named_parameters(remove_duplicate=False))
    with torch.no_grad():
        for name in spec.files.published:
            named[name].add_(torch.randn(named[name].shape), alpha=0.05)
    tensors = {theirs: named[ours].clone() for ours, theirs in spec.files.published.items()}
    save_file(tensors, adapter / "adapter_model.safetensors")
    spec.files.save_config(adapter, None)
    spec.files.check(adapter)
    return Adapted(spec, model, base, adapter)


def carriers(model: Any) -> set[str]:
    """The modules that carry an adapter, by PEFT's names of the base."""
    names = [name for name, module in model.named_modules() if hasattr(module, "lora_A")]
    return {name.removeprefix("base_model.model.") for name in names}


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS, use_cache=False).logits.float()


def assert_one_set(one: Adapted, wanted: set[str], whole: Iterable[str] = ()) -> None:
    """What is trained, in the file, opened by PEFT and merged are the same, by value.

    `whole`: modules that are trained as they are.
    """
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    assert carriers(one.model) == wanted
    assert any(f"in {len(wanted)} layers" in note for note in one.spec.notes)
    file = load_file(one.adapter / "adapter_model.safetensors")
    in_file = {name.partition(".lora_")[0] for name in file if ".lora_" in name}
    assert {name.removeprefix("base_model.model.") for name in in_file} == wanted
    base = AutoModelForCausalLM.from_pretrained(one.base, dtype=torch.float32)
    if getattr(base.config, "rescale_every", 0):
        base.config.rescale_every = 0  # RWKV divides weights in evaluation, but no adapter
    theirs: Any = PeftModel.from_pretrained(base, one.adapter)
    assert carriers(theirs) == wanted
    opened = dict(theirs.named_parameters(remove_duplicate=False))
    ours = dict(one.model.named_parameters(remove_duplicate=False))
    for name in one.spec.files.published:
        assert torch.equal(opened[f"base_model.model.{name}"], ours[name]), name
    changed = changed_as_by_peft(one, theirs)
    assert {name.removesuffix(".weight") for name in changed} == {*wanted, *whole}


def changed_as_by_peft(one: Adapted, theirs: Any) -> set[str]:
    """PEFT's model has our logits and our merged weights: return the names of those that changed.

    Afterwards PEFT's model is merged.
    """
    with theirs.disable_adapter():
        plain = logits_of(theirs)
    logits, scale = logits_of(theirs), float(plain.abs().max())
    if not plain.isnan().any():
        assert float((logits - plain).abs().max()) > 1e-4 * scale  # it has learnt something
        torch.testing.assert_close(logits_of(one.model), logits, rtol=0, atol=2e-5 * scale)
    before = {name: value.clone() for name, value in on_host_base(one).items()}
    merged = dict(theirs.merge_and_unload().state_dict())
    assert one.spec.files.merged is not None
    weights = one.spec.files.merged(one.adapter).building.weights
    changed = set()
    for name, value in before.items():
        result = weights.read(name)
        assert result is not None, name
        torch.testing.assert_close(result, merged[name], rtol=0, atol=1e-6)
        if not torch.equal(result, value):
            changed.add(name)
    return changed


def on_host_base(one: Adapted) -> dict[str, torch.Tensor]:
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(one.base, dtype=torch.float32)
    return dict(base.named_parameters())


def linear_layers(one: Adapted, ends: tuple[str, ...] = ("",)) -> set[str]:
    """The linear layers of the blocks, by the base as transformers makes it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(one.base))
    inside = tuple(f"{block}." for block in one.spec.blocks) or ("",)
    named = [name for name, module in model.named_modules() if type(module) in LINEAR]
    return {name for name in named if name.startswith(inside) and name.endswith(ends)}


@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=[] if f in SAMPLE else [pytest.mark.whole]) for f in TRAINED]
)
def test_what_is_adapted_is_what_is_said_saved_opened_and_merged(tmp_path, family):
    base = write_base(family, tmp_path / "base")
    try:
        one = adapted_in(tmp_path, base)
    except ConfigError as error:
        # what PEFT does not adapt is refused; Emu3's text model is not one that transformers opens
        assert "trainer.adapter" in str(error) or family == "emu3"
        pytest.skip(str(error))
    assert_one_set(one, linear_layers(one))
    mlps = linear_layers(one, tuple(f".{name}" for name in MLPS))
    if mlps:
        (tmp_path / "mlps").mkdir()
        results = [name for name in MLPS if any(layer.endswith(f".{name}") for layer in mlps)]
        named = adapted_in(tmp_path / "mlps", base, targets=results)
        assert_one_set(named, mlps)


MIXTURES = ("gpt_oss", "mixtral", *SAMPLE)


@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=[] if f in MIXTURES else [pytest.mark.whole]) for f in TRAINED]
)
def test_adapted_experts_are_what_is_saved_opened_and_merged(tmp_path, family):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    values = {"model_type": family, **NEEDED.get(family, {})}
    described = spec_of(values)
    ends = {name.rpartition(".")[2] for name in stacks_of(described.build(), described)}
    if not ends:
        assert family not in MIXTURES
        pytest.skip("no stacks of experts")
    base = write_base(family, tmp_path / "base")
    one = adapted_in(tmp_path, base, targets=[f"experts.{end}" for end in sorted(ends)])
    stacks = set(stacks_of(AutoModelForCausalLM.from_pretrained(base), one.spec))
    assert stacks and any(f"and {len(stacks)} stacks of experts" in note for note in one.spec.notes)
    opened = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    assert not logits_of(opened).isnan().any()
    assert changed_as_by_peft(one, PeftModel.from_pretrained(opened, one.adapter)) == stacks
    (tmp_path / "second").mkdir()
    again = adapted_in(tmp_path / "second", base, path=str(one.adapter), alpha=6.0, r=2)
    assert again.spec.files.published == one.spec.files.published


def test_targets_that_mean_experts_and_adapt_none_are_said(tmp_path):
    base = write_base("mixtral", tmp_path / "base")
    one = adapted_in(tmp_path, base, targets=r".*\.(q_proj|gate_up_proj|down_proj)")
    assert any("gate_up_proj" in note and "without an adapter" in note for note in one.spec.notes)
    refused = {
        r".*experts\.(gate_up_proj|down_proj)": "in a list: experts.gate_up_proj",
        "experts.gate_proj": "no stack of experts.*experts.gate_up_proj",
        "down_proj": "no stack of experts.*experts.down_proj",
    }
    for number, (target, message) in enumerate(refused.items()):
        (tmp_path / str(number)).mkdir()
        targets = target if "*" in target else [target]
        with pytest.raises(ConfigError, match=message):
            adapted_in(tmp_path / str(number), base, targets=targets)
    config = json.loads((one.adapter / "adapter_config.json").read_text())
    config["target_parameters"] = ["gate_up_proj"]
    (one.adapter / "adapter_config.json").write_text(json.dumps(config))
    (tmp_path / "path").mkdir()
    with pytest.raises(ConfigError, match='adapter_config.json.*"experts.gate_up_proj"'):
        adapted_in(tmp_path / "path", base, path=str(one.adapter))


def test_a_router_with_a_saved_buffer_is_not_trained_whole(tmp_path):
    base = write_base("deepseek_v3", tmp_path / "base")
    with pytest.raises(ConfigError, match="modules_to_save.*e_score_correction_bias"):
        adapted_in(tmp_path, base, targets=["o_proj"], modules_to_save=["mlp.gate"])


def test_vllm_reads_the_adapters_of_experts(tmp_path):
    """Its loader of 3-D experts takes `experts.base_layer` for gate and up, `experts` for down;
    A as [experts, r, in], and B as [out, r, experts]."""
    base = write_base("qwen3_moe", tmp_path / "base")
    stacks = {"experts.base_layer": "gate_up_proj", "experts": "down_proj"}
    one = adapted_in(tmp_path, base, targets=[f"experts.{end}" for end in stacks.values()])
    assert one.spec.files.merged is not None
    weights = one.spec.files.merged(one.adapter).building.weights
    file = load_file(one.adapter / "adapter_model.safetensors")
    before = on_host_base(one)
    for name, stack in stacks.items():
        place = f"base_model.model.model.layers.1.mlp.{name}"
        own = f"model.layers.1.mlp.experts.{stack}"
        count = len(before[own])
        a = file[f"{place}.lora_A.weight"].reshape(count, 2, -1)
        b = file[f"{place}.lora_B.weight"].reshape(-1, 2, count).permute(2, 0, 1)
        merged: Any = weights.read(own)
        torch.testing.assert_close(before[own] + 3 * b @ a, merged, rtol=0, atol=1e-6)


def test_options_keep_what_is_opened(tmp_path):
    """Scaled by the root of the rank, with a head that is trained, and from a regular expression."""
    base = write_base("deepseek_v3", tmp_path / "base")
    mlps = r".*\.(mlp|shared_experts)\.(up|down)_proj"
    options = {"targets": mlps, "rslora": True, "modules_to_save": ["lm_head"]}
    one = adapted_in(tmp_path, base, **options)
    wanted = linear_layers(one, (".up_proj", ".down_proj"))
    assert_one_set(one, wanted, {"lm_head"})
    assert any("stacks of experts" in note for note in one.spec.notes)


@READS_OTHERWISE
def test_a_run_starts_from_its_own_adapter_of_mlps(tmp_path):
    base = write_base("qwen3_moe", tmp_path / "base", mlp_only_layers=[0])
    first = adapted_in(tmp_path, base, targets=MLPS)
    saved = json.loads((first.adapter / "adapter_config.json").read_text())
    assert not saved["target_modules"] and len(saved["target_parameters"]) == 3
    (tmp_path / "second").mkdir()
    second = adapted_in(tmp_path / "second", base, path=str(first.adapter), alpha=6.0, r=2)
    assert carriers(second.model) == carriers(first.model)
    assert_one_set(second, linear_layers(second, tuple(f".{name}" for name in MLPS)))
    saved["target_parameters"] = ["mlp.experts.gate_up_proj"]
    (first.adapter / "adapter_config.json").write_text(json.dumps(saved))
    (tmp_path / "third").mkdir()
    with pytest.raises(ConfigError, match=r"lora_A\.weight.*no place in the model"):
        adapted_in(tmp_path / "third", base, path=str(first.adapter))


@READS_OTHERWISE
def test_what_peft_would_not_open_is_refused_at_the_start(tmp_path):
    base = write_base("deepseek_v3", tmp_path / "base")
    with pytest.raises(ConfigError, match="dora.*down_proj"):
        adapted_in(tmp_path, base, dora=True, targets=["q_b_proj", "down_proj"])
    (tmp_path / "attention").mkdir()
    attention = adapted_in(tmp_path / "attention", base, dora=True, targets=["q_b_proj"])
    assert_one_set(attention, linear_layers(attention, (".q_b_proj",)))


def lost_tensor(folder: Path) -> None:
    tensors = load_file(folder / "adapter_model.safetensors")
    save_file(dict(list(tensors.items())[1:]), folder / "adapter_model.safetensors")


def other_tensor(folder: Path) -> None:
    tensors = load_file(folder / "adapter_model.safetensors")
    tensors["base_model.model.model.layers.1.mlp.experts.lora_A.weight"] = torch.ones(2, 2)
    save_file(tensors, folder / "adapter_model.safetensors")


def other_targets(folder: Path) -> None:
    file = folder / "adapter_config.json"
    result = json.loads(file.read_text())
    names = [name.removesuffix(".weight") for name in result.pop("target_parameters")]
    result["target_modules"] += names
    file.write_text(json.dumps(result))


@pytest.mark.parametrize(
    "change", [lost_tensor, other_tensor, pytest.param(other_targets, marks=READS_OTHERWISE)]
)
def test_a_folder_that_opens_as_another_adapter_is_an_error_when_it_is_saved(tmp_path, change):
    one = adapted_in(tmp_path, write_base("glm4_moe", tmp_path / "base"))
    change(one.adapter)
    with pytest.raises(DiskError, match="adapter_(model|config)"):
        one.spec.files.check(one.adapter)
