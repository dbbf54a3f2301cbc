"""Whole runs from bases of today's families: `final/` is the base with the trained values in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from tests.support.bases import MULTIMODAL, write_base
from tests.support.models.lora import job, train_here
from trainer.data.text.tokenizer import embedded_tokenizer
from trainer.supervise.process import cache_folder

WORDS = {"vocab_size": 4096}
IDS = torch.arange(10, 22)[None]
RUNS = {
    "qwen3_5, mesh, zero3": ("qwen3_5", "mesh", 3, []),
    "qwen3_5, deepspeed, zero2": ("qwen3_5", "deepspeed", 2, []),
    "qwen3_5, mesh, pipeline": ("qwen3_5", "mesh", 0, ["pipeline.stages=2"]),
    "qwen3_moe, mesh, zero3": ("qwen3_moe", "mesh", 3, []),
    "qwen3_moe, mesh, tensor": ("qwen3_moe", "mesh", 0, ["tensor_parallel.autotp_size=2"]),
    "qwen3_5_moe, mesh, experts": (
        "qwen3_5_moe",
        "mesh",
        3,
        ["expert_parallel.enabled=true", "expert_parallel.autoep_size=2"],
    ),
    "mistral3, mesh, zero3": ("mistral3", "mesh", 3, []),
    "glm4v, accelerate, zero3": ("glm4v", "accelerate", 3, []),
    "qwen3_vl, mesh, zero3": ("qwen3_vl", "mesh", 3, []),
    "qwen3_vl, mesh, tensor": ("qwen3_vl", "mesh", 0, ["tensor_parallel.autotp_size=2"]),
    "gemma4, mesh, zero3": ("gemma4", "mesh", 3, []),
}


def base_of(folder: Path, family: str) -> Path:
    """A base of a family with a tokenizer, and settings of its own."""
    more = {"text_config": WORDS} if family in MULTIMODAL else WORDS
    write_base(folder, family, **more)
    embedded_tokenizer(cache_folder()).save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text('{"size": 28}')
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    return folder


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS, use_cache=False).logits


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder's files, each in one of them."""
    values: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        part = load_file(path)
        assert not values.keys() & part.keys()
        values |= part
    return values


def trained(pools: Any, folder: Path, name: str, **adapter: Any) -> tuple[Path, Path]:
    """Run a case on two ranks; returns the folders of base and run."""
    family, engine, stage, overrides = RUNS[name]
    base = base_of(folder / "base", family)
    path = job(folder, base, engine, stage, adapter or None)
    losses = pools[2].run(train_here, path=path, overrides=overrides)
    assert not isinstance(losses[0], str), losses[0]
    assert losses[0][-1] < losses[0][0]
    return base, folder / "runs" / "job"


@pytest.mark.first("qwen3_5, mesh, zero3")
@pytest.mark.parametrize("name", RUNS)
def test_what_is_trained_comes_back_in_its_base(pools, tmp_path, name):
    base, run = trained(pools, tmp_path, name)
    final = run / "final"
    before = tensors_in(base)
    after = tensors_in(final)
    assert before.keys() == after.keys()
    config = json.loads((final / "config.json").read_text())
    assert (
        config["architectures"] == json.loads((base / "config.json").read_text())["architectures"]
    )
    for file in ("preprocessor_config.json", "generation_config.json"):
        assert (final / file).read_bytes() == (base / file).read_bytes()
    kind = getattr(transformers, config["architectures"][0])
    model, loading = kind.from_pretrained(final, output_loading_info=True, dtype=torch.float32)
    assert not loading["missing_keys"] and not loading["unexpected_keys"]
    saved = run / "checkpoints" / "step-000004" / "model"
    text = transformers.AutoConfig.from_pretrained(saved)
    one = getattr(transformers, text.architectures[0]).from_pretrained(saved, dtype=torch.float32)
    values = {key.replace(".language_model.", "."): v for key, v in model.state_dict().items()}
    for key, value in one.state_dict().items():
        assert torch.equal(values[key.replace(".language_model.", ".")], value), key
    # the whole model may group its experts' products otherwise
    torch.testing.assert_close(logits_of(model), logits_of(one), rtol=0, atol=1e-3)
    towers = [key for key in before if "visual" in key or "vision" in key]
    assert bool(towers) == (RUNS[name][0] in MULTIMODAL)
    assert all(torch.equal(before[key], after[key].to(before[key].dtype)) for key in towers)


@pytest.mark.more
@pytest.mark.parametrize(
    "name",
    [
        *("qwen3_5, mesh, zero3", "qwen3_5, mesh, pipeline", "qwen3_5, deepspeed, zero2"),
        "glm4v, accelerate, zero3",
    ],
)
def test_an_adapter_opens_on_the_whole_model(pools, tmp_path, name):
    peft = pytest.importorskip("peft")
    base, run = trained(pools, tmp_path, name, r=4, alpha=16, merge=True)
    model = peft.AutoPeftModel.from_pretrained(run / "final", dtype=torch.float32)
    kind = transformers.AutoModelForImageTextToText
    assert type(model.get_base_model()) is type(kind.from_pretrained(base))
    plain = logits_of(kind.from_pretrained(base, dtype=torch.float32))
    logits = logits_of(model)
    assert (logits - plain).abs().max() > 0.01
    merged, loading = kind.from_pretrained(
        run / "final-merged", output_loading_info=True, dtype=torch.float32
    )
    assert not loading["missing_keys"] and not loading["unexpected_keys"]
    by_peft = model.merge_and_unload().state_dict()
    for key, value in merged.state_dict().items():
        torch.testing.assert_close(value, by_peft[key], rtol=2**-7, atol=1e-6, msg=key)
    # and the trained part starts from it again, as from one of an earlier version
    for start in (run / "final", run / "checkpoints" / "step-000004" / "model"):
        (folder := tmp_path / f"from {start.name}").mkdir()
        path = job(folder, base, "mesh", 3, {"path": str(start)})
        losses = pools[2].run(train_here, path=path)
        assert not isinstance(losses[0], str), losses[0]
