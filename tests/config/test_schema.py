"""`meshloom schema`: the JSON Schema accepts what the reader accepts, and is in the wheel."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from trainer.command import schema as command
from trainer.config import load
from trainer.config.keys import KEYS, OPTIMIZERS, SCHEDULERS
from trainer.config.keys.key import DTYPES, FLAGS, Key
from trainer.config.read import read
from trainer.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
SCHEMA = Draft202012Validator(command.schema())
CONFIGS = [*(ROOT / "ds_configs").glob("*.json"), *(ROOT / "examples").rglob("*.json")]


def refused_by_schema(config: Any) -> list[str]:
    return [error.message for error in SCHEMA.iter_errors(config)]


def refused_by_reader(config: dict[str, Any]) -> str:
    try:
        load(config)
    except ConfigError as error:
        return str(error)
    return ""


def test_the_schema_is_one_and_the_file_of_the_wheel_is_what_the_command_prints(capsys):
    Draft202012Validator.check_schema(SCHEMA.schema)
    assert command.main([], "meshloom schema") == 0
    printed = capsys.readouterr().out
    assert json.loads(printed) == SCHEMA.schema
    file = ROOT / "trainer" / "config" / "schema.json"
    assert file.read_text() == printed, "meshloom schema > trainer/config/schema.json"


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_each_config_here_is_accepted(path: Path):
    config = read(path)
    if not refused_by_reader(config):
        assert refused_by_schema(config) == []
        assert refused_by_schema({"$schema": "schema.json", **config}) == []


def test_at_least_the_shipped_ones_are_read():
    assert sum(not refused_by_reader(read(path)) for path in CONFIGS) >= 13


def test_the_key_of_an_editor_is_no_setting():
    config = load({"$schema": "schema.json", "train_batch_size": 8})
    assert "$schema" not in config.settings
    assert "unknown" not in refused_by_reader({"zero_optimization": {"$schema": "x"}})
    assert refused_by_reader({"zero_optimization": {"$schema": "x"}})
    assert refused_by_schema({"zero_optimization": {"$schema": "x"}})


def test_its_texts_are_in_the_words_of_json():
    assert not re.search(r"\bNone\b|\\n", command.text())


@pytest.mark.parametrize("value", [5, None, {"a": 1}])
def test_the_key_of_an_editor_may_hold_anything(value):
    assert not refused_by_reader({"$schema": value})
    assert not refused_by_schema({"$schema": value})


@pytest.mark.parametrize(
    "section", [{}, {"params": {}}, {"type": None}, {"type": None, "params": {}}]
)
def test_no_scheduler_is_accepted_by_both(section):
    assert not refused_by_reader({"scheduler": section})
    assert not refused_by_schema({"scheduler": section})


@pytest.mark.parametrize(
    "config",
    [
        {"train_batch_sise": 8},
        {"train_batch_size": "eight"},
        {"train_batch_size": 0},
        {"train_batch_size": 1.5},
        {"train_batch_size": True},
        {"gradient_clipping": []},
        {"bf16": {"enabled": "maybe"}},
        {"bf16": {"enable": True}},
        {"bf16": True},
        {"zero_optimization": {"stage": 4}},
        {"zero_optimization": {"offload_param": {"device": "disk"}}},
        {"zero_optimization": {"offload_param": {"devise": "cpu"}}},
        {"data_types": {"grad_accum_dtype": "fp8"}},
        {"optimizer": {"type": "AdamX"}},
        {"optimizer": {"params": {"lr": 1}}},
        {"optimizer": {"type": "adamw", "params": {"lrr": 1}}},
        {"optimizer": {"type": "SGD", "params": {"betas": [0.9, 0.99]}}},
        {"optimizer": {"type": "AdamW", "params": {"lr": "fast"}}},
        {"scheduler": {"type": "WarmupDecayLR", "params": {}}},
        {"scheduler": {"type": ""}},
        {"scheduler": {"params": {"warmup_num_steps": 3}}},
        {"scheduler": {"type": None, "params": {"warmup_num_steps": 3}}},
        {"scheduler": {"type": "cosine", "params": {"total_num_steps": "all"}}},
        {"trainer": {"step": 3}},
        {"trainer": {"steps": 0}},
        {"trainer": {"steps": True}},
        {"trainer": {"task": "chess"}},
        {"trainer": {"data": {"sources": [{"weight": 1}]}}},
        {"trainer": {"data": {"sequence_length": "long"}}},
        {"trainer": {"checkpoint": {"every": 0}}},
        {"trainer": {"checkpoint": {"keep_best": 2}}},
        {"trainer": {"mesh": {"shard": "machine"}}},
        {"trainer": []},
    ],
    ids=lambda config: re.sub(r"[^\w.]+", " ", json.dumps(config)).strip(),
)
def test_a_wrong_type_or_name_is_refused_by_both(config):
    assert refused_by_reader(config)
    assert refused_by_schema(config)


def taken(key: Key) -> st.SearchStrategy[Any]:
    """Values that may be taken for a key's, also in the forms that `coerce` turns into them."""
    numbers = st.sampled_from([0, 1, 2, 100, -1, 5e8, 0.5, "1e-5", "3", " 4 ", "1_000"])
    flags = st.sampled_from([*FLAGS, "True", "OFF", True, False, 0, 1])
    texts = st.sampled_from([*key.choices, *(choice.upper() for choice in key.choices), "x"])
    dtypes = st.sampled_from([*DTYPES, "torch.bfloat16", "BF16"])
    kinds = {
        "bool": flags,
        "int": numbers,
        "float": numbers,
        "str": texts,
        "dtype": dtypes,
        "list": st.sampled_from([[], [0.9, 0.999]]),
        "section": st.just({}),
        "any": st.sampled_from([0, False, None, {}]),
    }
    return kinds[key.kind] | st.sampled_from(["auto", None])


