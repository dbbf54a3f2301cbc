"""What is carried with a known difference, what goes to files, and what --partial never drops."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import yaml

from trainer.command.import_config import main
from trainer.config import load
from trainer.config.keys.hints import OTHER_NAMES
from trainer.config.sections.adapter import QuantizeSection
from trainer.errors import ConfigError
from trainer.tools.importers.reading import read_file, read_flags
from trainer.tools.importers.tables import read_table, rows_of, shared_rows, table
from trainer.tools.importers.translate import Draft, translate

ALPACA = [{"path": "a", "type": "alpaca"}]
CHATS = [{"path": "a", "type": "chat_template"}]
RATE = {"learning_rate": 1e-4}


def written(folder: Path, system: str, keys: dict, partial: bool = False) -> Draft:
    path = folder / "theirs.yml"
    more = {"do_train": True} if system == "llamafactory" else {}
    path.write_text(yaml.safe_dump({**more, **RATE, **keys}))
    return translate(system, read_file(path), folder, partial)


def noted(draft: Draft) -> dict[str, str]:
    return {line.partition(" ")[0]: "; ".join(texts) for line, texts in draft.notes.items()}


def at_rank(text: str, partial: bool = True) -> Draft:
    flags = f"--model_name_or_path m --learning_rate 1e-4 {text}"
    return translate("trainer", read_flags(shlex.split(flags)), Path(), partial)


def test_peft_by_another_name_is_lora():
    """As in PEFT's own scripts; it trained all parameters, as a key that is not known."""
    text = "--use_peft_lora True --lora_r 4 --lora_alpha 8 --lora_dropout 0 --lora_target_modules q"
    adapter = load(at_rank(text, partial=False).made).trainer.adapter
    assert adapter is not None and (adapter.r, adapter.targets) == (4, ["q"])


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("--with_lora true --lora_r 4", "lora_r"),
        ("--lora_r 4", "lora_r"),
        ("--peft lora", "peft"),
        ("--my_adapter lora", "my_adapter"),
        ("--lora_something 3", "lora_something"),
        ("--unfrozen_layers 4", "unfrozen_layers"),
        ("--freeze_backbone true", "freeze_backbone"),
        ("--completion_only_loss false", "completion_only_loss"),
        ("--loss_type dft", "loss_type"),
    ],
)
def test_partial_drops_no_key_that_decides_what_is_trained(text: str, key: str):
    """Else what is left trains all parameters, or on another loss."""
    with pytest.raises(ConfigError) as caught:
        at_rank(text)
    assert key in {problem.place for problem in caught.value.problems}
    assert "--partial" in caught.value.render()


@pytest.mark.parametrize("system", ["arguments", "axolotl", "llamafactory"])
def test_a_key_with_a_counterpart_is_not_listed_as_without_effect(system: str):
    """`logging_steps` was, though a config with it is told of `trainer.log.every`."""
    rules = table(system)
    assert not [key for key in OTHER_NAMES if key in rules and rules[key].section == "listed"]


@pytest.mark.parametrize(
    ("keys", "every"),
    [
        ({"logging_steps": 1}, 1),
        ({"logging_steps": 7, "logging_strategy": "steps"}, 7),
        ({"logging_steps": 0.05, "max_steps": 200}, 10),
        ({"logging_steps": 0.05}, None),
        ({"logging_steps": 7, "logging_strategy": "epoch"}, None),
        ({"logging_strategy": "no"}, None),
        ({}, None),
    ],
)
@pytest.mark.parametrize("system", ["trainer", "axolotl", "llamafactory"])
def test_how_often_it_logs_is_carried(tmp_path: Path, system: str, keys: dict, every: int | None):
    names = {"axolotl": "base_model"}
    model = {names.get(system, "model_name_or_path"): "m"}
    draft = written(tmp_path, system, {**model, **keys}, partial=True)
    assert draft.get("trainer.log.every") == every
    assert not {*keys, "logging_steps"} & {line.partition(" ")[0] for line in draft.lost}


