"""A checkpoint of any layout resumes in any other, on another number of ranks, as if that one had
run all along.

python -m tests.conformance.test_any_to_any      # writes the table of benchmarks/results again
"""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.support.conformance.resuming import FOUR, LAYOUTS, ONE, TWO, all_to_all, ring
from tests.support.layouts import TWO_EXPERTS
from tests.support.optim.muon import MUON as OF_MUON
from tests.support.pool import Pools

DOCS = Path(__file__).resolve().parent.parent.parent / "benchmarks/results/any_to_any.md"


def markdown(table: dict[str, dict[str, float]]) -> str:
    letters = {name: chr(ord("A") + index) for index, name in enumerate(LAYOUTS)}
    lines = [
        "| from \\ to | " + " | ".join(letters.values()) + " |",
        "| --- |" + " --- |" * len(letters),
    ]
    for before, row in table.items():
        lines.append(
            f"| {letters[before]}: {before} | "
            + " | ".join(f"{row[after]:.0e}" for after in LAYOUTS)
            + " |"
        )
    return "\n".join(lines)


ALL = set(product(LAYOUTS, LAYOUTS))
FEW = [
    "one process",
    "`deepspeed` ZeRO-3 on 2",
    "`accelerate` FSDP on 2",
    "`mesh` 2 folded stages x ZeRO-2 on 4",
]


@pytest.mark.more
@pytest.mark.parametrize(
    "pairs",
    [
        pytest.param(ring(FEW, 1), id="a few once"),
        pytest.param(
            ring(list(LAYOUTS), 7), id="each once"
        ),  # of another engine and size nearly always
        pytest.param(ALL, id="all", marks=pytest.mark.whole),
    ],
)
def test_any_layout_goes_on_in_any_other(pools, tmp_path, pairs):
    table = all_to_all(pools, tmp_path, pairs)
    results = {
        (before, after): error for before, row in table.items() for after, error in row.items()
    }
    assert results.keys() == pairs
    assert {pair: error for pair, error in results.items() if not error <= 1e-5} == {}


MUON = {
    "one process": replace(ONE, zero_stage=0),
    "`accelerate` FSDP on 2": replace(TWO, engine="accelerate", zero_stage=3),
    "`mesh` 2 stages x ZeRO-2 on 4": replace(FOUR, pipeline=2),
    "`mesh` HSDP on 4": replace(FOUR, replicate=2, zero_stage=3),
    "`mesh` 2-way tensor x ZeRO-2 on 4": replace(FOUR, tensor=2),
}


@pytest.mark.more
@pytest.mark.parametrize("step", [1, 2])
def test_muon_goes_on_in_another_layout(pools, tmp_path, step):
    """Its momentum is a whole matrix's, and its matrices have no count of updates."""
    cases = {name: replace(case, optimizer=OF_MUON) for name, case in MUON.items()}
    table = all_to_all(pools, tmp_path, ring(list(MUON), step), cases)
    assert all(error <= 1e-5 for row in table.values() for error in row.values()), table


CONTEXT = {
    "2 ranks to a row": replace(TWO, context=2),
    "one process": replace(ONE, zero_stage=0),
    "4 ranks to a row": replace(FOUR, engine="accelerate", context=4, zero_stage=3),
    "2 rows, 2 ranks to each": replace(FOUR, engine="deepspeed", context=2),
}


@pytest.mark.more
def test_rows_are_divided_among_more_ranks_or_fewer(pools, tmp_path):
    table = all_to_all(pools, tmp_path, ring(list(CONTEXT), 1), CONTEXT)
    assert all(error <= 1e-5 for row in table.values() for error in row.values()), table
    assert sum(map(len, table.values())) == len(CONTEXT)


PAIR = TWO_EXPERTS | {"attention_dropout": 0.0}
FEW_EXPERTS = {
    "one process": replace(ONE, zero_stage=0),
    "ZeRO-3 on 4": replace(FOUR, zero_stage=3),
    "`accelerate` FSDP on 4": replace(FOUR, engine="accelerate", zero_stage=3),
    "`deepspeed` ZeRO-3 on 2": replace(TWO, engine="deepspeed", zero_stage=3),
    "an expert for two of 4": replace(FOUR, expert=2, zero_stage=3),
}


@pytest.mark.more
@pytest.mark.parametrize("optimizer", ["AdamW", "Muon"])
def test_fewer_experts_than_ranks_go_on_in_another_layout(pools, tmp_path, optimizer):
    """FSDP divides them along another dimension than the first."""
    more: dict[str, Any] = {"model": PAIR}
    if optimizer == "Muon":
        more["optimizer"] = OF_MUON
    names = [name for name in FEW_EXPERTS if optimizer != "Muon" or "deepspeed" not in name]
    cases = {name: replace(FEW_EXPERTS[name], **more) for name in names}
    table = all_to_all(pools, tmp_path, ring(names, 1), cases)
    assert all(error <= 1e-5 for row in table.values() for error in row.values()), table


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_table_in_the_docs_has_every_layout(name):
    rows = re.findall(rf"^\| [A-Z]: {re.escape(name)} \|(.*)\|$", DOCS.read_text(), re.MULTILINE)
    assert len(rows) == 1
    assert all(float(cell) <= 1e-5 for cell in rows[0].split("|")) and len(
        rows[0].split("|")
    ) == len(LAYOUTS)


if __name__ == "__main__":
    import tempfile

    running = Pools()
    with tempfile.TemporaryDirectory() as temporary:
        found = all_to_all(running, Path(temporary), ALL)
    text = DOCS.read_text()
    start = text.index("| from \\ to |")
    end = text.find("\n\n", start)
    DOCS.write_text(text[:start] + markdown(found) + text[end:])
    running.close()
