"""Each key is one row: DeepSpeed's in the tables, ours a field with a mark."""

from __future__ import annotations

from typing import Any

import pytest
from annotated_types import BaseMetadata, GroupedMetadata
from pydantic.fields import FieldInfo

from tests.support.reference import reference
from trainer.config import TrainerSection
from trainer.config.keys import KEYS, OPTIMIZERS, SCHEDULERS
from trainer.config.keys.grammar import parse
from trainer.config.keys.hints import OTHER_NAMES
from trainer.config.keys.key import UNITS, Excludes, Key
from trainer.config.own_keys import OWN_KEYS, sections_of, unhonoured
from trainer.config.rules import EVERYWHERE
from trainer.tools.importers.tables import table
from trainer.tools.planner import candidates

TABLES = {"DeepSpeed's": KEYS, "ours": OWN_KEYS, **OPTIMIZERS, **SCHEDULERS}
NUMBERS = ("int", "float")


@pytest.mark.parametrize("name", TABLES)
def test_each_key_with_a_number_has_a_unit(name: str) -> None:
    keys = TABLES[name]
    without = [path for path, key in keys.items() if key.kind in NUMBERS and not key.unit]
    assert without == []
    assert {key.unit for key in keys.values() if key.unit} <= {*UNITS}
    strange = [
        path for path, key in keys.items() if key.unit and key.kind not in (*NUMBERS, "list")
    ]
    assert strange == []


def test_each_unit_is_used() -> None:
    assert {key.unit for keys in TABLES.values() for key in keys.values()} == {"", *UNITS}


def test_units_are_in_the_reference() -> None:
    rows = [line for line in reference().splitlines() if line.startswith("| `patience` |")]
    assert [row.split(" | ")[2] for row in rows] == ["seconds", "evaluations"]


def test_a_row_of_a_table() -> None:
    keys = parse(
        "[part] | section | instead: it is whole | changes numbers\n"
        "a b | int[learning rate] >=1 auto null | usual: 1, 2\n"
        "    | excludes: part.c\n"
        'c | str x|y | instead: z | default: "x"\n'
    )
    assert keys["part.a"] is keys["part.b"]
    assert keys["part.a"] == Key(
        kind="int",
        unit="learning rate",
        low=1,
        auto=True,
        null=True,
        usual=(1, 2),
        excludes=Excludes("part.c"),
        instead="it is whole",
        changes_numbers=True,
    )
    assert keys["part.c"] == Key(kind="str", choices=("x", "y"), instead="z", default="x")
    with pytest.raises(TypeError, match="wants"):
        parse("a | int | wants: b\n")


def test_auto_stands_for_one_value_whatever_the_type() -> None:
    for types in (OPTIMIZERS, SCHEDULERS):
        values: dict[str, set[str]] = {}
        for keys in types.values():
            for name, key in keys.items():
                assert key.auto or key.when_auto is None
                if key.auto:
                    values.setdefault(name, set()).add(repr(key.when_auto))
        assert all(len(result) == 1 for result in values.values()), values


def test_what_other_tables_name_is_a_key() -> None:
    """The importers' tables, the hints for other trainers' names, and the planner's changes."""
    named = {*OTHER_NAMES.values(), *candidates.KEYS.values()}
    for system in ("arguments", "axolotl", "llamafactory"):
        for rule in table(system).values():
            says = rule.says["to"] if isinstance(rule.says, dict) else rule.says
            if rule.section == "carried" and not says.startswith("@"):
                named |= {*says.split()}
    assert len(named) > 30 and named - {*EVERYWHERE} == set()


def test_a_field_has_one_mark_and_nothing_that_is_not_read() -> None:
    """As `Annotated[str, "rows"]` would say nothing, silently."""
    known = (Key, BaseMetadata, GroupedMetadata, FieldInfo)
    for _, model in [("trainer", TrainerSection), *sections_of(TrainerSection, "trainer")]:
        for name, field in model.model_fields.items():
            marks = field.metadata
            strange = [mark for mark in marks if not isinstance(mark, known) and not _reads(mark)]
            assert strange == [], f"{model.__name__}.{name}"
            assert sum(isinstance(mark, Key) for mark in marks) <= 1, f"{model.__name__}.{name}"


def _reads(mark: Any) -> bool:
    return type(mark).__module__.startswith("pydantic.")


def test_what_a_field_says_is_in_its_row() -> None:
    rate, source = OWN_KEYS["trainer.label_smoothing"], OWN_KEYS["trainer.data.sources.path"]
    assert (rate.kind, rate.unit, rate.default) == ("float", "share", 0.0)
    assert rate.expected == "number ≥ 0, < 1" and "share of each target" in rate.about
    assert source.needed and source.kind == "str" and not source.null
    assert OWN_KEYS["trainer.mesh.shard"].kind == "int" and OWN_KEYS["trainer.mesh.shard"].null
    assert OWN_KEYS["trainer.images.size"].unit == "pixels"


def test_keys_that_a_recipe_does_not_honour() -> None:
    section = TrainerSection.model_validate(
        {
            "data": {"format": "parquet", "text_column": "body"},
            "images": {"size": 8},
            "adapter": {"r": 4},
        }
    )
    places = {
        recipe: [problem.place for problem in unhonoured(section, recipe)]
        for recipe in ("causal_lm", "image_classification", "package:labels")
    }
    assert places == {
        "causal_lm": ["trainer.images"],
        "image_classification": ["trainer.data.text_column", "trainer.adapter"],
        "package:labels": ["trainer.data.text_column", "trainer.images", "trainer.adapter"],
    }