@pytest.mark.parametrize("system", ["axolotl", "llamafactory"])
def test_lora_plus_is_a_group_of_parameters(tmp_path: Path, system: str):
    lora = {"adapter": "lora", "lora_r": 8, "lora_alpha": 16, "lora_target_linear": True}
    lora |= {"base_model": "m", "datasets": CHATS}
    if system == "llamafactory":
        lora = {"model_name_or_path": "m", "finetuning_type": "lora"}
    draft = written(tmp_path, system, {**lora, "loraplus_lr_ratio": 16}, partial=True)
    assert draft.get("trainer.parameter_groups") == [{"names": "*lora_B*", "lr_multiplier": 16}]


DECIDES = [
    ("axolotl", {"unfrozen_parameters": ["^lm_head"]}, "unfrozen_parameters"),
    ("axolotl", {"datasets": ALPACA, "train_on_inputs": True}, "train_on_inputs"),
    ("axolotl", {"plugins": ["axolotl.integrations.kd.KDPlugin"]}, "plugins"),
    ("axolotl", {"relora": True}, "relora"),
    ("axolotl", {"peft_layers_to_transform": [1]}, "peft_layers_to_transform"),
    (
        "axolotl",
        {"datasets": [{**CHATS[0], "roles_to_train": ["user"]}]},
        "datasets[0].roles_to_train",
    ),
    ("llamafactory", {"finetuning_type": "full", "use_galore": True}, "use_galore"),
    ("llamafactory", {"finetuning_type": "full", "use_dft_loss": True}, "use_dft_loss"),
    ("llamafactory", {"pissa_init": True}, "pissa_init"),
    ("llamafactory", {"lora_target": ".*q_proj"}, "lora_target"),
    ("llamafactory", {"train_from_scratch": True}, "train_from_scratch"),
]
"""Keys that decide what is trained: `--partial` drops none of them."""
UNSUPPORTED = [
    ("llamafactory", {"quantization_bit": 3}, "quantization_bit"),
    ("axolotl", {"load_in_8bit": True}, "load_in_8bit"),
    ("axolotl", {"adapter": "qlora", "load_in_8bit": True}, "load_in_8bit"),
    ("axolotl", {"gptq": True}, "gptq"),
    ("axolotl", {"model_quantization_config": "Mxfp4Config"}, "model_quantization_config"),
    ("trainer", {"use_4bit_quantization": True}, "use_4bit_quantization"),
    ("trainer", {"load_in_4bit": True}, "load_in_4bit"),
    ("llamafactory", {"stage": "kto"}, "stage"),
    ("axolotl", {"zzz": 1}, "zzz"),
]
"""Quantisation, preferences and keys that are not known."""


@pytest.mark.parametrize(
    ("system", "keys", "key", "partial"),
    [*((*case, True) for case in DECIDES), *((*case, False) for case in UNSUPPORTED)],
)
def test_a_key_that_is_not_imported_is_named(
    tmp_path: Path, system: str, keys: dict, key: str, partial: bool
):
    keys = {"base_model" if system == "axolotl" else "model_name_or_path": "m", **keys}
    with pytest.raises(ConfigError) as caught:
        written(tmp_path, system, keys, partial=partial)
    places = [problem.place for problem in caught.value.problems]
    assert places[-1] == key
    if partial:
        assert places == ["not imported", key]


def test_speed_alone_is_not_what_is_trained(tmp_path: Path):
    """Kernels of adapters have an adapter's name and decide nothing."""
    keys = {"base_model": "m", "lora_mlp_kernel": True, "liger_rope": True, "flash_attention": True}
    draft = written(tmp_path, "axolotl", keys)
    assert noted(draft).keys() == {"lora_mlp_kernel", "liger_rope"}
    assert draft.made["trainer"]["model"]["attention"] == "flash_attention_2"


@pytest.mark.parametrize("words", ["--bf16 true --bf16 True", "--a 1 --a=1", "--a b c --a b c"])
def test_an_argument_given_twice_with_one_value_is_no_error(words: str):
    assert len(read_flags(words.split())) == 1


@pytest.mark.parametrize("words", ["--a 1 --a 2", "--a 1 --a true", "--a b c --a b"])
def test_an_argument_given_twice_with_two_values_is(words: str):
    with pytest.raises(ConfigError, match="--a"):
        read_flags(words.split())


