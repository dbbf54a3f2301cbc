"""A trained adapter says how its base was quantised, and opens on the base as it was trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    BitsAndBytesConfig,
)

from tests.support.labels import BODIES
from tests.support.messages import shows
from tests.support.models.lora import job, train_here, write_base
from tests.support.models.weight_formats import FORMATS, INT8, NF4, stated
from trainer.certify.one_process import quantising
from trainer.command import use
from trainer.config.sections.adapter import AdapterSection, QuantizeSection
from trainer.config.sections.model_and_data import ModelSection
from trainer.errors import ConfigError
from trainer.models.finetuning.lora import adapted
from trainer.models.finetuning.quantised import quantised_base
from trainer.models.finetuning.quantised.quantised_files import read
from trainer.models.finetuning.quantised.quantised_opened import opened_on_quantised
from trainer.models.huggingface import spec_of
from trainer.models.language.model_config import read_config
from trainer.models.materialise import on_host
from trainer.models.opened import opened, opened_on_one_base

LLAMA = {**BODIES["llama"], "attention_dropout": 0.0}
PATTERN = r".*(q_proj|down_proj|query|output\.dense)"
KINDS: dict[str, tuple[dict[str, Any], Any, str | None, dict[str, Any]]] = {
    "tokens": (LLAMA, AutoModelForCausalLM, "CAUSAL_LM", {}),
    "tokens, tied, biases": (
        {**LLAMA, "tie_word_embeddings": True, "attention_bias": True},
        AutoModelForCausalLM,
        "CAUSAL_LM",
        {"bias": "lora_only"},
    ),
    "labels": (LLAMA, AutoModelForSequenceClassification, "SEQ_CLS", {}),
    "a body": (LLAMA, AutoModel, None, {}),
    "masks": (BODIES["bert"], AutoModelForMaskedLM, None, {"modules_to_save": ["transform"]}),
}


def written(folder: Path, name: str, quantize: QuantizeSection) -> Any:
    """An adapter on a base, as PEFT saves it, and what has the same values as NumPy quantises."""
    sizes, kind, task, more = KINDS[name]
    torch.manual_seed(1)
    whole = AutoModelForMaskedLM if kind is AutoModelForMaskedLM else AutoModelForCausalLM
    whole.from_config(AutoConfig.for_model(**sizes)).save_pretrained(folder / "base")
    base = kind.from_pretrained(folder / "base")
    config = LoraConfig(r=3, lora_alpha=5, target_modules=PATTERN, task_type=task, **more)
    learnt = get_peft_model(base, config)
    with torch.no_grad():
        for parameter in learnt.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape), alpha=0.1)
    learnt.save_pretrained(folder / "adapter")
    path = folder / "adapter" / "adapter_config.json"
    targets = [n for n, m in base.named_modules() if hasattr(m, "lora_A")]
    names = {"target_modules": sorted(targets)}
    if task == "SEQ_CLS":
        names["modules_to_save"] = ["score"]  # PEFT adds a name that the model does not have
        base.config.update({"architectures": [type(base).__name__]})  # as a run saves it
        base.config.save_pretrained(folder / "adapter")
    path.write_text(json.dumps(json.loads(path.read_text()) | names))
    (folder / "adapter" / "quantization_config.json").write_text(json.dumps(stated(quantize)))
    model = kind.from_pretrained(folder / "base")
    model = PeftModel.from_pretrained(model, str(folder / "adapter")).eval()
    blocks = next(n for n, m in model.named_modules() if isinstance(m, nn.ModuleList))
    quantising.quantised(model, [blocks], quantize)
    return model


def output(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.arange(3, 43).view(2, 20))[0]


@pytest.mark.first("tokens-keys0", "masks-keys1", "labels-keys2", "a body-keys0")
@pytest.mark.parametrize("keys", FORMATS)
@pytest.mark.parametrize("name", KINDS)
def test_an_adapter_opens_on_its_quantised_base(tmp_path, name, keys):
    expected = output(written(tmp_path, name, QuantizeSection(**keys)))
    folder = tmp_path / "adapter"
    [kept] = opened_on_quantised([folder], read(folder), False, keep=True)
    assert quantised_base.quantised_weights(kept)
    values = opened(tmp_path / "adapter")
    assert not quantised_base.quantised_weights(values)
    assert torch.equal(output(values), output(kept))
    torch.testing.assert_close(output(values), expected, rtol=1e-5, atol=1e-5)


def another(folder: Path, quantize: QuantizeSection) -> None:
    """Write an adapter on the base that `written` made: on other layers, with a layer's copy."""
    base = AutoModelForCausalLM.from_pretrained(folder / "base")
    names = ["model.layers.0.mlp.up_proj", "model.layers.1.self_attn.q_proj"]
    copied = ["model.layers.1.mlp.down_proj"]
    config = LoraConfig(r=2, target_modules=names, modules_to_save=copied, init_lora_weights=False)
    learnt = get_peft_model(base, config)
    with torch.no_grad():
        learnt.base_model.model.model.layers[1].mlp.down_proj.weight.mul_(1.1)
    learnt.save_pretrained(folder / "another")
    stating = json.dumps(stated(quantize))
    (folder / "another" / "quantization_config.json").write_text(stating)


