"""Configs of other trainers as ours: what is carried over, what is said of the rest, what is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import yaml

from trainer.command.import_config import main
from trainer.config import RuntimeFacts, load, resolve
from trainer.config.habits import SYSTEMS, Draft, translate
from trainer.config.habits.reading import read_arguments
from trainer.errors import ConfigError

HABITS = Path(__file__).parent / "habits"
FILES = {path.name: path.name.partition("_")[0] for path in sorted(HABITS.glob("*_*.*"))}


def written(folder: Path, system: str, keys: dict, name: str = "theirs.yml") -> Draft:
    path = folder / name
    path.write_text(yaml.safe_dump(keys))
    return translate(system, path)


def words(lines: dict[str, list[str]], key: str) -> str:
    """What is said of a key."""
    return " | ".join(text for name, texts in lines.items() if name.partition(" ")[0] == key for text in texts)


@pytest.mark.parametrize("name", FILES)
def test_configs_as_they_are_found_load_and_every_key_of_them_is_named(name: str):
    given = read_arguments(HABITS / name)
    draft = translate(FILES[name], HABITS / name)
    config = load(draft.made)
    assert config.trainer.model.name_or_path
    said = {key.partition(" ")[0] for lines in (draft.carried, draft.changed, draft.left) for key in lines}
    assert given.keys() - said - set(draft.idle) == set()
    assert not [text for texts in draft.left.values() for text in texts if text.startswith("not known")]


def test_axolotls_qlora():
    draft = translate("axolotl", HABITS / "axolotl_qlora.yml")
    made, data = draft.made, draft.made["trainer"]["data"]
    assert made["trainer"]["adapter"] == {
        "type": "lora",
        "r": 32,
        "alpha": 16,
        "dropout": 0.05,
        "targets": "all-linear",
    }
    assert (made["train_micro_batch_size_per_gpu"], made["gradient_accumulation_steps"]) == (2, 4)
    assert made["optimizer"] == {"type": "AdamW", "params": {"lr": 2e-5, "weight_decay": 0.0}}
    assert made["scheduler"]["type"] == "WarmupCosineLR" and made["scheduler"]["params"]["cos_min_ratio"] == 0.0
    assert [(source["path"], source["records"]) for source in data["sources"]] == [
        ("teknium/GPT4-LLM-Cleaned", "instruction"),
        ("data/chats.jsonl", "chat"),
    ]
    assert data["sources"][1]["chat_column"] == "conversations"
    assert (data["documents"], data["too_long"], data["sequence_length"]) == ("pack", "drop", 2048)
    assert "not in 4" in words(draft.changed, "adapter")
    assert "quantised" in words(draft.left, "load_in_4bit")
    assert "8 bits" in words(draft.changed, "optimizer")
    assert made["trainer"]["evaluation"] == {"every": 0.25} and "every" not in made["trainer"].get("checkpoint", {})
    assert made["scheduler"]["params"]["warmup_num_steps"] == "auto" and made["trainer"]["warmup_ratio"] == 0.1


def test_axolotls_fsdp():
    draft = translate("axolotl", HABITS / "axolotl_full.yml")
    made, section = draft.made, draft.made["trainer"]
    cpu = {"device": "cpu"}
    assert made["zero_optimization"] == {"stage": 2, "offload_param": cpu, "offload_optimizer": cpu}
    assert section["engine"] == "accelerate" and "adapter" not in section
    assert made["scheduler"] == {"type": "WarmupLR", "params": {"warmup_type": "linear", "warmup_num_steps": 20}}
    assert made["optimizer"]["params"]["betas"] == [0.9, 0.95]
    assert section["checkpoint"] == {"every": 50, "keep_last": 3, "keep_best": True}
    assert section["evaluation"] == {"every": 50, "patience": 3}
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


def test_llamafactorys_lora_over_a_deepspeed_file():
    draft = translate("llamafactory", HABITS / "llamafactory_lora.yaml")
    made, section = draft.made, draft.made["trainer"]
    assert made["zero_optimization"]["stage"] == 3 and made["train_batch_size"] == "auto"
    assert (made["gradient_accumulation_steps"], made["bf16"]["enabled"], made["gradient_clipping"]) == (8, True, 1.0)
    assert section["adapter"] == {"type": "lora", "r": 8, "alpha": 16, "targets": "all-linear"}
    assert section["activation_checkpointing"] == "full"
    assert [source["label"] for source in section["data"]["sources"]] == ["identity", "alpaca_en_demo", "mine"]
    assert section["data"]["sources"][0]["path"] == str(HABITS / "data/identity.json")
    assert section["data"]["sources"][1]["path"] == "someone/alpaca-demo"
    assert section["data"]["sources"][2]["chat_column"] == "messages"
    assert "chat template" in words(draft.changed, "template")


def test_llamafactorys_pretraining():
    section = translate("llamafactory", HABITS / "llamafactory_pretrain.yaml").made["trainer"]
    assert (section["data"]["documents"], section["data"]["text_column"]) == ("concatenate", "text")
    assert "adapter" not in section and "activation_checkpointing" not in section
    assert section["model"]["attention"] == "sdpa" and "checkpoint" not in section


def test_a_script_of_the_trainer():
    draft = translate("trainer", HABITS / "trainer_fsdp.sh")
    made, section = draft.made, draft.made["trainer"]
    assert made["optimizer"]["params"]["lr"] == 2e-5 and made["train_micro_batch_size_per_gpu"] == 4
    assert made["scheduler"]["params"]["warmup_num_steps"] == 30 and section["steps"] == 1000
    assert section["checkpoint"]["every"] == 100 and section["log"]["trackers"] == ["wandb", "tensorboard"]
    assert (made["zero_optimization"]["stage"], section["engine"]) == (3, "accelerate")
    assert section["run"] == {"name": "gpt2", "folder": "out"}


def test_a_line_of_trl(tmp_path: Path):
    line = "trl sft --model_name_or_path m --dataset_name a/b --packing --max_length 64 --use_peft --lora_r 4"
    (tmp_path / "line.txt").write_text(f"{line} --lora_target_modules q_proj v_proj\n")
    section = translate("trainer", tmp_path / "line.txt").made["trainer"]
    assert section["data"] == {"path": "a/b", "sequence_length": 64, "documents": "pack"}
    targets = ["q_proj", "v_proj"]
    assert section["adapter"] == {"type": "lora", "r": 4, "alpha": 32, "dropout": 0.05, "targets": targets}


def test_every_argument_of_the_trainer_has_a_row():
    """So one that a release of transformers adds is found by this test, and not by a user."""
    from transformers import Seq2SeqTrainingArguments

    table = SYSTEMS["trainer"].table
    assert {field.name for field in dataclasses.fields(Seq2SeqTrainingArguments)} - table.keys() == set()


def test_arguments_that_are_as_by_default_ask_for_nothing(tmp_path: Path):
    """A file of all arguments, as the Trainer itself writes them, names what was asked for and nothing else."""
    from transformers import TrainingArguments

    path = tmp_path / "args.json"
    path.write_text(TrainingArguments(output_dir="out", learning_rate=1e-4, use_cpu=True).to_json_string())
    draft = translate("trainer", path)
    assert {key.partition(" ")[0] for key in draft.left} == {"use_cpu"}
    assert draft.made["optimizer"]["params"]["lr"] == 1e-4
    load(draft.made)


def test_their_defaults_are_written_and_said(tmp_path: Path):
    draft = written(tmp_path, "trainer", {"output_dir": "out"})
    assert (draft.made["trainer"]["epochs"], draft.made["trainer"]["seed"]) == (3.0, 42)
    assert draft.made["scheduler"]["type"] == "WarmupDecayLR"
    assert draft.carried["num_train_epochs 3.0 (their default)"] == ["trainer.epochs 3.0"]


def test_a_key_that_is_not_known_is_named(tmp_path: Path):
    draft = written(tmp_path, "axolotl", {"base_model": "m", "learning_rate": 1e-4, "sequence_length": 9, "zzz": 1})
    assert "not known" in words(draft.left, "zzz")
    assert "sequence_len" in words(draft.left, "sequence_length")
    nested = written(tmp_path, "axolotl", {"learning_rate": 1, "datasets": [{"path": "a", "typ": "alpaca"}]})
    assert "not known" in words(nested.left, "datasets[0].typ")


def test_a_deepspeed_file_has_the_last_word(tmp_path: Path):
    base = {
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}},
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": 1},
    }
    (tmp_path / "ds.json").write_text(json.dumps(base))
    keys = {"deepspeed": "ds.json", "learning_rate": 1e-4, "weight_decay": 0.1, "gradient_accumulation_steps": 4}
    draft = written(tmp_path, "trainer", {**keys, "warmup_steps": 7, "lr_scheduler_type": "cosine", "adam_beta2": 0.9})
    assert draft.made["optimizer"] == {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.1}}
    assert draft.made["scheduler"] == {"type": "WarmupLR", "params": {"warmup_num_steps": 7}}
    assert (
        draft.made["gradient_accumulation_steps"] == 2 and draft.made["trainer"]["weight_decay_excludes"] == "nothing"
    )
    assert "says gradient_accumulation_steps 2" in words(draft.left, "gradient_accumulation_steps")
    assert "of its own" in words(draft.left, "lr_scheduler_type") and "of its own" in words(draft.left, "adam_beta2")
    assert "gradient_clipping" not in draft.made  # DeepSpeed clips only where its JSON says so


@pytest.mark.parametrize(
    ("system", "keys", "place"),
    [
        ("llamafactory", {"stage": "dpo"}, "stage"),
        ("llamafactory", {"finetuning_type": "freeze"}, "finetuning_type"),
        ("axolotl", {"rl": "dpo"}, "rl"),
        ("axolotl", {"adapter": "llama-adapter"}, "adapter"),
        ("trainer", {"deepspeed": "nowhere.json"}, "deepspeed"),
        ("axolotl", {"learning_rate": "fast"}, "optimizer.params.lr"),
        ("axolotl", {"warmup_ratio": "some"}, "warmup_ratio"),
        (
            "axolotl",
            {"datasets": [{"path": "a", "message_property_mappings": ["role"]}]},
            "datasets[0].message_property_mappings",
        ),
        ("trainer", {"max_steps": "all"}, "max_steps"),
        ("trainer", {"fsdp_config": "{"}, "fsdp_config"),
    ],
)
def test_another_training_and_values_that_do_not_fit_are_refused(tmp_path: Path, system: str, keys: dict, place: str):
    with pytest.raises(ConfigError) as caught:
        written(tmp_path, system, keys)
    assert caught.value.problems[0].place == place


@pytest.mark.parametrize("system", SYSTEMS)
def test_no_value_is_a_traceback_and_none_goes_unsaid(tmp_path: Path, system: str):
    path = tmp_path / "theirs.json"
    more = {"axolotl": {"adapter": "lora", "base_model": "m"}, "llamafactory": {}, "trainer": {"use_peft": True}}
    for key in [key for key, row in SYSTEMS[system].table.items() if row.group]:
        for value in ("x", True, [1], {"a": 1}):
            path.write_text(json.dumps({"model_name_or_path": "m", **more[system], key: value}))
            try:
                draft = translate(system, path)
            except ConfigError:
                continue
            said = {name.partition(" ")[0] for lines in (draft.carried, draft.changed, draft.left) for name in lines}
            assert key in said or key in draft.idle, (key, value)


@pytest.mark.parametrize(
    ("name", "text", "seen"),
    [
        ("a.yml", "a: 1\na: 2\n", "the key a twice"),
        ("a.yml", "a: [1\n", "expected"),
        ("a.yml", "- 1\n", "[1]"),
        ("a.sh", "python a.py --x 1\npython b.py --x 2\n", "2 commands"),
        ("a.sh", "python a.py --x 'open\n", "quotation"),
        ("a.json", "{", "the end"),
    ],
)
def test_files_that_can_not_be_read(tmp_path: Path, name: str, text: str, seen: str):
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=seen.replace("[", r"\[")):
        read_arguments(tmp_path / name)


def test_arguments_one_a_line(tmp_path: Path):
    (tmp_path / "a.txt").write_text("--learning-rate 1e-4  # fast\n--bf16\n--report_to a b\n--name='x y'\n")
    assert read_arguments(tmp_path / "a.txt") == {
        "learning_rate": "1e-4",
        "bf16": True,
        "report_to": ["a", "b"],
        "name": "x y",
    }


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    source, target = HABITS / "axolotl_qlora.yml", tmp_path / "ours.json"
    assert main(["--from", "axolotl", str(source), "--output", str(target)], "meshloom import") == 0
    report = capsys.readouterr().out
    assert "left out (" in report and "load_in_4bit true" in report and "with another meaning" in report
    assert load(target).trainer.adapter is not None
    assert main(["--from", "axolotl", str(source)], "meshloom import") == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out) == json.loads(target.read_text()) and "carried over (" in printed.err
    assert main(["--from", "trainer", str(tmp_path / "none.yml")], "meshloom import") == 64
    assert "no such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("length", "share", "every"),
    [({"num_train_epochs": 4}, 0.05, 0.25), ({"num_train_epochs": 1}, 0.05, None), ({"max_steps": 200}, 10, None)],
)
def test_what_is_counted_in_epochs_or_as_a_share_is_a_share_of_the_steps(tmp_path: Path, length, share, every):
    keys = {"warmup_ratio": 0.05, "eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": True}
    draft = written(tmp_path, "trainer", keys | length)
    section, steps = draft.made["trainer"], draft.made["scheduler"]["params"]["warmup_num_steps"]
    assert (section["warmup_ratio"] if steps == "auto" else steps) == share
    assert [section.get(name, {}).get("every") for name in ("evaluation", "checkpoint")] == [every, every]
    assert ("--dry-run" in words(draft.left, "eval_strategy")) == ("max_steps" in length)
    assert section.get("checkpoint", {}).get("keep_best") is True
    resolved = resolve(load(draft.made), RuntimeFacts(1, None, 200, False, "cpu"))
    assert resolved.scheduler.params["warmup_num_steps"] == 10
    assert resolved.trainer.evaluation.every == (every and 50)


@pytest.mark.parametrize(
    ("system", "key", "keys"),
    [
        ("axolotl", "lora_model_dir", {"base_model": "m", "adapter": "lora", "lora_r": 16}),
        ("llamafactory", "adapter_name_or_path", {"model_name_or_path": "m", "finetuning_type": "lora"}),
    ],
)
def test_an_adapter_to_start_from_says_what_it_is(tmp_path: Path, system: str, key: str, keys: dict):
    draft = written(tmp_path, system, {**keys, key: "out/lora", "lora_dropout": 0.1, "learning_rate": 1e-4})
    assert draft.made["trainer"]["adapter"] == {"type": "lora", "path": "out/lora", "dropout": 0.1}
    whole = written(tmp_path, system, {**keys, key: None, "learning_rate": 1e-4})
    assert "path" not in whole.made["trainer"]["adapter"]


def test_noise_and_smoothed_labels_are_carried_over(tmp_path: Path):
    keys = {"neftune_noise_alpha": 5, "label_smoothing_factor": 0.1}
    section = written(tmp_path, "trainer", keys).made["trainer"]
    assert (section["neftune_alpha"], section["label_smoothing"]) == (5, 0.1)