@pytest.mark.parametrize(
    ("system", "keys", "note"),
    [
        ("axolotl", {"optimizer": "adamw_bnb_8bit"}, ("optimizer", "8 bits")),
        ("trainer", {"optim": "paged_adamw_8bit"}, ("optim", "float32")),
        ("trainer", {"torch_dtype": "bfloat16", "bf16": True}, ("torch_dtype", "bfloat16")),
        ("axolotl", {"bf16": True}, ("bf16", "float32")),
        ("axolotl", {"datasets": ALPACA, "val_set_size": 500}, ("val_set_size", "number of rows")),
        ("trainer", {"use_liger_kernel": True}, ("use_liger_kernel", "speed")),
        ("trainer", {"eval_strategy": "epoch", "max_steps": 9}, ("eval_strategy", "--dry-run")),
        (
            "trainer",
            {"dataset_name": "a/b", "eval_strategy": "steps", "eval_steps": 5},
            ("eval_steps", "no rows"),
        ),
    ],
)
def test_a_known_difference_is_carried_and_noted(tmp_path: Path, system, keys, note):
    keys = {"base_model" if system == "axolotl" else "model_name_or_path": "m", **keys}
    draft = written(tmp_path, system, keys)
    assert draft.lost == {} and note[1] in noted(draft)[note[0]]
    load(draft.made)


LORA = {"lora_r": 8, "lora_alpha": 16, "lora_dropout": 0.0}


@pytest.mark.parametrize(
    ("system", "keys", "entry"),
    [
        ("axolotl", LORA | {"adapter": "lora", "load_in_8bit": True}, "load_in_8bit"),
        ("llamafactory", {"quantization_bit": 8}, "quantization_bit"),
        ("trainer", LORA | {"use_peft": True, "load_in_8bit": True}, "load_in_8bit"),
    ],
)
def test_a_base_in_eight_bits_is_carried(tmp_path: Path, system: str, keys: dict, entry: str):
    axolotl = {"base_model": "m", "lora_target_linear": True}
    keys |= axolotl if system == "axolotl" else {"model_name_or_path": "m"}
    if system == "trainer":
        keys["lora_target_modules"] = "all-linear"
    draft = written(tmp_path, system, keys)
    assert "inputs" in noted(draft)[entry]
    adapter = load(draft.made).trainer.adapter
    assert adapter is not None and adapter.quantize == QuantizeSection(type="int8")


@pytest.mark.parametrize(
    ("system", "keys"),
    [
        ("axolotl", {"base_model": "m", "bf16": "full"}),
        ("llamafactory", {"model_name_or_path": "m", "finetuning_type": "full", "pure_bf16": True}),
    ],
)
def test_weights_kept_in_bfloat16_stay_so(tmp_path: Path, system: str, keys: dict):
    made = written(tmp_path, system, keys).made
    bf16 = made["bf16"]
    assert bf16["enabled"] and bf16["bf16_master_weights_and_grads"]
    assert bf16["bf16_optimizer_states"] and made["zero_optimization"]["stage"] == 1


@pytest.mark.parametrize("stop", [{"early_stopping_patience": 3}, {"load_best_model_at_end": True}])
def test_evaluation_that_ends_or_chooses_a_run_is_more_than_a_note(tmp_path: Path, stop: dict):
    keys = {"model_name_or_path": "m", "dataset_name": "a/b", "eval_strategy": "steps"}
    with pytest.raises(ConfigError) as caught:
        written(tmp_path, "trainer", {**keys, "eval_steps": 5, **stop})
    assert "eval_steps" in {problem.place for problem in caught.value.problems}


@pytest.mark.parametrize(
    ("model", "template", "ours"),
    [
        ("meta-llama/Meta-Llama-3-8B-Instruct", "llama3", "llama3"),
        ("Qwen/Qwen2.5-7B-Instruct", "qwen", None),
        ("here/qwen2_5-0.5b", "qwen", None),
        ("Qwen/Qwen2-7B-Instruct", "qwen", "chatml"),
        ("Qwen/Qwen2.5-Math-7B", "qwen", "chatml"),
        ("Qwen/Qwen3-8B", "qwen3", "qwen3"),
        ("Qwen/Qwen3-4B-Instruct-2507", "qwen3_nothink", "chatml"),
        ("google/gemma-2-9b-it", "gemma", "gemma3"),
        ("microsoft/Phi-3-mini-4k-instruct", "phi", None),
        ("deepseek-ai/DeepSeek-V3", "deepseek3", "deepseek"),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", "deepseekr1", "deepseek-r1"),
        ("openai/gpt-oss-20b", "gpt_oss", "gpt-oss"),
    ],
)
def test_a_template_by_name(tmp_path: Path, model: str, template: str, ours: str | None):
    keys = {"model_name_or_path": model, "template": template}
    draft = written(tmp_path, "llamafactory", keys)
    assert draft.made["trainer"].get("data", {}).get("chat_template") == ours
    assert ours is not None or "own" in draft.carried[f'template "{template}"'][0]


