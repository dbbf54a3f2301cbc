"""Configs of other trainers as ours: what is carried over, what is said of the rest, what is
refused.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.messages import shows
from trainer.command.import_config import main
from trainer.config import RuntimeFacts, load, resolve
from trainer.errors import ConfigError
from trainer.tools.importers.reading import read_file, read_flags
from trainer.tools.importers.tables import Table
from trainer.tools.importers.translate import OF_ANSWERS, SYSTEMS, Draft, decides, translate

FOLDER = Path(__file__).parent / "import_config"
FILES = {path.name: path.name.partition("_")[0] for path in sorted(FOLDER.glob("*_*.*"))}


def shipped(name: str, partial: bool = False) -> Draft:
    return translate(FILES[name], read_file(FOLDER / name), FOLDER, partial)


def written(folder: Path, system: str, keys: dict, partial: bool = False) -> Draft:
    path = folder / "theirs.yml"
    path.write_text(
        yaml.safe_dump({"do_train": True, **keys} if system == "llamafactory" else keys)
    )
    return translate(system, read_file(path), folder, partial)


def named(draft: Draft) -> set[str]:
    """Every key that something is said of."""
    message = {
        key.partition(" ")[0] for lines in (draft.carried, draft.lost, draft.notes) for key in lines
    } | {*draft.listed}
    return message | {key.partition(".")[0] for key in message}


def words(lines: dict[str, list[str]], key: str) -> str:
    """What is said of a key."""
    return " | ".join(
        text for name, texts in lines.items() if name.partition(" ")[0] == key for text in texts
    )


@pytest.mark.parametrize("name", FILES)
def test_configs_as_they_are_found_load_and_every_key_of_them_is_named(name: str):
    draft = shipped(name, partial=True)
    config = load(draft.made)
    assert config.trainer.model.name_or_path
    assert read_file(FOLDER / name).keys() - named(draft) == set()
    assert not [
        text for texts in draft.lost.values() for text in texts if text.startswith("not known")
    ]


def test_axolotls_qlora():
    draft = shipped("axolotl_qlora.yml")
    made, data = draft.made, draft.made["trainer"]["data"]
    assert made["trainer"]["adapter"] == {
        "type": "lora",
        "r": 32,
        "alpha": 16,
        "dropout": 0.05,
        "targets": "all-linear",
        "quantize": {"type": "nf4", "double_quant": True},
    }
    assert (made["train_micro_batch_size_per_gpu"], made["gradient_accumulation_steps"]) == (2, 4)
    assert made["optimizer"] == {"type": "AdamW", "params": {"lr": 2e-5, "weight_decay": 0.0}}
    assert (
        made["scheduler"]["type"] == "cosine"
        and made["scheduler"]["params"]["cos_min_ratio"] == 0.0
    )
    assert [(source["path"], source["records"]) for source in data["sources"]] == [
        ("teknium/GPT4-LLM-Cleaned", "alpaca"),
        ("data/chats.jsonl", "chat"),
    ]
    assert data["sources"][1]["chat_column"] == "conversations"
    assert (data["documents"], data["too_long"], data["sequence_length"]) == ("pack", "drop", 2048)
    assert not draft.lost
    assert "float32" in words(draft.notes, "optimizer")
    assert made["trainer"]["evaluation"] == {"every": 0.25} and "every" not in made["trainer"].get(
        "checkpoint", {}
    )
    assert (
        made["scheduler"]["params"]["warmup_num_steps"] == "auto"
        and made["trainer"]["warmup_ratio"] == 0.1
    )


def test_axolotls_fsdp():
    draft = shipped("axolotl_full.yml", partial=True)
    assert {line.partition(" ")[0] for line in draft.lost} == {"load_best_model_at_end"}
    made, section = draft.made, draft.made["trainer"]
    cpu = {"device": "cpu"}
    assert made["zero_optimization"] == {"stage": 2, "offload_param": cpu, "offload_optimizer": cpu}
    assert section["engine"] == "accelerate" and "adapter" not in section
    assert made["scheduler"] == {"type": "constant_with_warmup", "params": {"warmup_num_steps": 20}}
    assert made["optimizer"]["params"]["betas"] == [0.9, 0.95]
    assert section["checkpoint"] == {"every": 50, "keep_last": 3, "keep_best": True}
    assert section["evaluation"] == {"every": 50, "patience": 3, "samples": 10**9}  # all, as theirs
    assert section["data"] == {
        "path": ["books/a.jsonl", "books/b.jsonl"],
        "format": "jsonl",
        "records": "text",
        "text_column": "body",
        "sequence_length": 4096,
        "documents": "concatenate",
        "isolate": True,
        "evaluation_path": "held.jsonl",
        "tokenizer": "my/tokenizer",
    }
    assert section["log"]["trackers"] == ["mlflow"] and section["seed"] == 7


@pytest.mark.parametrize(
    ("keys", "tokens"),
    [
        ({"tiled_mlp": True}, 4096),
        ({"tiled_mlp": True, "tiled_mlp_num_shards": 3, "tiled_mlp_use_original_mlp": True}, 4096),
        ({"tiled_mlp": False}, None),
    ],
)
def test_axolotls_tiles_of_mlps(tmp_path: Path, keys: dict, tokens: int | None):
    keys = {"base_model": "m", "learning_rate": 1e-4, **keys}
    draft = written(tmp_path, "axolotl", keys)
    assert draft.made["trainer"].get("tiled_mlp") == tokens and not draft.lost
    keys = {"tiled_mlp": True, "tiled_mlp_use_original_mlp": False, "base_model": "m"}
    lost = written(tmp_path, "axolotl", keys | {"learning_rate": 1e-4}, partial=True).lost
    assert words(lost, "tiled_mlp_use_original_mlp")


def test_llamafactorys_lora_over_a_deepspeed_file():
    draft = shipped("llamafactory_lora.yaml", partial=True)
    made, section = draft.made, draft.made["trainer"]
    assert made["zero_optimization"]["stage"] == 3 and made["train_batch_size"] == "auto"
    assert (
        made["gradient_accumulation_steps"],
        made["bf16"]["enabled"],
        made["gradient_clipping"],
    ) == (8, True, 1.0)
    assert section["adapter"] == {"type": "lora", "r": 8, "alpha": 16, "targets": "all-linear"}
    assert section["activation_checkpointing"] == "full"
    assert [source["label"] for source in section["data"]["sources"]] == [
        "identity",
        "alpaca_en_demo",
        "mine",
    ]
    assert section["data"]["sources"][0]["path"] == str(FOLDER / "data/identity.json")
    assert section["data"]["sources"][1]["path"] == "someone/alpaca-demo"
    assert section["data"]["sources"][2]["chat_column"] == "messages"
    assert section["data"]["chat_template"] == "llama3" and draft.lost == {}
    assert [source["max_rows"] for source in section["data"]["sources"]] == [1000] * 3


def test_llamafactorys_pretraining():
    section = shipped("llamafactory_pretrain.yaml").made["trainer"]
    assert (section["data"]["documents"], section["data"]["text_column"]) == ("concatenate", "text")
    assert "adapter" not in section and "activation_checkpointing" not in section
    assert section["model"]["attention"] == "sdpa" and "checkpoint" not in section


FLAGS = """--model_name_or_path gpt2 --dataset_name wikitext --dataset_config_name wikitext-2-raw-v1
  --do_train --do_eval --learning_rate 2e-5 --per_device_train_batch_size=4 --fsdp 'full_shard auto_wrap'
  --fsdp_config '{"transformer_layer_cls_to_wrap": ["GPT2Block"]}' --max_steps 1000 --warmup_ratio 0.03
  --lr_scheduler_type cosine --report_to wandb tensorboard --bf16 True --save_strategy steps --save_steps 0.1
  --evaluation_strategy no --output-dir out/gpt2"""


def from_flags(text: str, partial: bool = False) -> Draft:
    return translate("trainer", read_flags(shlex.split(text)), Path(), partial)


def test_arguments_of_the_trainer():
    draft = from_flags(FLAGS)
    made, section = draft.made, draft.made["trainer"]
    assert made["optimizer"]["params"]["lr"] == 2e-5 and made["train_micro_batch_size_per_gpu"] == 4
    assert made["scheduler"]["params"]["warmup_num_steps"] == 30 and section["steps"] == 1000
    assert section["checkpoint"]["every"] == 100 and section["log"]["trackers"] == [
        "wandb",
        "tensorboard",
    ]
    assert (made["zero_optimization"]["stage"], section["engine"]) == (3, "accelerate")
    assert section["run"] == {"name": "gpt2", "folder": "out"}
    assert read_flags(shlex.split(FLAGS)).keys() - named(draft) == set()


def test_arguments_of_trl():
    text = (
        "--model_name_or_path m --dataset_name a/b --packing --max_length 64 --use_peft --lora_r 4"
    )
    section = from_flags(f"{text} --lora_target_modules q_proj v_proj").made["trainer"]
    assert section["data"] == {
        "path": "a/b",
        "sequence_length": 64,
        "documents": "pack",
        "loss_on": "all",
    } | {"evaluation_fraction": 0.0}
    targets = ["q_proj", "v_proj"]
    assert section["adapter"] == {
        "type": "lora",
        "r": 4,
        "alpha": 32,
        "dropout": 0.05,
        "targets": targets,
    }


def test_every_argument_of_the_trainer_has_a_row():
    """So one that a release of transformers adds is found by this test, and not by a user."""
    from transformers import Seq2SeqTrainingArguments

    table = SYSTEMS["trainer"].table
    assert {
        field.name for field in dataclasses.fields(Seq2SeqTrainingArguments)
    } - table.keys() == set()


def test_arguments_that_are_as_by_default_lose_nothing(tmp_path: Path):
    """In a file of all arguments, as the Trainer itself writes them."""
    from transformers import TrainingArguments

    path = tmp_path / "args.json"
    path.write_text(
        TrainingArguments(output_dir="out", learning_rate=1e-4, use_cpu=True).to_json_string()
    )
    draft = translate("trainer", read_file(path), tmp_path)
    assert draft.lost == {} and "use_cpu" in draft.listed
    assert draft.made["optimizer"]["params"]["lr"] == 1e-4
    load(draft.made)


def test_their_defaults_are_written_and_said(tmp_path: Path):
    draft = written(tmp_path, "trainer", {"output_dir": "out"})
    assert (draft.made["trainer"]["epochs"], draft.made["trainer"]["seed"]) == (3.0, 42)
    assert draft.made["scheduler"]["type"] == "linear"
    assert draft.carried["num_train_epochs 3.0 (their default)"] == ["trainer.epochs 3.0"]


def test_a_key_that_is_not_known_is_refused_with_what_is_near_it(tmp_path: Path):
    keys = {"base_model": "m", "learning_rate": 1e-4, "sequence_length": 9, "zzz": False}
    draft = written(tmp_path, "axolotl", keys, partial=True)
    assert "not known" in words(draft.lost, "zzz")
    assert "sequence_len" in words(draft.lost, "sequence_length")
    keys = {"learning_rate": 1, "datasets": [{"path": "a", "typ": "alpaca"}]}
    assert "not known" in words(
        written(tmp_path, "axolotl", keys, partial=True).lost, "datasets[0].typ"
    )
    with pytest.raises(ConfigError, match='datasets\\[0\\].typ: saw "alpaca"'):
        written(tmp_path, "axolotl", keys)


def test_a_deepspeed_file_has_the_last_word(tmp_path: Path):
    base = {
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}},
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": 1},
    }
    (tmp_path / "ds.json").write_text(json.dumps(base))
    keys = {
        "deepspeed": "ds.json",
        "learning_rate": 1e-4,
        "weight_decay": 0.1,
        "gradient_accumulation_steps": 4,
    }
    keys |= {"warmup_steps": 7, "lr_scheduler_type": "cosine", "adam_beta2": 0.9}
    draft = written(tmp_path, "trainer", keys, partial=True)
    assert draft.made["optimizer"] == {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.1}}
    assert draft.made["scheduler"] == {"type": "WarmupLR", "params": {"warmup_num_steps": 7}}
    assert (
        draft.made["gradient_accumulation_steps"] == 2
        and draft.made["trainer"]["weight_decay_excludes"] == "nothing"
    )
    assert "says gradient_accumulation_steps 2" in words(draft.lost, "gradient_accumulation_steps")
    assert "of its own" in words(draft.carried, "lr_scheduler_type")
    shows(words(draft.carried, "adam_beta2"), "DeepSpeed file says")
    assert "gradient_clipping" not in draft.made  # DeepSpeed's own default, not the Trainer's


@pytest.mark.parametrize(
    ("system", "keys", "place"),
    [
        ("llamafactory", {"stage": "ppo"}, "stage"),
        ("llamafactory", {"finetuning_type": "freeze"}, "finetuning_type"),
        ("axolotl", {"rl": "grpo"}, "rl"),
        ("axolotl", {"adapter": "llama-adapter"}, "adapter"),
        ("trainer", {"deepspeed": "nowhere.json"}, "deepspeed"),
        ("axolotl", {"learning_rate": "fast"}, "optimizer.params.lr"),
        ("axolotl", {"warmup_ratio": "some"}, "warmup_ratio"),
        ("trainer", {"max_steps": "all"}, "max_steps"),
        ("trainer", {"fsdp_config": "{"}, "fsdp_config"),
    ],
)
def test_another_training_and_values_that_do_not_fit_are_refused(
    tmp_path: Path, system: str, keys: dict, place: str
):
    with pytest.raises(ConfigError) as caught:
        written(tmp_path, system, keys, partial=True)
    assert caught.value.problems[0].place == place


@pytest.mark.parametrize(
    ("system", "keys", "seen"),
    [
        *(("llamafactory", {"stage": stage}, f'saw "{stage}"') for stage in ("kto", "ppo")),
        (
            "llamafactory",
            {"do_train": None, "infer_backend": "vllm", "template": "llama3"},
            "predicts, chats",
        ),
        (
            "llamafactory",
            {"do_train": False, "do_predict": True, "eval_dataset": "a"},
            "predicts, chats",
        ),
        ("llamafactory", {"vllm_enforce_eager": True}, "inference"),
        ("llamafactory", {"export_dir": "out", "adapter_name_or_path": "a"}, "export of weights"),
        (
            "llamafactory",
            {
                "model": "m",
                "train_dataset": "d.yaml",
                "peft_config": {"name": "lora"},
                "micro_batch_size": 1,
            },
            "second format",
        ),
        *(("axolotl", {"rl": kind}, f'saw "{kind}"') for kind in ("kto", "grpo", "gdpo", "ebft")),
        ("axolotl", {"process_reward_model": True}, "a reward model"),
        (
            "axolotl",
            {"model_type": "AutoModelForSequenceClassification"},
            "a causal language model",
        ),
        ("axolotl", {"diffusion": {"eps": 1e-3}}, "diffusion"),
        (
            "axolotl",
            {"slices": [{"sources": ["a"]}], "merge_method": "slerp"},
            "the merging of models",
        ),
        ("axolotl", {"inference": True}, "inference"),
        ("trainer", {"beta": 0.1, "max_prompt_length": 512}, "DPO, KTO"),
        ("trainer", {"num_generations": 8, "reward_funcs": ["f"]}, "reinforcement learning"),
        ("trainer", {"do_predict": True}, "only predicts"),
        ("trainer", {"export_dir": "x"}, "export of weights"),
    ],
)
@pytest.mark.parametrize("partial", [False, True])
def test_another_training_is_refused_for_what_it_is(
    tmp_path: Path, system: str, keys: dict, seen: str, partial: bool
):
    """Also with --partial: no part of it is fine-tuning."""
    with pytest.raises(ConfigError, match=seen):
        written(tmp_path, system, {"learning_rate": 1e-4, **keys}, partial)


LORA = {"adapter": "lora", "lora_r": 8, "lora_alpha": 16, "lora_target_linear": True}
PEFT = {"use_peft": True, "lora_target_modules": ["q_proj"]}
SETS = [{"path": "a", "type": "chat_template"}]


@pytest.mark.parametrize(
    ("system", "keys", "key"),
    [
        ("trainer", {"use_lora": True}, "use_lora"),
        (
            "trainer",
            {"lora_enable": True, "lora_r": 8, "lora_alpha": 16, "lora_dropout": 0.0},
            "lora_enable",
        ),
        ("trainer", {"q_lora": True}, "q_lora"),
        ("trainer", {"use_peft": True}, "use_peft"),
        ("trainer", {"lora_r": 8}, "lora_r"),
        ("trainer", {**PEFT, "lora_target_modules": [".*q_proj"]}, "lora_target_modules"),
        ("trainer", {"bits": 4}, "bits"),
        ("trainer", {"auto_find_batch_size": True}, "auto_find_batch_size"),
        (
            "trainer",
            {"accelerator_config": {"split_batches": True}},
            "accelerator_config.split_batches",
        ),
        ("trainer", {"average_tokens_across_devices": False}, "average_tokens_across_devices"),
        ("trainer", {"completion_only_loss": False}, "completion_only_loss"),
        ("trainer", {"packing": True, "packing_strategy": "wrapped"}, "packing_strategy"),
        ("trainer", {"lr_scheduler_type": "polynomial"}, "lr_scheduler_type"),
        (
            "trainer",
            {"lr_scheduler_type": "cosine", "lr_scheduler_kwargs": {"num_cycles": 3}},
            "lr_scheduler_kwargs",
        ),
        ("trainer", {"optim": "adafactor"}, "optim"),
        ("trainer", {"fp16": True, "bf16": True}, "fp16"),
        ("trainer", {"dtype": "float16"}, "dtype"),
        ("trainer", {"max_train_samples": 10}, "max_train_samples"),
        ("trainer", {"resume_from_checkpoint": "out/checkpoint-5"}, "resume_from_checkpoint"),
        (
            "axolotl",
            {**LORA, "lora_target_linear": None, "lora_target_modules": ["q.*"]},
            "lora_target_modules",
        ),
        ("axolotl", {**LORA, "lora_target_modules": ["lm_head"]}, "lora_target_modules"),
        (
            "axolotl",
            {**LORA, "loraplus_lr_ratio": 16, "peft_use_dora": True},
            "loraplus_lr_ratio",
        ),
        ("axolotl", {**LORA, "adapter": "qlora"}, "adapter"),
        ("axolotl", {"load_in_4bit": True}, "load_in_4bit"),
        ("axolotl", {**LORA, "load_in_4bit": True}, "load_in_4bit"),
        ("trainer", {"load_in_4bit": True}, "load_in_4bit"),
        ("axolotl", {"unfrozen_parameters": ["^lm_head"]}, "unfrozen_parameters"),
        ("axolotl", {"batch_size": 5, "micro_batch_size": 2}, "batch_size"),
        ("axolotl", {"batch_size": 4, "gradient_accumulation_steps": 2}, "batch_size"),
        (
            "axolotl",
            {"datasets": SETS, "test_datasets": [{**SETS[0], "split": "test"}]},
            "test_datasets",
        ),
        (
            "axolotl",
            {"datasets": [{"path": "a", "type": "alpaca_w_system.load_open_orca"}]},
            "datasets[0].type",
        ),
        ("axolotl", {"eot_tokens": ["[/INST]"]}, "eot_tokens"),
        ("axolotl", {"optimizer": "adamw_torch_4bit"}, "optimizer"),
        (
            "axolotl",
            {"datasets": [*SETS, {"path": "b", "type": "completion"}], "sequence_len": 64},
            "sequence_len",
        ),
        ("axolotl", {"datasets": [{"path": "a", "type": "completion"}]}, "sequence_len"),
        (
            "axolotl",
            {"val_set_size": 0.1, "eval_steps": 5, "save_steps": 5, "load_best_model_at_end": True},
            "load_best_model_at_end",
        ),
        ("trainer", {"optim": "ao_adamw_fp8"}, "optim"),
        (
            "trainer",
            {
                "eval_strategy": "steps",
                "eval_steps": 5,
                "load_best_model_at_end": True,
                "save_steps": 5,
            },
            "load_best_model_at_end",
        ),
        ("llamafactory", {"packing": True}, "packing"),
        (
            "axolotl",
            {"datasets": [{**SETS[0], "roles": {"user": ["boss"]}}]},
            "datasets[0].roles.user",
        ),
        (
            "axolotl",
            {"datasets": [{**SETS[0], "message_property_mappings": ["role"]}]},
            "datasets[0].message_property_mappings",
        ),
        (
            "axolotl",
            {"datasets": [{**SETS[0], "message_property_mappings": {"role": "who"}}]},
            "datasets[0].message_property_mappings.role",
        ),
        (
            "axolotl",
            {"datasets": [{**SETS[0], "roles_to_train": ["assistant", "user"]}]},
            "datasets[0].roles_to_train",
        ),
        (
            "axolotl",
            {"datasets": [{"path": "a", "type": {"format": "{instruction}"}}]},
            "datasets[0].type",
        ),
        ("axolotl", {"datasets": [{**SETS[0], "shards": 10}]}, "datasets[0].shards"),
        ("axolotl", {"datasets": SETS, "chat_template": "metharme"}, "chat_template"),
        ("axolotl", {"special_tokens": {"eos_token": "<|im_end|>"}}, "special_tokens.eos_token"),
        ("axolotl", {"plugins": ["axolotl.integrations.kd.KDPlugin"]}, "plugins"),
        ("axolotl", {"model_type": "MllamaForConditionalGeneration"}, "model_type"),
        ("axolotl", {"excess_length_strategy": "split"}, "excess_length_strategy"),
        ("axolotl", {"train_on_inputs": True}, "train_on_inputs"),
        *(
            (
                "trainer",
                {"fsdp_config": {"sharding_strategy": code}},
                "fsdp_config.sharding_strategy",
            )
            for code in (0, 1, 2)
        ),
        ("llamafactory", {"lora_target": ".*q_proj"}, "lora_target"),
        ("llamafactory", {"quantization_bit": 3}, "quantization_bit"),
        ("llamafactory", {"template": "alpaca"}, "template"),
        ("llamafactory", {"dataset": "nowhere"}, "dataset"),
        ("llamafactory", {"mix_strategy": "interleave_under"}, "mix_strategy"),
        ("llamafactory", {"use_muon": True}, "use_muon"),
        ("llamafactory", {"pissa_init": True}, "pissa_init"),
    ],
)
def test_what_changes_the_training_and_is_not_carried_over_is_refused(
    tmp_path: Path, system, keys, key
):
    keys = {
        "learning_rate": 1e-4,
        "base_model" if system == "axolotl" else "model_name_or_path": "m",
        **keys,
    }
    with pytest.raises(ConfigError) as caught:
        written(tmp_path, system, keys)
    assert [problem.place for problem in caught.value.problems] == ["not imported", key]
    if decides(key) and key not in ("use_peft", "use_lora", "lora_enable", "adapter"):
        with pytest.raises(ConfigError) as caught:
            written(tmp_path, system, keys, partial=True)
        assert [problem.place for problem in caught.value.problems] == ["not imported", key]
        return
    assert {
        line.partition(" ")[0] for line in written(tmp_path, system, keys, partial=True).lost
    } == {key}


@pytest.mark.parametrize(
    ("system", "first", "second", "lost"),
    [
        (
            "trainer",
            {"per_device_train_batch_size": 4},
            {"per_gpu_train_batch_size": 2},
            "per_gpu_train_batch_size",
        ),
        ("axolotl", {"flash_attention": True}, {"xformers_attention": True}, "xformers_attention"),
        ("axolotl", {"sdp_attention": True}, {"xformers_attention": True}, None),
        ("axolotl", {"xformers_attention": True}, {"flash_attention": False}, None),
        ("llamafactory", {"mask_history": True}, {"train_on_prompt": True}, "train_on_prompt"),
    ],
)
def test_of_two_keys_that_say_one_thing_otherwise_the_second_is_lost(
    tmp_path: Path, system: str, first: dict, second: dict, lost: str | None
):
    """The last one silently won."""
    if lost and decides(lost):
        with pytest.raises(ConfigError, match=f"{next(iter(first))} says"):
            written(tmp_path, system, {**ENOUGH[system], **first, **second}, partial=True)
        return
    draft = written(tmp_path, system, {**ENOUGH[system], **first, **second}, partial=True)
    assert (words(draft.lost, next(iter(second))) != "") == (lost is not None)
    if lost:
        assert f"{next(iter(first))} says" in words(draft.lost, lost)
    alone = written(tmp_path, system, {**ENOUGH[system], **first}, partial=True)
    assert load(draft.made).trainer == load(alone.made).trainer


def test_the_tokenizers_own_chat_template_loses_nothing(tmp_path: Path):
    keys = {"base_model": "m", "learning_rate": 1e-4, "chat_template": "tokenizer_default"}
    assert written(tmp_path, "axolotl", keys).lost == {}


def test_a_regular_expression_stays_one_and_names_stay_names(tmp_path: Path):
    pattern = r"model\.layers\.\d+\.(self_attn|mlp)\.(q|up)_proj"
    for system, keys in (
        ("axolotl", {**LORA, "lora_target_linear": None, "base_model": "m"}),
        ("trainer", PEFT),
    ):
        keys = {"learning_rate": 1e-4, "model_name_or_path": "m", **keys}
        if system == "axolotl":
            del keys["model_name_or_path"]
        made = written(tmp_path, system, {**keys, "lora_target_modules": pattern}).made
        assert load(made).trainer.adapter.targets == pattern
        made = written(tmp_path, system, {**keys, "lora_target_modules": "q_proj,v_proj"}).made
        assert made["trainer"]["adapter"]["targets"] == ["q_proj", "v_proj"]


STACKS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


@pytest.mark.parametrize("modules", [["q_proj"], "all-linear"])
@pytest.mark.parametrize("system", ["trainer", "axolotl"])
def test_adapters_on_experts_are_targets_beside_the_layers(tmp_path: Path, system, modules):
    named = {"trainer": "model_name_or_path", "axolotl": "base_model"}[system]
    keys = {named: "m", "learning_rate": 1e-4, **(PEFT if system == "trainer" else LORA)}
    if system == "axolotl" and modules != "all-linear":
        keys["lora_target_linear"] = None
    if modules != "all-linear" or system == "trainer":
        keys["lora_target_modules"] = modules
    draft = written(tmp_path, system, {**keys, "lora_target_parameters": STACKS})
    layers = [modules] if isinstance(modules, str) else modules
    assert load(draft.made).trainer.adapter.targets == [*layers, *STACKS]
    keys["lora_target_modules"] = r".*\.q_proj"
    if system == "trainer":  # Axolotl joins both with all linear layers
        with pytest.raises(ConfigError, match="lora_target_parameters.*regular expression"):
            written(tmp_path, system, {**keys, "lora_target_parameters": STACKS})


def test_lora_flags_of_scripts_are_carried_over_where_all_is_said():
    text = (
        "--use_lora True --lora_r 8 --lora_alpha 16 --lora_dropout 0 --lora_target_modules q_proj"
    )
    section = from_flags(f"--model_name_or_path m {text} --lora_bias none").made["trainer"]
    assert section["adapter"] == {
        "type": "lora",
        "r": 8,
        "alpha": 16,
        "targets": ["q_proj"],
        "bias": "none",
    }
    without = from_flags("--use_lora false --lora_r 8 --model_name_or_path m")
    assert "adapter" not in without.made["trainer"]


def test_axolotls_batch_size_is_that_of_one_process(tmp_path: Path):
    made = written(
        tmp_path, "axolotl", {"batch_size": 8, "micro_batch_size": 2, "learning_rate": 1e-4}
    ).made
    assert (made["train_micro_batch_size_per_gpu"], made["gradient_accumulation_steps"]) == (2, 4)
    assert (
        resolve(load(made), RuntimeFacts(4, None, 9, False, "cpu")).settings["train_batch_size"]
        == 32
    )


def test_rows_to_evaluate_on_are_carried_over(tmp_path: Path):
    keys = {
        "datasets": SETS,
        "test_datasets": [{"path": "held", "type": "chat_template"}],
        "eval_steps": 5,
    }
    section = written(tmp_path, "axolotl", {"learning_rate": 1e-4, **keys}).made["trainer"]
    assert (section["data"]["evaluation_path"], section["evaluation"]["every"]) == ("held", 5)
    flags = (
        "--model_name_or_path m --train_file a.jsonl --eval_strategy steps --eval_steps 5 "
        "--learning_rate 1"
    )
    section = from_flags(f"{flags} --validation_file b.jsonl --max_eval_samples 7").made["trainer"]
    assert section["data"]["evaluation_path"] == "b.jsonl" and section["evaluation"] == {
        "every": 5,
        "samples": 7,
    }
    assert (
        from_flags(flags).made["trainer"]["data"]["evaluation_fraction"] == 0.05
    )  # of transformers' scripts


TRAINER = {"model_name_or_path": "m", "use_peft": True}
FACTORY = {"model_name_or_path": "m", "do_train": True}
ENOUGH: dict[str, dict[str, Any]] = {
    "axolotl": {"adapter": "lora", "base_model": "m"},
    "axolotl, pairs": {"adapter": "lora", "base_model": "m", "rl": "dpo"},
    "axolotl, rewards": {"base_model": "m", "reward_model": True},
    "llamafactory": FACTORY,
    "llamafactory, pairs": FACTORY | {"stage": "dpo"},
    "llamafactory, rewards": FACTORY | {"stage": "rm"},
    "trainer": TRAINER,
    **{name: TRAINER for name in SYSTEMS if name.startswith("trl-")},
}
"""Keys of a config that is imported, by its system."""


def table_of(name: str) -> Table:
    system = name.partition(",")[0]
    own = OF_ANSWERS[system](ENOUGH[name]) if system in OF_ANSWERS else None
    return (own or SYSTEMS[system]).table


@pytest.mark.first("axolotl", "llamafactory", "trainer")
@pytest.mark.parametrize("name", ENOUGH)
def test_no_value_is_a_traceback_and_none_goes_unsaid(tmp_path: Path, name: str):
    system = name.partition(",")[0]
    for key in (key for key, row in table_of(name).items() if row.section == "carried"):
        for value in ("x", True, -1, 1e300, [1], {"a": [[{"b": None}]]}):
            given = {**ENOUGH[name], key: value}
            try:
                draft = translate(system, given, tmp_path, partial=True)
            except ConfigError as error:
                assert len(error.render()) < 4000
                continue
            assert key in named(draft), (key, value)
            json.dumps(draft.made, allow_nan=False)


_ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just("2e-5"),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)


@pytest.mark.first("axolotl", "llamafactory", "trainer")
@pytest.mark.parametrize("name", ENOUGH)
@given(data=st.data())
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
def test_no_key_of_a_config_vanishes(tmp_path: Path, name: str, data: st.DataObject):
    """Each is carried over, listed or lost, or the whole is refused in words."""
    system = name.partition(",")[0]
    keys = [*table_of(name), "unheard_of"]
    some = data.draw(st.dictionaries(st.sampled_from(keys) | st.text(max_size=8), _ANY, max_size=5))
    path = tmp_path / "theirs.yml"
    path.write_text(yaml.safe_dump({**ENOUGH[name], **some}), encoding="utf-8")
    try:
        given = read_file(path)
        draft = translate(system, given, tmp_path, partial=True)
    except ConfigError as error:
        assert error.problems and len(error.render()) < 20_000
        return
    assert {key.partition(" ")[0] for key in given} - named(draft) == set()
    load(draft.made)
    try:
        assert translate(system, given, tmp_path).lost == {}
    except ConfigError as error:
        assert draft.lost and len(error.problems) == len(draft.lost) + 1


@pytest.mark.parametrize(
    ("name", "text", "seen"),
    [
        ("a.yml", "a: 1\na: 2\n", 'the key "a" twice'),
        ("a.yml", "a: [1\n", "expected"),
        ("a.yml", "- 1\n", r"\[1\]"),
        ("a.yml", "", "null"),
        ("a.sh", "python a.py --x 1\npython b.py --x 2\n", "a script.*meshloom import -- "),
        ("a", "python a.py --x 1\n", "meshloom import -- "),
        ("a.json", "{", "the end"),
        ("a.json", '{"a": {"b": NaN}}', "NaN"),
        ("a.yml", "a: {b: .inf}\n", "a.b: saw .inf"),
        ("a.yml", "a: [.nan]\n", r"a\[0\]: saw .nan"),
        ("a.yml", "a: &x\n  b: *x\n", "anchor that holds itself"),
        ("a.yml", "&x [*x]\n", "anchor that holds itself"),
        (
            "a.yml",
            "".join(
                f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9 if i else '1')}]\n" for i in range(30)
            ),
            "anchor",
        ),
        ("a.yml", "a: " + "[" * 2000, "deep"),
        ("a.yml", "a: " + "{b: " * 60 + "1" + "}" * 60, "deep"),
        ("a.yml", "a: " + "9" * 5000, "digits"),
        ("a.yml", "a: " + "9" * 400, "64 bits"),
        ("a.yml", "a: 0x" + "f" * 5000, "digits"),
        ("a.yml", "a: 'open\n", "unexpected end"),
        ("a.yml", 'a: "\\udc80"\n', "saw"),
        ("a.yml", "a: !!python/object/apply:os.system [x]\n", "constructor"),
        ("a.yml", "a: !!binary aGk=\n", "constructor"),
        ("a.yml", "a: !!set {x}\n", "constructor"),
        ("a.yml", "? [a]\n: 1\n", "of several values"),
        ("a.yml", "a: {1: 2}\n", "the key 1"),
        ("a.yml", "a: \0\n", "a.yml"),
        ("a.yml", "deepspeed: $DS\n", r"deepspeed: saw \"\$DS\""),
        ("a.yml", "datasets:\n- path: ${DATA}/x\n", r"datasets\[0\].path: saw"),
        ("a.yml", "a: $(nproc)\n", "a: saw"),
    ],
)
def test_files_that_can_not_be_read(tmp_path: Path, name: str, text: str, seen: str):
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=seen) as caught:
        read_file(tmp_path / name)
    assert len(caught.value.render()) < 1000


def test_a_date_is_text_and_a_dollar_at_the_end_is_of_a_pattern(tmp_path: Path):
    (tmp_path / "a.yml").write_text("run_name: 2024-01-01\nlora_target_modules: '.*(q|v)_proj$'\n")
    assert read_file(tmp_path / "a.yml") == {
        "run_name": "2024-01-01",
        "lora_target_modules": ".*(q|v)_proj$",
    }


def test_arguments():
    result = read_flags(
        shlex.split(
            "--learning-rate 1e-4 --bf16 no --report_to a b --name='x \" y' --no_tf32 --a -1"
        )
    )
    assert result == {
        "learning_rate": "1e-4",
        "bf16": False,
        "report_to": ["a", "b"],
        "name": 'x " y',
        "tf32": False,
        "a": "-1",
    }


@pytest.mark.parametrize("words", ["", "trl sft --x 1", "--x 1 --x 2", "--x $Y"])
def test_arguments_that_are_none(words: str):
    with pytest.raises(ConfigError):
        read_flags(words.split())


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    source, target = tmp_path / "theirs.yml", tmp_path / "ours.json"
    known = (FOLDER / "axolotl_qlora.yml").read_text()
    source.write_text(f"{known}\ncosine_constant_lr_ratio: 0.8\n")
    ours = ["--from", "axolotl", str(source), "--output", str(target)]
    assert main(ours, "meshloom import") == 64 and not target.exists()
    refusal = capsys.readouterr()
    assert (
        refusal.out == ""
        and "cosine_constant_lr_ratio: " in refusal.err
        and "--partial" in refusal.err
    )
    assert main([*ours, "--partial"], "meshloom import") == 0
    report = capsys.readouterr().out
    shows(report, "lost", "(1)")
    shows(report, "cosine_constant_lr_ratio", "counterpart")
    assert "carried over (" in report
    shows(report, "speed alone")
    assert load(target).trainer.adapter is not None
    assert main(["--from", "axolotl", "--partial", str(source)], "meshloom import") == 0
    printed = capsys.readouterr()
    assert (
        json.loads(printed.out) == json.loads(target.read_text())
        and "carried over (" in printed.err
    )
    assert main(["--from", "trainer", str(tmp_path / "none.yml")], "meshloom import") == 64
    assert "no such file" in capsys.readouterr().err
    flags = shlex.split(FLAGS)
    assert main(["--output", str(target), "--", *flags], "meshloom import") == 0
    assert load(target).trainer.model.name_or_path == "gpt2"
    assert main(["--", *flags, "--use_lora", "True"], "meshloom import") == 64
    shows(capsys.readouterr().err, "use_lora", "LoRA's", "alpha")
    with pytest.raises(SystemExit):
        main([str(source), "--", *flags], "meshloom import")


@pytest.mark.parametrize(
    ("length", "share", "every"),
    [
        ({"num_train_epochs": 4}, 0.05, 0.25),
        ({"num_train_epochs": 1}, 0.05, None),
        ({"max_steps": 200}, 10, None),
    ],
)
def test_what_is_counted_in_epochs_or_as_a_share_is_a_share_of_the_steps(
    tmp_path: Path, length, share, every
):
    keys = {
        "warmup_ratio": 0.05,
        "eval_strategy": "epoch",
        "save_strategy": "epoch",
        "load_best_model_at_end": True,
    }
    draft = written(tmp_path, "trainer", keys | length, partial=True)
    section, steps = draft.made["trainer"], draft.made["scheduler"]["params"]["warmup_num_steps"]
    assert (section["warmup_ratio"] if steps == "auto" else steps) == share
    assert [section.get(name, {}).get("every") for name in ("evaluation", "checkpoint")] == [
        every,
        every,
    ]
    assert ("--dry-run" in words(draft.lost, "eval_strategy")) == ("max_steps" in length)
    assert section.get("checkpoint", {}).get("keep_best") is True
    resolved = resolve(load(draft.made), RuntimeFacts(1, None, 200, False, "cpu"))
    assert resolved.scheduler.params["warmup_num_steps"] == 10
    assert resolved.trainer.evaluation.every == (every and 50)


@pytest.mark.parametrize(
    ("system", "key", "keys"),
    [
        ("axolotl", "lora_model_dir", {"base_model": "m", "adapter": "lora", "lora_r": 16}),
        (
            "llamafactory",
            "adapter_name_or_path",
            {"model_name_or_path": "m", "finetuning_type": "lora"},
        ),
    ],
)
def test_an_adapter_to_start_from_says_what_it_is(
    tmp_path: Path, system: str, key: str, keys: dict
):
    draft = written(
        tmp_path, system, {**keys, key: "out/lora", "lora_dropout": 0.1, "learning_rate": 1e-4}
    )
    assert draft.made["trainer"]["adapter"] == {"type": "lora", "path": "out/lora", "dropout": 0.1}
    whole = written(tmp_path, system, {**keys, key: None, "learning_rate": 1e-4}, partial=True)
    assert "path" not in whole.made["trainer"]["adapter"]


def test_what_has_a_counterpart_is_carried_right(tmp_path: Path):
    """Alpaca's own prompt, the first rows alone, ends of turns, questions that are learned,
    Axolotl's warm-up.
    """
    keys = {
        "base_model": "m",
        "learning_rate": 1e-4,
        "datasets": [{"path": "a", "type": "alpaca"}],
        "max_steps": 5000,
    }
    draft = written(
        tmp_path,
        "axolotl",
        {**keys, "eot_tokens": ["<|im_end|>"], "optimizer": "paged_adamw_32bit"},
    )
    assert draft.made["trainer"]["data"]["records"] == "alpaca" and "eot_tokens" in draft.listed
    assert (
        draft.made["scheduler"]["params"]["warmup_num_steps"] == 100
    )  # of 150, as Axolotl has none longer
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps({"a": {"file_name": "a.json"}}))
    keys = {"model_name_or_path": "m", "dataset": "a", "learning_rate": 1e-4, "max_samples": 10}
    data = written(tmp_path, "llamafactory", {**keys, "train_on_prompt": True}).made["trainer"][
        "data"
    ]
    assert (data["max_rows"], data["loss_on"], data["too_long"]) == (10, "all", "error")
    flags = "--model_name_or_path m --dataset_name d --assistant_only_loss"
    assert from_flags(flags).made["trainer"]["data"]["loss_on"] == "assistant"


def test_noise_and_smoothed_labels_are_carried_over(tmp_path: Path):
    keys = {"neftune_noise_alpha": 5, "label_smoothing_factor": 0.1}
    section = written(tmp_path, "trainer", keys).made["trainer"]
    assert (section["neftune_alpha"], section["label_smoothing"]) == (5, 0.1)
