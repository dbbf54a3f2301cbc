"""A base comes back whole: its tensors under its names, what is not trained, and its settings."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
import transformers
from safetensors.torch import load_file

from tests.support import whole_table
from tests.support.bases import (
    COMPRESSED,
    FAMILIES,
    FP8,
    MULTIMODAL,
    changed_config,
    count_reads,
    in_blocks_of_fp8,
    in_channels_of_fp8,
    rewritten,
    write_base,
)
from trainer import checkpoint
from trainer.config.sections.adapter import AdapterSection
from trainer.config.sections.model_and_data import ModelSection
from trainer.distributed.ranks import ALONE
from trainer.errors import ConfigError, DiskError
from trainer.models import huggingface
from trainer.models.finetuning.lora import adapted
from trainer.models.language import model_config
from trainer.models.opened import opened
from trainer.models.pretrained import named_base, way_back
from trainer.models.spec import ModelSpec, exported, given_tensors
from trainer.state import CARRIED

WITH_IMAGES_ALONE = ["glm4v", "llava", "mistral3", "qwen3_vl"]
"""Families for which transformers has no class for text alone."""
SETTINGS = {"eos_token_id": [2, 7], "temperature": 0.7, "do_sample": True}


def spec_of(base: Path, **options: Any) -> ModelSpec:
    section = ModelSection(name_or_path=str(base), **options)
    return huggingface.spec_of(model_config.read_config(section), section)


def written(spec: ModelSpec, folder: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Write the model as a run of no steps would."""
    files = spec.files.exported()
    entries = exported(spec, given_tensors(spec, ALONE), ALONE)
    form = checkpoint.ModelForm(dtype)

    def others(partial: Path) -> None:
        files.save_config(partial, dtype)
        files.check(partial)

    return checkpoint.export(folder, entries, checkpoint.ModelFolder(others, form), ALONE)


def json_in(path: Path) -> Any:
    return json.loads(path.read_text())


def assert_equal_files(base: Path, final: Path) -> None:
    before = load_file(base / "model.safetensors")
    after = load_file(final / "model.safetensors")
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert after[name].dtype == value.dtype, name
        assert torch.equal(after[name], value), name


@pytest.mark.first("llama", "qwen3_moe", "qwen3_5", "gemma3", "mistral3")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_base_comes_back_byte_for_byte(tmp_path, family):
    base = write_base(tmp_path / "base", family)
    (base / "preprocessor_config.json").write_text('{"size": 28}')
    (base / "generation_config.json").write_text(json.dumps(SETTINGS))
    (base / "modeling_more.py").write_text("# code of its own")
    final = written(spec_of(base), tmp_path / "final")
    assert_equal_files(base, final)
    assert json_in(final / "config.json") == json_in(base / "config.json")
    for name in ("preprocessor_config.json", "generation_config.json", "modeling_more.py"):
        assert (final / name).read_bytes() == (base / name).read_bytes()


