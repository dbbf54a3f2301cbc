"""YAML is read wherever JSON is: the same values, the same errors, with their line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.json_values import values_of
from tests.support.messages import raises
from trainer.config import load
from trainer.config.read import read
from trainer.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("path", sorted((ROOT / "ds_configs").glob("*.json")), ids=lambda p: p.stem)
def test_a_shipped_config_is_the_same_in_yaml(tmp_path: Path, path: Path):
    written = tmp_path / "config.yaml"
    written.write_text(yaml.safe_dump(read(path)))
    ours, theirs = load(written, ["trainer.steps=3"]), load(path, ["trainer.steps=3"])
    assert ours.settings == theirs.settings and ours.trainer == theirs.trainer
    assert ours.origins == theirs.origins and ours.notes == theirs.notes
    assert ours.origins["trainer.steps"] == "override"


texts = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=8)


@settings(max_examples=60, deadline=None)
@given(tree=st.dictionaries(texts, values_of(texts), max_size=4))
def test_what_json_writes_is_read_as_itself(tmp_path_factory: Any, tree: dict[str, Any]):
    path = tmp_path_factory.getbasetemp() / "same.yml"
    path.write_text(yaml.safe_dump(tree, allow_unicode=True))
    assert read(path) == tree
    path.write_text(json.dumps(tree, ensure_ascii=False))  # JSON is YAML
    assert read(path) == tree


def test_numbers_and_anchors(tmp_path: Path):
    path = tmp_path / "run.yaml"
    path.write_text("""# yaml-language-server: $schema=schema.json
optimizer: &adam
  type: AdamW
  params: {lr: 1e-3, eps: 1E-8}   # text in YAML 1.1
trainer: {model: {config: &sizes {hidden_size: 64}}, run: {name: 2024-01-01}}
extra: {<<: *sizes, hidden_size: .5e3}
more: *adam
""")
    raw = read(path)
    assert raw["optimizer"]["params"] == {"lr": 0.001, "eps": 1e-8}
    assert raw["trainer"]["run"]["name"] == "2024-01-01"
    assert raw["extra"] == {"hidden_size": 500.0}
    assert raw["more"] == raw["optimizer"] and raw["more"] is not raw["optimizer"]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(("+.5", 0.5), ("-.5", -0.5), ("1_000", 1000), ("0x1F", 31), ("+3", 3), ("1e٣", "1e٣")),
        *(("!!float 1", 1.0), ("!!str 010", "010"), ("'1:30'", "1:30"), ("0o17", "0o17")),
        *(("=", "="), ("2024-01-01", "2024-01-01"), ("off", False), ("", None), ("~", None)),
    ],
)
def test_a_value(tmp_path: Path, text: str, value: Any):
    path = tmp_path / "run.YAML"
    path.write_text(f"a: {text}\n")
    assert read(path) == {"a": value} and type(read(path)["a"]) is type(value)


LAUGHS = "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9 if i else '1')}]\n" for i in range(30)
)


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        ("a: 1\nb: 2\na: 3\n", (":3: saw the key", '"a" twice', "in one section", "expected once")),
        ("o:\n  lr: .nan\n", (":2: o.lr: saw .nan", "expected a finite number")),
        ("o: [1,\n -.inf]\n", (":2: o[1]: saw -.inf", "expected a finite number")),
        ("o: 1e999\n", (":1: o: saw 1e999", "expected a finite number")),
        ("o: " + "9" * 5000, (":1: o: saw a number of 5,000 digits",)),
        ("x:\n  1: 2\n", (":2: saw the key 1", "number in quotes")),
        ("a: &x\n  b: *x\n", (":1: saw a.b in itself", "that holds itself")),
        (LAUGHS, (": more than 100,000 values", "what they hold")),
        ("a: " + "[" * 2000, (": sections nested", "than 40 deep")),
        ("a: [1\n", (":2: ", "']', but got")),
        ("a: 1\n---\nb: 2\n", (":2: expected", "single document", "but found another")),
        ("a: &x 1\nb: &x 2\n", (":2: found", "anchor 'x'", "first occurrence, second")),
        ("a: !!python/name:os.system\n", (":1: could not determine a constructor",)),
        *(
            (f"o:\n  a: {value}\n", (f":2: o.a: saw {value.split()[-1]}; ", "text in quotes"))
            for value in ("010", "1:30", "1:30.5", "0b11", "0x_", "!!int x", "!!int +", "!!float _")
        ),
        ("a: !!float ''\n", (":1: a: saw nothing; ", "text in quotes")),
        ("a: !!bool maybe\n", (":1: a: saw maybe; ", "text in quotes")),
        ("a: !!null 8\n", (":1: a: saw 8; ", "text in quotes")),
        ("a: 1" + ":30" * 300 + ".5\n", (":1: a: saw 1:30:30",)),
        ("a: 1\nb: \x01\n", (":2: unacceptable character #x0001",)),
        ('a: 1\nb: "\\U00110000"\n', (":2: chr() arg not in range(0x110000)", "expected YAML")),
        ("a: !" + "x" * 5000 + " 1\n", (":1: could not determine a constructor",)),
        (LAUGHS + "? *a29\n: 1\n", (":30: saw the key", "of several values", "expected text")),
        ("? " + "k" * 300_000 + "\n: [.nan" + ", 1" * 90_000 + "]\n", (":2: kkk",)),
        ("", (": saw null", "expected keys with values")),
        ('a: "\\0"\n', (': a: saw "\\u0000"', "the character 0")),
    ],
)
def test_an_error_says_where(tmp_path: Path, text: str, keys: tuple[str, ...]):
    path = tmp_path / "run.yml"
    path.write_text(text)
    with raises(ConfigError, *keys) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path}{keys[0]}")
    assert len(caught.value.render()) < 1000


def test_an_unknown_key_has_its_hint(tmp_path: Path):
    (tmp_path / "run.yaml").write_text("train_batch_sise: 8\ntrainer: {step: 3}\n")
    with pytest.raises(ConfigError) as caught:
        load(tmp_path / "run.yaml")
    assert 'Did you mean "train_batch_size"?' in str(caught.value)
    assert 'Did you mean "steps"?' in str(caught.value)


def test_a_file_that_is_not_there_is_told_its_neighbours(tmp_path: Path):
    (tmp_path / "run.yaml").write_text("{}")
    with pytest.raises(ConfigError, match=r"no such file.*: run\.yaml"):
        load(tmp_path / "rum.yaml")
