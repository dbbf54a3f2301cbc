"""`meshloom merge`: a LoRA adapter in its base equals PEFT's own merge."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM, LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support.messages import shows
from tests.support.models.weight_formats import FORMATS, stated
from tests.support.training import GPT2, LLAMA
from trainer.certify.one_process import quantising
from trainer.command import merge
from trainer.config.sections.adapter import QuantizeSection
from trainer.data.text.tokenizer import embedded_tokenizer
from trainer.supervise.process import cache_folder

UNTIED = {**LLAMA, "tie_word_embeddings": False, "vocab_size": 4096}
TIED = {**UNTIED, "tie_word_embeddings": True}
LORA = {"r": 3, "lora_alpha": 5, "target_modules": ["q_proj", "down_proj"]}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], str, str]] = {
    "lora": (UNTIED, {}, "float32", "1GB"),
    "dora": (UNTIED, {"use_dora": True}, "float32", "1GB"),
    "rslora, tied": (TIED, {"use_rslora": True}, "float32", "1GB"),
    "a head that is trained": (UNTIED, {"modules_to_save": ["lm_head"]}, "float32", "1GB"),
    "gpt2, biases": (
        {**GPT2, "vocab_size": 4096},
        {"target_modules": ["c_attn"], "bias": "lora_only", "fan_in_fan_out": True},
        "float32",
        "1GB",
    ),
    "several files": (UNTIED, {}, "float32", "200KB"),
    "bf16": (TIED, {}, "bfloat16", "1GB"),
    "bf16, dora": (TIED, {"use_dora": True}, "bfloat16", "1GB"),
}


def saved(
    folder: Path, model: dict[str, Any], adapter: dict[str, Any], dtype: str, size: str
) -> None:
    """A base, and an adapter that has learnt something, as their libraries write them."""
    torch.manual_seed(1)
    base = AutoModelForCausalLM.from_config(AutoConfig.for_model(**model), dtype=dtype)
    base.save_pretrained(folder / "base", max_shard_size=size)
    embedded_tokenizer(cache_folder()).save_pretrained(folder / "base")
    base = AutoModelForCausalLM.from_pretrained(folder / "base")
    learnt = get_peft_model(base, LoraConfig(**LORA | adapter))
    with torch.no_grad():
        for parameter in learnt.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape), alpha=0.1)
    learnt.save_pretrained(folder / "adapter")


def merged(*arguments: str | Path) -> int:
    return merge.main(list(map(str, arguments)), "meshloom merge")


@pytest.mark.parametrize("name", CASES)
def test_a_merged_model_is_what_peft_merges(tmp_path: Path, name: str) -> None:
    saved(tmp_path, *CASES[name])
    files = len([*(tmp_path / "base").glob("*.safetensors")])
    assert (files > 1) is (name == "several files")
    assert merged(tmp_path / "adapter", tmp_path / "out") == 0
    result = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    dtype = getattr(torch, CASES[name][2])
    assert result.dtype is dtype and result.config.dtype is dtype
    assert (tmp_path / "out" / "tokenizer_config.json").exists()
    theirs = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter").merge_and_unload()
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base").state_dict()
    expected = theirs.state_dict()
    assert expected.keys() == result.state_dict().keys()
    changed = [key for key in plain if not torch.equal(plain[key], result.state_dict()[key])]
    assert len(changed) >= 2
    exact = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter", dtype="float32")
    exact = exact.merge_and_unload().state_dict()
    for key, value in result.state_dict().items():
        if dtype is torch.float32:
            torch.testing.assert_close(value, expected[key], rtol=1e-5, atol=1e-6)
            continue
        # PEFT adds in bfloat16; ours is the float32 sum, rounded once
        torch.testing.assert_close(value, expected[key], rtol=2**-6, atol=2**-9)
        differs = (value != exact[key].to(dtype)).float().mean()
        torch.testing.assert_close(value, exact[key].to(dtype), rtol=2**-7, atol=0)
        assert differs < 0.01, key


def test_a_run_and_another_base_are_named(tmp_path: Path) -> None:
    saved(tmp_path, *CASES["lora"])
    (tmp_path / "run").mkdir()
    (tmp_path / "adapter").rename(tmp_path / "run" / "final")
    (tmp_path / "out").mkdir()
    base = (tmp_path / "base").rename(tmp_path / "moved")
    assert merged(tmp_path / "run", tmp_path / "out", "--base", base) == 0
    assert (tmp_path / "out" / "model.safetensors").exists()


def state_quantised(folder: Path, quantize: QuantizeSection) -> None:
    """State beside the adapter that its base was quantised, as a run does."""
    (folder / "adapter" / "quantization_config.json").write_text(json.dumps(stated(quantize)))


def trained_logits(folder: Path, ids: torch.Tensor, quantize: QuantizeSection) -> torch.Tensor:
    """PEFT's adapter around a base that is rounded in NumPy, in float32."""
    model = AutoPeftModelForCausalLM.from_pretrained(folder / "adapter", dtype="float32")
    blocks = [f"base_model.model.model.layers.{n}" for n in range(LLAMA["num_hidden_layers"])]
    quantising.quantised(model, blocks, quantize)
    with torch.no_grad():
        return model.eval()(ids).logits