@pytest.mark.first("qwen3_5", "gemma3", "mistral3")
@pytest.mark.parametrize("family", sorted(MULTIMODAL))
def test_the_class_of_the_base_opens_it_and_sees_images_as_before(tmp_path, family):
    base = write_base(tmp_path / "base", family)
    spec = spec_of(base)
    final = written(spec, tmp_path / "final")
    kind = getattr(transformers, json_in(base / "config.json")["architectures"][0])
    model, loading = kind.from_pretrained(final, output_loading_info=True)
    assert not loading["missing_keys"] and not loading["unexpected_keys"]
    theirs = kind.from_pretrained(base)
    for (name, value), other in zip(model.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(value, other), name
    if family == "llama4":  # transformers 5.24 fails in the whole model without an image
        return
    ids = torch.arange(10, 22).reshape(2, 6)
    text = model.eval()(ids, use_cache=False).logits
    alone = huggingface.auto_class(model.config).from_pretrained(final)
    assert torch.equal(alone.eval()(ids, use_cache=False).logits, text)


@pytest.mark.first("llama", "qwen3_moe", "qwen3_5", "gemma3", "mistral3")
@pytest.mark.parametrize("family", FAMILIES)
def test_the_page_of_families_says_what_comes_back(tmp_path, family):
    row = whole_table.comes_back(family, tmp_path)
    assert any(line.startswith(row) for line in whole_table.PAGE.read_text().splitlines())


@pytest.mark.first("qwen3_5")
@pytest.mark.parametrize("family", FAMILIES)
def test_the_page_of_families_says_how_a_base_can_be_trained(tmp_path, family):
    pytest.importorskip("peft")
    row = f"| {family} |"
    lines = [line for line in whole_table.PAGE.read_text().splitlines() if line.startswith(row)]
    assert any(line.endswith(whole_table.runs(family, tmp_path)) for line in lines)


# What the trained class has no place for


def with_mtp(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Heads that predict later tokens, as Qwen's and DeepSeek's files have them."""
    more = {
        "mtp.layers.0.self_attn.q_proj.weight": torch.randn(32, 32).bfloat16(),
        "mtp.fc.weight": torch.randn(32, 64),
        "model.layers.2.enorm.weight": torch.randn(32).bfloat16(),
        "model.layers.2.shared_head.head.weight": torch.randn(96, 32).bfloat16(),
        "model.layers.2.mlp.experts.11.up_proj.weight": torch.full((16, 32), float("nan")),
    }
    return values | more


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_5", "qwen3_next"])
def test_heads_for_later_tokens_come_along(tmp_path, family):
    base = rewritten(write_base(tmp_path / "base", family), with_mtp)
    spec = spec_of(base)
    assert any("mtp" in note and "as they are" in note for note in spec.notes)
    final = written(spec, tmp_path / "final", torch.float16)
    after = load_file(final / "model.safetensors")
    before = load_file(base / "model.safetensors")
    assert after.keys() == before.keys()
    for name in with_mtp({}):
        assert after[name].dtype == before[name].dtype
        assert torch.equal(after[name].view(torch.uint8), before[name].view(torch.uint8)), name


def test_the_trained_class_alone_is_saved_where_the_config_says_so(tmp_path):
    base = write_base(tmp_path / "base", "qwen3_5")
    spec = spec_of(base, keep_untrained=False)
    assert any("left out" in note for note in spec.notes)
    final = written(spec, tmp_path / "final")
    names = load_file(final / "model.safetensors").keys()
    assert not any("visual" in name or "language_model" in name for name in names)
    assert json_in(final / "config.json")["architectures"] == ["Qwen3_5ForCausalLM"]
    kind = transformers.AutoModelForCausalLM
    assert not kind.from_pretrained(final, output_loading_info=True)[1]["missing_keys"]


def test_experts_of_a_quantised_base_have_their_names_and_no_scales(tmp_path):
    base = rewritten(write_base(tmp_path / "base", "qwen3_moe"), in_blocks_of_fp8)
    changed_config(base, quantization_config=FP8)
    spec = spec_of(base)
    final = written(spec, tmp_path / "final")
    names = load_file(final / "model.safetensors").keys()
    assert (
        names == load_file(write_base(tmp_path / "plain", "qwen3_moe") / "model.safetensors").keys()
    )
    assert "quantization_config" not in json_in(final / "config.json")
    values = transformers.AutoModelForCausalLM.from_pretrained(final, dtype=torch.float32)
    for name, value in values.state_dict().items():
        assert torch.equal(spec.building.weights.read(name).bfloat16().float(), value), name


QUANTISED = {"fp8": (in_blocks_of_fp8, FP8), "compressed": (in_channels_of_fp8, COMPRESSED)}


@pytest.mark.parametrize("method", QUANTISED)
def test_codes_that_are_not_trained_come_back_as_their_values(tmp_path, method):
    if method == "compressed":
        pytest.importorskip("compressed_tensors")
    quantise, config = QUANTISED[method]
    more = {
        "mtp.layers.0.q_proj.weight": torch.randn(20, 16),
        "mtp.layers.0.mlp.experts.11.up_proj.weight": torch.randn(24, 32),
        "mtp.norm.weight": torch.randn(16).bfloat16(),
    }
    base = rewritten(
        write_base(tmp_path / "base", "qwen3_moe"), lambda values: quantise(values | more)
    )
    changed_config(base, quantization_config=config)
    final = load_file(written(spec_of(base), tmp_path / "final") / "model.safetensors")
    plain = load_file(write_base(tmp_path / "plain", "qwen3_moe") / "model.safetensors")
    assert final.keys() == plain.keys() | more.keys()
    for name, value in more.items():
        error = (final[name].float() - value.float()).abs().max() / value.abs().max()
        assert final[name].dtype == torch.bfloat16
        assert error < 2**-4, name
    assert torch.equal(final["mtp.norm.weight"], more["mtp.norm.weight"])
    assert spec_of(base, keep_untrained=False)


def test_codes_that_nothing_dequantises_are_an_error(tmp_path):
    base = rewritten(write_base(tmp_path / "base", "llama"), in_blocks_of_fp8)
    more = {"mtp.layers.0.q_proj.weight": torch.zeros(16, 16, dtype=torch.float8_e4m3fn)}
    rewritten(base, lambda values: values | more)
    changed_config(base, quantization_config=FP8)
    with pytest.raises(ConfigError, match=r"mtp.*keep_untrained"):
        spec_of(base)
    assert spec_of(base, keep_untrained=False)


WIDE = {"deepseek_v3": "e_score_correction_bias", "qwen3_next": "A_log", "qwen3_5": "A_log"}


@pytest.mark.parametrize("family", WIDE)
def test_what_a_base_in_16_bits_has_in_32_is_not_narrowed(tmp_path, family):
    def widened(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {n: v.float() * 1.0001 if WIDE[family] in n else v for n, v in values.items()}

    base = rewritten(write_base(tmp_path / "base", family), widened)
    assert_equal_files(base, written(spec_of(base), tmp_path / "final"))


@pytest.mark.parametrize("family", ["llama", "qwen3_5", "mistral3"])
def test_a_tied_head_that_is_stored_twice_comes_back_twice(tmp_path, family):
    more = {"text_config": {"tie_word_embeddings": True}} if family in MULTIMODAL else {}
    base = write_base(tmp_path / "base", family, tie_word_embeddings=True, **more)

    def twice(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        table = next(name for name in values if name.endswith("embed_tokens.weight"))
        return values | {"lm_head.weight": values[table].clone()}

    assert_equal_files(rewritten(base, twice), final := written(spec_of(base), tmp_path / "final"))
    kind = getattr(transformers, json_in(final / "config.json")["architectures"][0])
    assert not kind.from_pretrained(final, output_loading_info=True)[1]["unexpected_keys"]


def test_any_dtype_and_shape_comes_along(tmp_path):
    more = {
        "mtp.codes": torch.randn(4, 4).to(torch.float8_e4m3fn),
        "mtp.scale": torch.arange(4, dtype=torch.uint8).view(torch.float8_e8m0fnu),
        "mtp.words": torch.tensor(7),
        "mtp.empty": torch.empty(0, 3),
        "mtp.mask": torch.tensor([True, False]),
        "mtp.turns": torch.randn(2, dtype=torch.complex64),
    }
    base = rewritten(write_base(tmp_path / "base", "llama"), lambda values: values | more)
    written(spec_of(base), tmp_path / "final")
    after = load_file(tmp_path / "final" / "model.safetensors")
    for name, value in more.items():
        assert after[name].shape == value.shape and after[name].dtype == value.dtype
        bytes_of = [one.reshape(-1).view(torch.uint8) for one in (after[name], value)]
        assert torch.equal(*bytes_of), name


def test_numbers_of_four_bits_are_an_error(tmp_path):
    more = torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    base = rewritten(write_base(tmp_path, "llama"), lambda values: values | {"mtp.codes": more})
    with pytest.raises(ConfigError, match=r"mtp\.codes.*F4"):
        spec_of(base)


def test_tensors_that_only_transformers_names_so_are_noted(tmp_path):
    base = write_base(tmp_path / "base", "sarvam_moe")
    assert any("query_key_value" in name for name in load_file(base / "model.safetensors"))
    spec = spec_of(base)
    assert any("query_key_value" in note and "alone reads" in note for note in spec.notes)
    final = written(spec, tmp_path / "final")
    kind = transformers.AutoModelForCausalLM
    theirs = kind.from_pretrained(base).state_dict()
    for name, value in kind.from_pretrained(final).state_dict().items():
        assert torch.equal(theirs[name], value), name


@pytest.mark.first("llama", "qwen3_moe", "qwen3_5", "gemma3", "mistral3")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_tensor_is_written_from_its_own_sources_alone(tmp_path, family, monkeypatch):
    counted = count_reads(monkeypatch)
    base = rewritten(write_base(tmp_path, family), with_mtp)
    spec = spec_of(base)
    given = given_tensors(spec, ALONE)
    stored = counted[-1]
    spec.building.weights.release()
    stored.read = 0
    entries = exported(spec, given, ALONE)
    assert stored.read == 0
    assert {name for name in with_mtp({})} <= {entry.name for entry in entries}
    for entry in entries:
        values = [part.value for part in entry.parts()]
        own = 1 if entry.key == CARRIED else 3  # one source may hold several of the model's
        assert stored.read <= own * sum(value.nbytes for value in values), entry.name
        stored.read = 0


@pytest.mark.parametrize("family", WITH_IMAGES_ALONE)
def test_a_tiny_copy_has_the_tensor_plan_of_the_blocks_that_it_runs(tmp_path, family):
    small = spec_of(write_base(tmp_path, family)).tiny.copy
    assert small is not None
    copy = small(2, 2)
    assert copy.blocks and copy.language.tensor_plan


# Settings


def with_head(folder: Path, kind: Any, **more: Any) -> Path:
    """A base that its own class saved with another head, or none."""
    write_base(folder / "first", "llama", tie_word_embeddings=True, **more)
    model = kind.from_pretrained(folder / "first", dtype=torch.bfloat16)
    model.save_pretrained(folder / "base")
    return folder / "base"


HEADS = ["AutoModel", "AutoModelForSequenceClassification"]


@pytest.mark.parametrize("kind", HEADS)
def test_a_base_with_another_head_comes_back_as_what_was_trained(tmp_path, kind):
    base = with_head(tmp_path, getattr(transformers, kind))
    spec = spec_of(base)
    final = written(spec, tmp_path / "final")
    assert_equal_files(base, final)
    assert json_in(final / "config.json")["architectures"] == ["LlamaForCausalLM"]
    model = transformers.AutoModelForCausalLM.from_pretrained(final)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(base)
    ids = torch.arange(10, 22)[None]
    assert torch.equal(model.eval()(ids).logits, theirs.eval()(ids).logits)
    pytest.importorskip("peft")
    files = adapted(spec, AdapterSection(r=2, alpha=4)).files.exported()
    assert files.opens == "peft.AutoPeftModelForCausalLM.from_pretrained"


def test_code_and_templates_in_folders_come_along(tmp_path):
    base = write_base(tmp_path / "base", "llama")
    kept = {
        "custom_generate/generate.py",
        "modeling_more.py",
        "layers/deep/attention.py",
        "additional_chat_templates/tools.jinja",
        "tokenizer.model.v3",
    }
    others = {"original/params.json", ".cache/more.py", "onnx/model.txt"}
    for name in (*kept, *others):
        (base / name).parent.mkdir(parents=True, exist_ok=True)
        (base / name).write_text("x")
    spec = spec_of(base)
    final = written(spec, tmp_path / "final")
    assert spec.files.base is not None
    spec.files.base.save_tokenizer_files(final)
    names = {path.relative_to(final).as_posix() for path in final.rglob("*") if path.is_file()}
    assert names & (kept | others) == kept


def test_a_base_that_cant_be_downloaded_is_a_config_error(monkeypatch):
    def download(name: str, **options: Any) -> str:
        raise OSError("no network")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(ConfigError, match="me/tiny"):
        named_base.folder_of(ModelSection(name_or_path="me/tiny"))


def test_the_hub_is_asked_for_weights_once_and_for_what_comes_along(tmp_path, monkeypatch):
    base = write_base(tmp_path, "llama")
    requests: dict[str, Any] = {}

    def download(name: str, **options: Any) -> str:
        requests.update(options)
        return str(base)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    named_base.folder_of(ModelSection(name_or_path="me/tiny"))
    patterns = {key: requests[f"{key}_patterns"] for key in ("allow", "ignore")}
    names = [
        *("model.safetensors-00001-of-00002.safetensors", "model.safetensors.index.json"),
        *("tokenizer.model.v3", "chat_template.jinja", "custom_generate/generate.py"),
        *("processor_config.json", "additional_chat_templates/tools.jinja"),
        *("original/model.safetensors", "consolidated.safetensors", "metal/model.bin"),
    ]
    filtered = huggingface_hub.utils.filter_repo_objects(
        names, allow_patterns=patterns["allow"], ignore_patterns=patterns["ignore"]
    )
    assert list(filtered) == names[:-3]


def test_what_training_changes_in_a_config_is_all_that_changes(tmp_path):
    base = write_base(tmp_path / "base", "qwen3_5", text_config={"tie_word_embeddings": False})
    path = base / "config.json"
    stated = json_in(path) | {"a_key_of_tomorrow": [1, {"b": None}], "torch_dtype": "bfloat16"}
    stated.pop("dtype", None)
    path.write_text(json.dumps(stated))
    final = written(spec_of(base), tmp_path / "final", torch.float32)
    result = json_in(final / "config.json")
    assert result.pop("torch_dtype") == "float32"
    stated.pop("torch_dtype")
    assert result == stated


def test_a_head_that_its_files_untie_is_untied_in_the_result(tmp_path):
    base = write_base(tmp_path / "base", "qwen3_5", tie_word_embeddings=True)
    head = {"lm_head.weight": torch.randn(96, 32).bfloat16()}
    rewritten(base, lambda values: values | head)
    final = written(spec_of(base), tmp_path / "final")
    assert_equal_files(base, final)
    kind = transformers.AutoModelForImageTextToText
    model = kind.from_pretrained(final)
    assert torch.equal(model.lm_head.weight, head["lm_head.weight"])


def test_what_is_true_of_the_base_alone_does_not_come_along(tmp_path):
    base = write_base(tmp_path / "base", "llama")
    for name in ("README.md", "trainer_state.json", "hf_quant_config.json", "tokenizer.json"):
        (base / name).write_text("{}")
    (base / "original").mkdir()
    final = written(spec_of(base), tmp_path / "final")
    names = {path.name for path in final.iterdir()}
    own = {"config.json", "generation_config.json", "manifest.json", "model.safetensors"}
    assert names == own


# The way back, and what guards it


def test_a_tensor_that_is_lost_on_the_way_back_is_an_error(tmp_path, monkeypatch):
    base = write_base(tmp_path / "base", "qwen3_5_moe")
    pieces_of = way_back.pieces_of

    def without_one(*arguments: Any) -> Any:
        lost = "experts.11.up_proj"
        return {
            name: tuple(piece for piece in pieces if lost not in piece.name)
            for name, pieces in pieces_of(*arguments).items()
        }

    monkeypatch.setattr("trainer.models.pretrained.reader.pieces_of", without_one)
    with pytest.raises(ConfigError, match=r"mlp\.experts"):
        written(spec_of(base), tmp_path / "final")


def test_a_base_that_is_gone_at_the_end_is_said(tmp_path):
    base = write_base(tmp_path / "base", "qwen3_5")
    spec = spec_of(base)
    entries = exported(spec, [], ALONE)
    spec.building.weights.release()
    shutil.rmtree(base)
    with pytest.raises(DiskError, match=r"base.*visual.*start of the run"):
        checkpoint.export(tmp_path / "final", entries, checkpoint.ModelFolder(), ALONE)


@pytest.mark.parametrize("stated", ["pipeline", "AutoConfig", "NoSuchModel"])
def test_a_name_that_is_no_model_is_not_called(tmp_path, stated):
    base = changed_config(write_base(tmp_path / "base", "qwen3_5"), architectures=[stated])
    assert_equal_files(base, written(spec_of(base), tmp_path / "final"))


def test_a_file_without_what_comes_along_is_an_error(tmp_path):
    base = write_base(tmp_path / "base", "qwen3_5")
    spec = spec_of(base)
    final = written(spec, tmp_path / "final")
    rewritten(final, lambda values: {n: v for n, v in values.items() if "visual" not in n})
    assert spec.files.base is not None
    with pytest.raises(DiskError, match="visual"):
        spec.files.base.check(final)


# Adapters


@pytest.mark.parametrize("family", WITH_IMAGES_ALONE)
def test_an_adapter_opens_on_a_class_that_exists_with_images_alone(tmp_path, family):
    peft = pytest.importorskip("peft")
    base = write_base(tmp_path / "base", family)
    spec = adapted(spec_of(base), AdapterSection(r=2, alpha=4))
    files = spec.files.exported()
    assert files.opens == "peft.AutoPeftModel.from_pretrained"
    final = tmp_path / "final"
    model = peft.get_peft_model(
        transformers.AutoModelForImageTextToText.from_pretrained(base, dtype=torch.float32),
        peft.LoraConfig(task_type="CAUSAL_LM", target_modules=r".*language_model.*\.q_proj"),
    )
    model.save_pretrained(final)
    ids = torch.arange(10, 22)[None]
    for task in ("CAUSAL_LM", None):  # as PEFT writes it with a task, and as we do
        if task is None:
            saved = json_in(final / "adapter_config.json")
            files.save_config(final, None)
            config = json_in(final / "adapter_config.json")
            own = {key: config[key] for key in ("task_type", "auto_mapping")}
            (final / "adapter_config.json").write_text(json.dumps(saved | own))
        again = opened(final, dtype=torch.float32)
        assert torch.equal(again(ids).logits, model.eval()(ids).logits)


@pytest.mark.parametrize("family", ["qwen3_5", "llama4", "qwen3_5_moe"])
def test_an_adapter_names_the_modules_of_the_whole_model(tmp_path, family):
    peft = pytest.importorskip("peft")
    base = write_base(tmp_path / "base", family)
    spec = adapted(spec_of(base), AdapterSection(r=2, alpha=4))
    files = spec.files.exported()
    assert files.opens == "peft.AutoPeftModel.from_pretrained"
    files.save_config(tmp_path, None)
    config = peft.LoraConfig.from_pretrained(str(tmp_path))
    assert all("language_model" in name for name in config.target_modules)