@st.composite
def configs(draw: Any) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for path in draw(st.lists(st.sampled_from(sorted(KEYS)), max_size=4, unique=True)):
        section: Any = made
        *above, name = path.split(".")
        for part in above:
            section = section.setdefault(part, {}) if isinstance(section, dict) else {}
        if isinstance(section, dict):
            section[name] = draw(taken(KEYS[path]))
    for place, types in (("optimizer", OPTIMIZERS), ("scheduler", SCHEDULERS)):
        if draw(st.booleans()):
            kind = draw(st.sampled_from(sorted(types)))
            names = draw(st.lists(st.sampled_from(sorted(types[kind])), max_size=3))
            needed = [name for name, key in types[kind].items() if key.needed]
            params = {name: draw(taken(types[kind][name])) for name in {*names, *needed}}
            made[place] = {"type": draw(st.sampled_from([kind, kind.lower()])), "params": params}
    trainer = {
        "steps": st.sampled_from([3, "3", 3.0, None]),
        "epochs": st.sampled_from([1, 0.5, "2"]),
        "label_smoothing": st.sampled_from([0, 0.1, "1e-1"]),
        "sync_batch_norm": st.sampled_from([0, "false", "No", False]),
        "freeze": st.sampled_from([[], ["a.*"]]),
        "checkpoint": st.sampled_from([{}, {"every": 3}, {"every": 0.5}, {"keep_last": "2"}]),
        "mesh": st.sampled_from([{}, {"shard": "node"}, {"shard": -1}, {"replicate": "2"}]),
        "data": st.sampled_from([{"path": "a"}, {"path": ["a"], "text_column": "b"}, {}]),
        "adapter": st.sampled_from([None, {}, {"r": 4, "alpha": "8"}, {"targets": ["q"]}]),
    }
    chosen = draw(st.lists(st.sampled_from(sorted(trainer)), max_size=3, unique=True))
    if chosen:
        made["trainer"] = {name: draw(trainer[name]) for name in chosen}
    if draw(st.booleans()):
        made["_note"] = {"of": ["mine"]}
    return made


@settings(max_examples=300, deadline=None)
@given(config=configs())
def test_what_the_reader_accepts_the_schema_accepts(config):
    if not refused_by_reader(config):
        assert refused_by_schema(config) == []


@pytest.mark.parametrize("path", sorted(KEYS))
def test_each_key_is_accepted_with_its_values(path):
    """Each of the table's keys, with each form of its values, of which the reader takes some."""
    key, accepted = KEYS[path], 0
    numbers: list[Any] = [0, 1, 2, 100, "3", "1e-5", 0.5]
    values: dict[str, list[Any]] = {"bool": [True, False, "off", 1], "int": numbers}
    values |= {"float": numbers, "dtype": ["fp32", "torch.bfloat16"], "list": [[]]}
    values |= {"str": [*key.choices, "x", "AdamW"], "section": [{}], "any": [False, {}]}
    for value in [*values[key.kind], "auto", None]:
        config: Any = value
        for name in reversed(path.split(".")):
            config = {name: config}
        if not refused_by_reader(config):
            accepted += 1
            assert refused_by_schema(config) == [], value
    assert accepted or path in ("optimizer.params", "scheduler.type")  # which need the other