@pytest.mark.first("keys0-True", "keys2-False")
@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("keys", FORMATS)
def test_several_adapters_share_a_quantised_base(tmp_path, keys, keep):
    """Each computes as if it were alone; what one has a copy of is not quantised for that one."""
    written(tmp_path, "tokens", QuantizeSection(**keys))
    another(tmp_path, QuantizeSection(**keys))
    folders = [tmp_path / "adapter", tmp_path / "another"]
    bits = QuantizeSection(**keys)
    alone = [opened_on_quantised([folder], bits, False, keep=keep)[0] for folder in folders]
    first, second = opened_on_quantised(folders, bits, False, keep=keep)
    for one, expected in zip((first, second), alone, strict=True):
        assert torch.equal(output(one), output(expected))
    assert not torch.equal(output(first), output(second))
    held = {parameter.data_ptr() for parameter in first.parameters()}
    own = {name for name, one in second.named_parameters() if one.data_ptr() not in held}
    copied = "model.layers.1.mlp.down_proj."
    assert {name for name in own if "lora_" not in name} == {
        f"{copied}original_module.weight",
        f"{copied}modules_to_save.default.weight",
    }


def test_each_of_several_adapters_is_chosen_on_a_quantised_base(tmp_path):
    written(tmp_path, "tokens", QuantizeSection())
    another(tmp_path, QuantizeSection())
    folders = [tmp_path / "adapter", tmp_path / "another"]
    expected = [output(opened(folder)) for folder in folders]
    for one, result in zip(opened_on_one_base(folders, False), expected, strict=True):
        one.choose()
        assert torch.equal(output(one.model), result)
    (folders[1] / "quantization_config.json").write_text(json.dumps(INT8))
    with pytest.raises(ConfigError) as error:
        opened_on_one_base(folders, False)
    shows(str(error.value), "another", "int8")


@pytest.mark.more
@pytest.mark.parametrize("keys", FORMATS[1:])
def test_a_run_names_its_base_and_opens_as_it_was_trained(pools, tmp_path, keys):
    quantize = QuantizeSection(**keys)
    base = write_base(tmp_path / "base")
    adapter = {"r": 4, "quantize": keys}
    path = job(tmp_path, base, "mesh", 2, adapter)
    losses = pools[2].run(train_here, path=path)
    assert not isinstance(losses[0], str), losses[0]
    run = tmp_path / "runs" / "job"
    for folder in (run / "final", run / "checkpoints" / "step-000004" / "model"):
        content = json.loads((folder / "quantization_config.json").read_text())
        config = BitsAndBytesConfig.from_dict(content)
        method = "llm_int8" if quantize.type == "int8" else quantize.type
        assert config.quantization_method() == method
        assert config.bnb_4bit_use_double_quant is quantize.double_quant
        assert config.llm_int8_skip_modules == ["lm_head"]
    section = ModelSection(name_or_path=str(base))
    of_run = AdapterSection(path=str(run / "final"), quantize=quantize)
    trained = adapted(spec_of(read_config(section), section), of_run)
    assert torch.equal(output(opened(run / "final")), output(on_host(trained).eval()))
    words = [str(run), "--prompt", "What is", "--tokens", "2"]
    assert use.main(words, "meshloom generate") == 0
    plain = adapted(spec_of(read_config(section), section), AdapterSection(path=of_run.path))
    shows(plain.notes[-1], quantize.type, "16 bits")
    assert not torch.equal(output(opened(run / "final")), output(on_host(plain).eval()))


@pytest.mark.parametrize(
    "odd", [{"load_in_4bit": True}, {"llm_int8_has_fp16_weight": True}, {"load_in_8bit": 1}]
)
def test_bits_that_contradict_are_an_error(tmp_path, odd):
    (tmp_path / "quantization_config.json").write_text(json.dumps(INT8 | odd))
    with pytest.raises(ConfigError) as error:
        read(tmp_path)
    shows(str(error.value), *odd)


@pytest.mark.parametrize("odd", [{"bnb_4bit_quant_type": "fp4"}, {"load_in_4bit": False}])
def test_other_bits_are_an_error(tmp_path, odd):
    (tmp_path / "quantization_config.json").write_text(json.dumps(NF4 | odd))
    with pytest.raises(ConfigError) as error:
        read(tmp_path)
    shows(str(error.value), *odd)
