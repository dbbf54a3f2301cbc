"""JSON with comments is read as without, and what is wrong in it is refused with its line."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.json_values import values_of
from trainer.config.read import parse
from trainer.config.syntax.json_text import DuplicateKey, parse_json
from trainer.errors import ConfigError

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
trees = st.dictionaries(TEXTS, values_of(TEXTS), min_size=1, max_size=4)
COMMENTS = ["// a comment\n", '# "quoted": {\n', "/* of\n two lines */", " ", "\n", "\t"]


def same(one: Any, other: Any) -> bool:
    """True if two values are equal, and of one type: 1 is not 1.0."""
    return repr(one) == repr(other)


@settings(max_examples=200, deadline=None)
@given(tree=trees, pads=st.lists(st.sampled_from(COMMENTS), min_size=1, max_size=5))
def test_json_with_comments_is_read_as_without(
    tmp_path_factory: Any, tree: dict[str, Any], pads: list[str]
) -> None:
    path = tmp_path_factory.getbasetemp() / "same.json"
    lines = json.dumps(tree, indent=1, ensure_ascii=False).split("\n")
    commented = "".join(line + pads[i % len(pads)] + "\n" for i, line in enumerate(lines))
    path.write_text(commented, encoding="utf-8", newline="")
    assert same(parse(path, False, "JSON"), tree)


@settings(max_examples=200, deadline=None)
@given(text=st.text('{}[]",:0123456789.eE+-truefalsn \n\\u/', max_size=24))
def test_what_pythons_parser_reads_is_read_alike(text: str) -> None:
    """But for a key that is there twice, which Python's parser takes silently."""
    try:
        known = json.loads(text)
    except ValueError:
        known = None
    try:
        read = parse_json(text, "c.json")
    except DuplicateKey:
        return
    except ConfigError:
        read = None
    assert same(known, read)


@settings(max_examples=100, deadline=None)
@given(before=trees, name=st.sampled_from(["NaN", "Infinity", "-Infinity"]))
def test_a_number_that_is_none_has_its_place(before: dict[str, Any], name: str) -> None:
    start = (
        json.dumps(before, indent=1, ensure_ascii=False).removesuffix("\n}")
        + ',\n "é of numbers": ['
    )
    with pytest.raises(ConfigError) as caught:
        parse_json(f"{start}{name}]}}", "c.json")
    (problem,) = caught.value.problems
    line, column = start.count("\n") + 1, len(' "é of numbers": [') + 1
    assert (problem.place, name in problem.actual) == (f"c.json:{line}:{column}", True)


@pytest.mark.parametrize("text", ['{"a": {"b": 1,\n "b": 1}}', '{"a": 1,\n "\\u0061": 2}'])
def test_a_key_that_is_there_twice_has_its_line(text: str) -> None:
    with pytest.raises(DuplicateKey) as caught:
        parse_json(text, "c.json")
    assert caught.value.problems[0].place == "c.json:2"


def test_a_number_beyond_a_float_is_no_infinity(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    path.write_text('{"a": 1e999}')
    assert math.isinf(parse(path, False, "JSON")["a"])  # `unfit` then names the key
