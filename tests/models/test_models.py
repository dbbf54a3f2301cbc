"""Hugging Face models as specs: blocks, heads, ties, initial values and pretrained ones."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from tests.support.messages import raises, shows
from tests.support.models.families import FAMILIES, family, real
from tests.support.training import GPT2, LLAMA, VOCABULARY, spec_of
from trainer.config.sections.model_and_data import ModelSection
from trainer.data.text import tokenizer
from trainer.errors import ConfigError, DataError
from trainer.models import huggingface
from trainer.models.flops import flops_per_token
from trainer.models.language import model_config
from trainer.models.materialise import materialise
from trainer.models.names import units
from trainer.models.pretrained.weights import SafetensorsFolder


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_is_cut_built_and_saved(name, tmp_path):
    spec = spec_of(family(name))
    assert len(spec.blocks) == 3
    assert spec.language.head.plain is FAMILIES[name][1]
    model = real(spec)
    assert spec.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert not any(torch.isnan(value).any() for value in model.state_dict().values())
    # built from nothing, it computes what transformers computes with the same values
    model.save_pretrained(tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    ids = torch.arange(12).reshape(2, 6)
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, theirs(ids).logits, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "gpt_neox"])
def test_initial_values_have_the_spread_that_transformers_gives(name):
    spec = spec_of(family(name))
    ours = dict(real(spec).named_parameters())
    torch.manual_seed(0)
    theirs = dict(
        AutoModelForCausalLM.from_config(
            model_config.read_config(options(family(name)))
        ).named_parameters()
    )
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        assert float(ours[key].mean()) == pytest.approx(float(value.mean()), abs=0.01), key
        assert float(ours[key].std(correction=0)) == pytest.approx(
            float(value.std(correction=0)), rel=0.2
        ), key


def test_initial_values_depend_on_seed_and_name_alone():
    first, second, other = (real(spec_of(LLAMA), seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert not torch.equal(first["model.embed_tokens.weight"], other["model.embed_tokens.weight"])
    q = [first[f"model.layers.{i}.self_attn.q_proj.weight"] for i in range(2)]
    assert not torch.equal(*q)


def test_building_leaves_the_random_state_alone():
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    real(spec_of(LLAMA))
    assert torch.equal(torch.rand(2), expected)


def test_pretrained_values_are_read_by_name(tmp_path):
    original = real(spec_of(LLAMA), seed=4)
    original.save_pretrained(tmp_path)
    loaded = real(spec_of(LLAMA, str(tmp_path)), seed=9)
    for key, value in original.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], value), key


def test_weights_under_old_names_are_converted_by_transformers(tmp_path):
    from safetensors.torch import load_file, save_file

    original = real(spec_of(GPT2), seed=4)
    original.save_pretrained(tmp_path)
    values = load_file(tmp_path / "model.safetensors")
    # as the first GPT-2 on the hub: saved from the base model, without its prefix
    old = {key.removeprefix("transformer."): value for key, value in values.items()}
    save_file(old, tmp_path / "model.safetensors", {"format": "pt"})
    loaded = real(spec_of(GPT2, str(tmp_path)), seed=9)
    for key, value in original.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], value), key


def test_a_parameter_that_a_constructor_fills_is_read_as_any_other(tmp_path):
    """A constructor may make it of an array, and so not on the meta device."""
    original = real(spec_of(LLAMA), seed=4)
    torch.nn.init.normal_(original.model.norm.weight)
    original.save_pretrained(tmp_path)
    spec = spec_of(LLAMA, str(tmp_path))
    model = spec.build()
    model.model.norm.weight = torch.nn.Parameter(torch.zeros(model.config.hidden_size))
    materialise(model, spec, seed=0)
    assert torch.equal(model.model.norm.weight, original.model.norm.weight)


def test_units_hold_one_block_at_most():
    model = spec_of(LLAMA).build()
    blocks = spec_of(LLAMA).blocks
    actual = [name for unit in units(model, blocks) for name, _ in unit]
    assert sorted(actual) == sorted(name for name, _ in model.named_modules())
    assert max(sum(name in blocks for name, _ in unit) for unit in units(model, blocks)) == 1


def test_no_more_than_a_unit_is_whole_at_once():
    spec = spec_of({**LLAMA, "num_hidden_layers": 8})
    model = spec.build()
    alive: list[int] = []

    def take_away(module, parameters):
        alive.append(sum(p.numel() for p in model.parameters() if not p.is_meta))
        for parameter in parameters:
            parameter.data = torch.empty(0)

    materialise(model, spec, seed=0, after_unit=take_away)
    block = sum(p.numel() for p in spec.build().get_submodule("model.layers.0").parameters())
    embedding = VOCABULARY * 32
    assert max(alive) <= max(block, embedding)


def test_flops_follow_the_formula():
    spec = spec_of({**LLAMA, "tie_word_embeddings": False})
    matrices = spec.parameters - VOCABULARY * 32
    assert flops_per_token(spec, 128) == 6 * matrices + 6 * 3 * 32 * 128
    assert flops_per_token(spec, 128, causal=False) == 6 * matrices + 12 * 3 * 32 * 128
    assert (
        spec_of(LLAMA).language.embedding_parameters == 0
    )  # a tied table is the head, and multiplied


def options(config: Any = None, path: str | None = None) -> ModelSection:
    return ModelSection(name_or_path=path, config=config)


@pytest.mark.parametrize(
    ("config", "keys"),
    [
        (
            {"hidden_size": 8},
            ("trainer.model.config: no model_type", '"model_type"'),
        ),
        ({"model_type": "lama"}, ("a config", "transformers accepts")),
        ("/nowhere/config.json", ("trainer.model.config: /nowhere/config.json: ",)),
    ],
)
def test_a_config_that_names_no_model(config, keys):
    with raises(ConfigError, *keys):
        model_config.read_config(options(config))


def test_a_model_without_a_language_head():
    with raises(ConfigError, "causal language model head"):
        huggingface.spec_of(model_config.read_config(options({"model_type": "vit"})), options({}))


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("nowhere.json", ("no such folder",)),
        ("./nowhere", ("no such folder",)),
        ("two words", ("no such folder",)),
        ("runs/nome", ("no such folder", "runs/name")),
        ("job.json", ("a file", "folder")),
    ],
)
def test_a_name_that_can_not_be_one_of_the_hub_is_not_looked_for_there(
    tmp_path, monkeypatch, name, keys
):
    def reached(*arguments, **more):
        raise AssertionError("the Hub was tried")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", reached)
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", reached)
    (tmp_path / "job.json").write_text("{}")
    (tmp_path / "runs" / "name").mkdir(parents=True)
    (tmp_path / "runs" / "name" / "environment.json").write_text("{}")
    with raises(ConfigError, f"trainer.model.name_or_path: {name}: ", *keys):
        model_config.read_config(options(path=name))
    if name != "job.json":
        with raises(DataError, name, "no such folder"):
            tokenizer.load_any_tokenizer(name)


@pytest.mark.parametrize("name", ["nowhere", "owner/nowhere", "owner/Nowhere-3.1"])
def test_a_name_that_may_be_one_of_the_hub_says_that_it_is_no_folder(tmp_path, monkeypatch, name):
    def unreachable(*arguments, **more):
        raise OSError("We couldn't connect to the Hub")

    (tmp_path / "owner" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", unreachable)
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", unreachable)
    with raises(ConfigError, "no such folder here", "couldn't connect", "HF_ENDPOINT"):
        model_config.read_config(options(path=name))
    with raises(DataError, "no such folder here", "couldn't connect", "HF_ENDPOINT"):
        tokenizer.load_any_tokenizer(name)


def test_a_folder_that_is_not_a_model(tmp_path):
    with raises(ConfigError, "no such folder", "save_pretrained"):
        model_config.read_config(options(path="/nowhere/at/all"))
    with raises(ConfigError, "no config.json", "save_pretrained"):
        model_config.read_config(options(path=str(tmp_path)))
    model_config.read_config(options(LLAMA)).save_pretrained(tmp_path)
    with raises(ConfigError, "no weights", "model.safetensors", "trainer.model.config"):
        spec_of(LLAMA, str(tmp_path))


def test_weights_of_another_shape(tmp_path):
    real(spec_of(LLAMA)).save_pretrained(tmp_path)
    config = model_config.read_config(options({**LLAMA, "intermediate_size": 64}))
    config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError) as caught:
        real(spec_of(LLAMA, str(tmp_path)))
    shows(caught.value, "model.layers.0.mlp.gate_proj.weight: shape (48, 32)", "(64, 32)")


@pytest.mark.parametrize(
    "name",
    ["../model.safetensors", "/etc/model.safetensors", "pytorch_model.bin", "a\\b.safetensors"],
)
def test_an_index_that_leads_elsewhere_is_refused(tmp_path, name):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with raises(ConfigError, "safetensors files"):
        SafetensorsFolder(tmp_path)