@pytest.mark.parametrize("keys", FORMATS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_quantised_base_is_merged_as_it_was_trained(tmp_path, dtype, keys, capsys):
    quantize = QuantizeSection(**keys)
    saved(tmp_path, UNTIED, {}, dtype, "1GB")
    state_quantised(tmp_path, quantize)
    ids = torch.arange(1, 41).view(2, 20)
    expected = trained_logits(tmp_path, ids, quantize)
    out = {}
    for name, options in {"files": [], "bits": ["--quantised-base"]}.items():
        assert merged(tmp_path / "adapter", tmp_path / name, *options) == 0
        assert ("quantising" in capsys.readouterr().out) is (name == "files")
        found = AutoModelForCausalLM.from_pretrained(tmp_path / name)
        assert found.dtype is getattr(torch, dtype)
        with torch.no_grad():
            out[name] = found.float()(ids).logits
    differs = {name: float((of - expected).norm() / expected.norm()) for name, of in out.items()}
    assert differs["bits"] < (1e-5 if dtype == "float32" else 0.02)
    assert differs["files"] > (2e-3 if quantize.type == "int8" else 0.02)


def test_a_base_that_was_not_quantised_is_not_dequantised(tmp_path, capsys):
    saved(tmp_path, *CASES["lora"])
    assert merged(tmp_path / "adapter", tmp_path / "out", "--quantised-base") == 64
    shows(capsys.readouterr().err, "--quantised-base", "quantization_config.json")
    state_quantised(tmp_path, QuantizeSection(double_quant=True))
    path = tmp_path / "adapter" / "quantization_config.json"
    path.write_text(path.read_text().replace("nf4", "fp4"))
    assert merged(tmp_path / "adapter", tmp_path / "out") == 64
    shows(capsys.readouterr().err, "quantization_config.json", "fp4")


def changed(**keys: Any) -> Callable[[Path], None]:
    """What changes keys of PEFT's config."""

    def change(folder: Path) -> None:
        path = folder / "adapter" / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | keys))

    return change


def another_shape(folder: Path) -> None:
    path = folder / "adapter" / "adapter_model.safetensors"
    tensors = {key: value[:, :-1].contiguous() for key, value in load_file(path).items()}
    save_file(tensors, path)


def truncated(folder: Path) -> None:
    path = folder / "base" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def without(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).rename(folder / "gone")


WRONG: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "no adapter": (without("adapter/adapter_config.json"), ("no adapter_config.json",)),
    "no base": (without("base"), ("no such folder",)),
    "another kind": (changed(peft_type="IA3"), ("no adapter", "type LORA")),
    "another start": (changed(init_lora_weights="pissa_niter_4"), ('init_lora_weights "pissa',)),
    "a tied head": (
        changed(target_modules=["lm_head"]),
        ("no linear layer", "(lm_head is Linear)"),
    ),
    "an embedding": (changed(target_modules=["embed_tokens"]), ("embed_tokens is Embedding",)),
    "a trained head": (changed(modules_to_save=["lm_head"]), ("lm_head.weight, which is tied",)),
    "no number": (changed(lora_alpha=None), ("trainer.adapter.alpha: saw null",)),
    "no list": (changed(target_modules=[1]), ("trainer.adapter.targets",)),
    "an unknown bias": (changed(bias="x"), ('trainer.adapter.bias: saw "x"',)),
    "no path": (changed(base_model_name_or_path=5), ("trainer.model.name_or_path",)),
    "no tokenizer": (without("base/tokenizer.json"), ("tokenizer",)),
    "a truncated base": (truncated, ("safetensors",)),
    "ranks by pattern": (changed(rank_pattern={"q_proj": 2}), ("rank_pattern ",)),
    "more than layers": (changed(lora_bias=True), ("lora_bias true",)),
    "no such module": (changed(target_modules=["other"]), ("other",)),
    "other shapes": (another_shape, ("an adapter", "this base")),
    "a folder that is there": (
        lambda folder: (folder / "out" / "notes").mkdir(parents=True),
        ("it is there already",),
    ),
}


def test_a_folder_without_an_adapter_is_named(tmp_path: Path, capsys) -> None:
    assert merged(tmp_path, tmp_path / "out") == 64
    message = capsys.readouterr().err
    assert f"{tmp_path}: no adapter_config.json" in message and "Errno" not in message


@pytest.mark.parametrize("name", WRONG)
def test_what_can_not_be_merged_is_one_sentence(tmp_path: Path, name: str, capsys) -> None:
    saved(tmp_path, *CASES["rslora, tied"])
    spoil, keys = WRONG[name]
    spoil(tmp_path)
    capsys.readouterr()
    code, kind = (65, "data error:") if name == "no tokenizer" else (64, "config error:")
    assert merged(tmp_path / "adapter", tmp_path / "out") == code
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == kind, lines
    shows(lines[-1], *keys)
    assert not (tmp_path / "out" / "model.safetensors").exists()
