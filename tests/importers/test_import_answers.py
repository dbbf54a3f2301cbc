"""Preferences and rewards of other trainers: key by key, or an error that names the key."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.messages import shows
from trainer.config import load
from trainer.errors import ConfigError
from trainer.tools.importers.tables import read_table
from trainer.tools.importers.translate import SYSTEMS, Draft, translate

TRL = ("dpo", "cpo", "orpo", "reward")
MODEL = {"model_name_or_path": "m", "learning_rate": 1e-6}
HUB = MODEL | {"dataset_name": "a/b"}
AXOLOTL = {"base_model": "m", "learning_rate": 1e-6, "rl": "dpo"}
ROWS = {
    "d": {
        "file_name": "d.json",
        "ranking": True,
        "columns": {"prompt": "question", "chosen": "good", "rejected": "bad"},
    },
    "chats": {
        "hf_hub_url": "a/b",
        "ranking": True,
        "formatting": "sharegpt",
        "columns": {"messages": "conversations", "chosen": "chosen", "rejected": "rejected"},
    },
    "plain": {"file_name": "plain.json"},
}
FACTORY = MODEL | {"do_train": True, "finetuning_type": "full", "dataset": "d", "stage": "dpo"}


def read(folder: Path, system: str, keys: dict[str, Any], partial: bool = False) -> Draft:
    (folder / "data").mkdir(exist_ok=True)
    (folder / "data" / "dataset_info.json").write_text(json.dumps(ROWS))
    return translate(system, keys, folder, partial)


def made(folder: Path, system: str, **keys: Any) -> dict[str, Any]:
    usual = {"axolotl": AXOLOTL, "llamafactory": FACTORY}.get(system, HUB)
    draft = read(folder, system, usual | keys)
    load(draft.made)
    return draft.made["trainer"]  # type: ignore[no-any-return]


PAIRS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "DPO": ("trl-dpo", {}, {"loss": "sigmoid", "beta": 0.1}),
    "with its cross-entropy": (
        "trl-dpo",
        {"loss_type": ["sigmoid", "sft"], "loss_weights": [1, 0.2], "beta": 0.3},
        {"loss": "sigmoid", "sft_weight": 0.2, "beta": 0.3},
    ),
    "smoothing that TRL ignores": (
        "trl-dpo",
        {"loss_type": "hinge", "label_smoothing": 0.1},
        {"loss": "hinge", "beta": 0.1},
    ),
    "smoothing": (
        "trl-dpo",
        {"loss_type": "robust", "label_smoothing": 0.1},
        {"loss": "robust", "label_smoothing": 0.1, "beta": 0.1},
    ),
    "CPO": (
        "trl-cpo",
        {"label_smoothing": 0.1},
        {"loss": "cpo", "beta": 0.1, "label_smoothing": 0.1, "sft_weight": 1.0},
    ),
    "SimPO": (
        "trl-cpo",
        {"loss_type": "simpo", "cpo_alpha": 0, "simpo_gamma": 1.6, "beta": 2.0},
        {"loss": "simpo", "beta": 2.0, "gamma": 1.6, "sft_weight": 0.0},
    ),
    "SimPO with a cross-entropy that nobody asked for": (
        "trl-cpo",
        {"loss_type": "simpo"},
        {"loss": "simpo", "beta": 0.1, "gamma": 0.5, "sft_weight": 1.0},
    ),
    "ORPO": ("trl-orpo", {"beta": 0.2}, {"loss": "orpo", "beta": 0.2, "sft_weight": 1.0}),
    "LLaMA-Factory": (
        "llamafactory",
        {"dpo_label_smoothing": 0.1, "pref_ftx": 0.5},
        {"loss": "sigmoid", "beta": 0.1, "label_smoothing": 0.1, "sft_weight": 0.5},
    ),
    "its ORPO": (
        "llamafactory",
        {"pref_loss": "orpo"},
        {"loss": "orpo", "beta": 0.1, "sft_weight": 1.0},
    ),
    "its SimPO": (
        "llamafactory",
        {"pref_loss": "simpo", "simpo_gamma": 1.0, "pref_beta": 2},
        {"loss": "simpo", "beta": 2, "gamma": 1.0},
    ),
    "Axolotl": ("axolotl", {"rl_beta": 0.2}, {"loss": "sigmoid", "beta": 0.2}),
    "its IPO": ("axolotl", {"rl": "ipo"}, {"loss": "ipo", "beta": 0.1}),
    "its losses": (
        "axolotl",
        {"dpo_loss_type": ["apo_zero", "sft"], "dpo_loss_weights": [1.0, 0.5], "trl": {"beta": 1}},
        {"loss": "apo_zero", "sft_weight": 0.5, "beta": 1},
    ),
    "its other SimPO": (
        "axolotl",
        {"rl": "simpo", "simpo_gamma": 0.3, "cpo_alpha": 0.0},
        {"loss": "simpo", "gamma": 0.3, "sft_weight": 0.0, "beta": 0.1},
    ),
    "its other ORPO": (
        "axolotl",
        {"rl": "orpo", "orpo_alpha": 0.3},
        {"loss": "orpo", "beta": 0.3, "sft_weight": 1.0},
    ),
}
"""The system, its keys, and the section of pairs that they make."""


@pytest.mark.parametrize("name", PAIRS)
def test_losses(name: str, tmp_path: Path) -> None:
    system, keys, section = PAIRS[name]
    trainer = made(tmp_path, system, **keys)
    assert (trainer["task"], trainer["pairs"]) == ("pairs", section)


LOST: dict[str, tuple[str, dict[str, Any], str]] = {
    "two losses": ("trl-dpo", {"loss_type": ["sigmoid", "ipo"]}, "loss_type"),
    "a sort": ("trl-dpo", {"loss_type": "aot"}, "loss_type"),
    "another loss": ("trl-dpo", {"loss_type": "discopop"}, "loss_type"),
    "a factor": ("trl-dpo", {"loss_weights": [0.5]}, "loss_weights"),
    "one weight for two": (
        "trl-dpo",
        {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0]},
        "loss_weights",
    ),
    "a cut": ("trl-dpo", {"truncation_mode": "keep_end"}, "truncation_mode"),
    "no cut": ("trl-dpo", {"max_length": None}, "max_length"),
    "a moved reference": ("trl-dpo", {"sync_ref_model": True}, "sync_ref_model"),
    "weights of pairs": ("trl-dpo", {"use_weighting": True}, "use_weighting"),
    "a divergence": ("trl-dpo", {"f_divergence_type": "forward_kl"}, "f_divergence_type"),
    "lengths": ("trl-dpo", {"ld_alpha": 0.5}, "ld_alpha"),
    "a router": ("trl-dpo", {"router_aux_loss_coef": 0.1}, "router_aux_loss_coef"),
    "CPO's hinge": ("trl-cpo", {"loss_type": "hinge"}, "loss_type"),
    "AlphaPO": ("trl-cpo", {"alpha": 0.2}, "alpha"),
    "packing": ("trl-dpo", {"packing": True}, "packing"),
    "KTO's pairs": ("llamafactory", {"pref_loss": "kto_pair"}, "pref_loss"),
    "BCO": ("llamafactory", {"pref_bco_weight": 0.5}, "pref_bco_weight"),
    "a reference": ("llamafactory", {"ref_model": "b"}, "ref_model"),
    "rows without pairs": ("llamafactory", {"dataset": "plain"}, "plain.formatting"),
    "a trained adapter": (
        "llamafactory",
        {"finetuning_type": "lora", "adapter_name_or_path": "a"},
        "adapter_name_or_path",
    ),
    "a smoothing by version": ("axolotl", {"dpo_label_smoothing": 0.1}, "dpo_label_smoothing"),
    "no gamma": ("axolotl", {"rl": "simpo"}, "rl"),
    "RPO": ("axolotl", {"rpo_alpha": 1.0}, "rpo_alpha"),
    "ranks": (
        "axolotl",
        {"datasets": [{"path": "a/b", "type": "zephyr.nectar"}]},
        "datasets[0].type",
    ),
    "columns by the row": (
        "axolotl",
        {"datasets": [{"path": "a/b", "type": "chatml.argilla"}]},
        "datasets[0].type",
    ),
    "a text around": (
        "axolotl",
        {"datasets": [{"path": "a/b", "type": {"prompt_format": "Q: {prompt}"}}]},
        "datasets[0].type.prompt_format",
    ),
}


@pytest.mark.parametrize("name", LOST)
def test_what_has_no_counterpart_is_named(name: str, tmp_path: Path) -> None:
    """And of the loss, --partial leaves nothing out."""
    system, keys, place = LOST[name]
    usual = {"axolotl": AXOLOTL, "llamafactory": FACTORY}.get(system, HUB)
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, system, usual | keys)
    assert place in [problem.place for problem in caught.value.problems]
    if place in ("loss_type", "loss_weights", "sync_ref_model", "pref_loss", "rpo_alpha", "alpha"):
        with pytest.raises(ConfigError, match="--partial"):
            read(tmp_path, system, usual | keys, partial=True)


@pytest.mark.parametrize(
    ("system", "keys", "place", "word"),
    [
        ("llamafactory", {"stage": "kto"}, "stage", "KTO"),
        ("axolotl", {"rl": "kto"}, "rl", "KTO"),
        ("axolotl", {"rl": "grpo"}, "rl", "samples answers"),
        ("trl-dpo", {"desirable_weight": 1.0}, "desirable_weight", "KTO"),
        ("trainer", {"beta": 0.1}, "beta", "--from trl-dpo"),
    ],
)
def test_what_is_not_offered_says_why(
    system: str, keys: dict[str, Any], place: str, word: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, system, keys | {"do_train": True} if system == "llamafactory" else keys)
    [problem] = caught.value.problems
    assert problem.place == place
    shows(str(problem), word)


def test_rewards(tmp_path: Path) -> None:
    trainer = made(tmp_path, "trl-reward", center_rewards_coefficient=0.01)
    assert (trainer["task"], trainer["labels"]) == ("labels", {"kind": "reward", "centring": 0.01})
    assert (trainer["data"]["sequence_length"], trainer["data"]["too_long"]) == (1024, "drop")
    trainer = made(tmp_path, "llamafactory", stage="rm", dataset="chats")
    assert trainer["labels"] == {"kind": "reward"} and "pairs" not in trainer
    data = [{"path": "a/b", "type": "bradley_terry.chat_template"}]
    keys = {"rl": None, "reward_model": True, "datasets": data, "num_labels": 1}
    kind = "AutoModelForSequenceClassification"
    trainer = made(tmp_path, "axolotl", model_type=kind, chat_template="llama3", **keys)
    own = trainer["data"]
    assert (own["records"], own["prompt_column"], own["chat_template"]) == (
        "chat",
        "input",
        "llama3",
    )


def test_lengths_that_count_one_token_more(tmp_path: Path) -> None:
    assert made(tmp_path, "trl-dpo")["data"]["sequence_length"] == 1023
    data = made(tmp_path, "llamafactory", cutoff_len=64)["data"]
    assert (data["sequence_length"], data["too_long"]) == (63, "error")
    data = made(tmp_path, "axolotl", sequence_len=64)["data"]
    assert (data["sequence_length"], data["too_long"]) == (63, "drop")


@pytest.mark.parametrize(
    ("kind", "columns", "template"),
    [
        ("chatml.intel", {"prompt_column": "question", "records": "chat"}, "chatml"),
        ("llama3.icr", {"prompt_column": "input", "records": "chat"}, "llama3"),
        ("chatml.ultra", {"records": "chat"}, "chatml"),
        ("llama3.argilla_chat", {}, "llama3"),
        (None, {}, None),
        (
            {"field_prompt": "q", "field_chosen": "a", "prompt_format": "{prompt}"},
            {"prompt_column": "q", "chosen_column": "a"},
            None,
        ),
    ],
)
def test_axolotls_types(
    kind: Any, columns: dict[str, Any], template: str | None, tmp_path: Path
) -> None:
    rows = {"path": "a/b", "split": "train", "type": kind}
    data = made(tmp_path, "axolotl", datasets=[rows])["data"]
    names = ("records", "prompt_column", "chosen_column", "rejected_column")
    assert {name: data[name] for name in names if name in data} == columns
    assert data.get("chat_template") == template


def test_axolotls_chats(tmp_path: Path) -> None:
    rows = {
        "path": "a/b", "type": "chat_template.default", "field_messages": "turns",
        "field_rejected": "worse", "message_property_mappings": {"role": "from", "content": "value"},
        "roles": {"user": ["human"], "assistant": ["gpt"]},
    }  # fmt: skip
    data = made(tmp_path, "axolotl", datasets=[rows], chat_template="chatml")["data"]
    assert (data["prompt_column"], data["rejected_column"]) == ("turns", "worse")
    assert (data["records"], data["chat_template"]) == ("chat", "chatml")
    both = [rows, {"path": "c/d", "type": "llama3.icr"}]
    with pytest.raises(ConfigError, match="several chat templates"):
        read(tmp_path, "axolotl", AXOLOTL | {"datasets": both})


def test_llamafactorys_ranked_rows(tmp_path: Path) -> None:
    data = made(tmp_path, "llamafactory", template="llama3")["data"]
    assert (data["records"], data["prompt_column"]) == ("chat", "question")
    assert (data["chosen_column"], data["chat_template"]) == ("good", "llama3")
    data = made(tmp_path, "llamafactory", dataset="chats")["data"]
    assert (data["path"], data["prompt_column"]) == ("a/b", "conversations")
    assert "records" not in data


def test_dropout_that_theirs_turns_off(tmp_path: Path) -> None:
    """Also LoRA's; a model's own is an error if it is known here, and a note if it is not."""
    adapter = {"use_peft": True, "lora_target_modules": "all-linear", "lora_dropout": 0.1}
    draft = read(tmp_path, "trl-dpo", HUB | adapter)
    assert "dropout" not in draft.made["trainer"]["adapter"]
    assert any("disable_dropout" in line for line in draft.notes)
    kept = made(tmp_path, "trl-dpo", **adapter, disable_dropout=False)
    assert kept["adapter"]["dropout"] == 0.1
    model = tmp_path / "gpt2"
    model.mkdir()
    (model / "config.json").write_text('{"resid_pdrop": 0.1, "summary_first_dropout": 0.1}')
    with pytest.raises(ConfigError, match="resid_pdrop 0.1") as caught:
        read(tmp_path, "trl-dpo", HUB | {"model_name_or_path": str(model)})
    assert "summary" not in str(caught.value)
    (model / "config.json").write_text('{"resid_pdrop": 0.0}')
    draft = read(tmp_path, "trl-dpo", HUB | {"model_name_or_path": str(model)})
    assert not any("disable_dropout" in line for line in draft.notes)


def test_a_router_s_loss_that_theirs_adds(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"output_router_logits": false, "router_aux_loss_coef": 0.001}'
    )
    keys = HUB | {"model_name_or_path": str(tmp_path)}
    with pytest.raises(ConfigError, match="router_aux_loss_coef"):
        read(tmp_path, "trl-dpo", keys)
    assert not read(tmp_path, "trl-dpo", keys | {"router_aux_loss_coef": 0}).lost


def configs() -> dict[str, Any]:
    from trl import DPOConfig, RewardConfig
    from trl.experimental.cpo import CPOConfig
    from trl.experimental.orpo import ORPOConfig

    return dict(zip(TRL, (DPOConfig, CPOConfig, ORPOConfig, RewardConfig), strict=True))


@pytest.mark.more
@pytest.mark.parametrize("kind", TRL)
def test_every_argument_of_trl_has_a_row_and_its_defaults_lose_nothing(
    kind: str, tmp_path: Path
) -> None:
    """So one that a release of TRL adds is found by this test, and not by a user."""
    from trl import ModelConfig, ScriptArguments

    config = configs()[kind]
    fields = {
        field.name: field
        for own in (config, ModelConfig, ScriptArguments)
        for field in dataclasses.fields(own)
    }
    assert fields.keys() - SYSTEMS[f"trl-{kind}"].table.keys() == set()
    whole = json.loads(config(output_dir=str(tmp_path), use_cpu=True).to_json_string())
    whole.pop("eos_token", None)  # which they hide as a secret
    draft = read(tmp_path, f"trl-{kind}", whole | HUB)
    assert draft.lost == {}
    load(draft.made)


@pytest.mark.more
@pytest.mark.parametrize("kind", TRL)
def test_the_defaults_are_those_of_trl(kind: str, tmp_path: Path) -> None:
    config = configs()[kind](output_dir=str(tmp_path), use_cpu=True)
    for key, value in read_table("answers/trl")[kind]["defaults"].items():
        assert getattr(config, key) == value, key
    assert config.bf16 is True