TEMPLATE = "{% for m in messages %}{{ m.role + m.content + '<|im_end|>' }}{% endfor %}"


def test_a_template_in_their_config_goes_to_a_file(tmp_path: Path, capsys):
    source, target = tmp_path / "theirs.yml", tmp_path / "ours.json"
    keys = {"model_name_or_path": "m", "dataset_name": "a/b", "chat_template": TEMPLATE}
    source.write_text(yaml.safe_dump({**RATE, **keys, "eos_token": "<|im_end|>"}))
    command = ["--from", "trainer", str(source), "--output", str(target)]
    assert main(command, "meshloom import") == 0
    place = load(target).trainer.data.chat_template
    assert place == str(target.with_suffix(".jinja")) and Path(place).read_text() == TEMPLATE
    assert main(command, "meshloom import") == 0  # the same text again
    report = capsys.readouterr().out
    assert "known differences" in report and "eos_token" in report
    Path(place).write_text("of the user")
    target.unlink()
    assert main(command, "meshloom import") == 64
    assert Path(place).read_text() == "of the user" and not target.exists()
    assert main(command[:3], "meshloom import") == 64
    assert "--output" in capsys.readouterr().err


def test_the_file_of_a_template_is_never_that_of_the_config(tmp_path: Path):
    source, target = tmp_path / "theirs.yml", tmp_path / "ours.jinja"
    keys = {"model_name_or_path": "m", "dataset_name": "a/b", "chat_template": TEMPLATE}
    source.write_text(yaml.safe_dump({**RATE, **keys}))
    assert main(["--from", "trainer", str(source), "--output", str(target)], "import") == 0
    place = json.loads(target.read_text())["trainer"]["data"]["chat_template"]
    assert place != str(target) and Path(place).read_text() == TEMPLATE


LLAMA_FACTORY = {"model_name_or_path": "m"}
OF_THE_HUB = {"model_name_or_path": "m", "dataset_name": "a/b"}
AXOLOTL = {"base_model": "m", "datasets": CHATS, "chat_template": "llama3"}


@pytest.mark.parametrize(
    ("system", "keys", "place"),
    [
        *(
            ("llamafactory", {**LLAMA_FACTORY, "template": name}, "template")
            for name in ("alpaca", "vicuna", "phi", "llama3-mine", "x" * 500, 3)
        ),
        *(
            ("trainer", {**OF_THE_HUB, "chat_template": template}, "chat_template")
            for template in ({"default": TEMPLATE}, [TEMPLATE], 3, True)
        ),
        *(  # only somewhere in the template
            ("trainer", {**OF_THE_HUB, "chat_template": TEMPLATE, "eos_token": token}, "eos_token")
            for token in ("<|im_start|>", "m", "role", "{", "<|other|>")
        ),
        ("trainer", {**OF_THE_HUB, "eos_token": "<|im_end|>"}, "eos_token"),
        (
            "axolotl",
            {**AXOLOTL, "special_tokens": {"eos_token": "</s>"}},
            "special_tokens.eos_token",
        ),
    ],
)
def test_a_template_or_an_end_token_that_none_here_writes_is_lost(
    tmp_path: Path, system: str, keys: dict, place: str
):
    with pytest.raises(ConfigError) as caught:
        written(tmp_path, system, keys)
    assert [problem.place for problem in caught.value.problems] == ["not imported", place]


@pytest.mark.parametrize(
    ("system", "keys"),
    [
        ("llamafactory", {**LLAMA_FACTORY, "template": ""}),
        ("axolotl", {**AXOLOTL, "special_tokens": {"eos_token": "<|eot_id|>", "pad_token": "x"}}),
    ],
)
def test_no_template_and_its_own_end_token_lose_nothing(tmp_path: Path, system: str, keys: dict):
    assert written(tmp_path, system, keys).lost == {}


def test_files_are_found_from_the_root_of_a_repository(tmp_path: Path):
    """As LLaMA-Factory's configs name them, which stand two folders below it."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps({"d": {"file_name": "d.json"}}))
    below = tmp_path / "examples" / "train_lora"
    below.mkdir(parents=True)
    (tmp_path / "examples" / "ds.json").write_text('{"zero_optimization": {"stage": 2}}')
    keys = {"model_name_or_path": "m", "dataset": "d", "deepspeed": "examples/ds.json"}
    made = written(below, "llamafactory", keys).made
    assert made["trainer"]["data"]["path"] == str(tmp_path / "data" / "d.json")
    assert made["zero_optimization"]["stage"] == 2


MIXTURES = {
    "dataset_mixture": {"datasets": [{"id": "a/b", "config": "c", "split": "s", "weight": 1.0}]},
    "dataset_mixer": {"a/b": 1.0},
    "datasets": [{"path": "a/b", "name": "c", "split": "s"}],
}


@pytest.mark.parametrize("key", MIXTURES)
def test_mixtures_of_trl_and_of_the_alignment_handbook(tmp_path: Path, key: str):
    keys = {"model_name_or_path": "m", key: MIXTURES[key]}
    if key == "dataset_mixer":
        keys |= {"dataset_splits": ["s_train"], "dataset_configs": ["c"]}
    data = load(written(tmp_path, "trainer", keys).made).trainer.data
    assert (data.path, data.name, data.evaluation_fraction) == ("a/b", "c", 0.0)
    assert data.split == ("s_train" if key == "dataset_mixer" else "s") and data.loss_on == "all"


@pytest.mark.parametrize(
    "keys",
    [
        {"dataset_mixture": {"datasets": [{"id": "a", "weight": 0.5}]}},
        {"dataset_mixture": {"datasets": [{"id": "a", "columns": ["prompt", "x"]}]}},
        {"dataset_mixture": {"datasets": [{"id": "a", "revision": "x"}]}},
        {"dataset_mixture": {"datasets": "a"}},
        {"dataset_mixture": {"datasets": [{"id": "a"}], "test_split_size": "some"}},
        {"dataset_mixture": [1]},
        {"dataset_mixer": ["a"]},
        {"dataset_mixer": {"a": 0.5}},
        {"dataset_mixer": {"a": 1, "b": 1}, "dataset_configs": ["c"]},
        {"datasets": [{"path": "a", "data_files": "x"}]},
        {"datasets": {"path": "a"}},
    ],
)
def test_mixtures_that_are_none_of_these(tmp_path: Path, keys: dict):
    with pytest.raises(ConfigError) as caught:
        written(tmp_path, "trainer", {"model_name_or_path": "m", **keys})
    assert caught.value.problems[-1].place.partition(".")[0] in keys


def test_axes_of_devices_keep_the_batch_as_large(tmp_path: Path):
    keys = {"base_model": "m", "tensor_parallel_size": 2, "context_parallel_size": 2}
    made = written(tmp_path, "axolotl", keys | {"dp_shard_size": 4}).made
    assert made["tensor_parallel"]["autotp_size"] == made["sequence_parallel_size"] == 2
    assert made["trainer"]["engine"] == "mesh"
    draft = written(tmp_path, "axolotl", keys | {"fsdp_config": {"reshard_after_forward": True}})
    engines = [text for texts in draft.carried.values() for text in texts if "engine" in text]
    assert set(engines) == {'trainer.engine "mesh"'}
    assert "engine" not in written(tmp_path, "axolotl", {"base_model": "m"}).made["trainer"]


@pytest.mark.parametrize("system", ["arguments", "axolotl", "llamafactory"])
def test_a_table_has_one_row_for_a_key_and_repeats_none_that_it_shares(system: str):
    content = read_table(system)
    rows, inner, shared = [*rows_of(content)], [*rows_of(content["inner"])], shared_rows(content)
    assert rows and len(dict(rows)) == len(rows) and len(dict(inner)) == len(inner)
    assert [key for key, row in rows if shared.get(key) == row] == []
