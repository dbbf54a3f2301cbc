"""Labels and rewards are exact under every layout, and what would make them wrong is found.

A certificate compares loss, every gradient, the clip norm, weights, evaluation and a resumed run
with one process of transformers' own head and loss. Dropout, ragged sequences, unequal numbers of
targets, accumulation and clipping are on.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.certify.certifying import certified
from tests.support.certify.faults import labels as faults
from tests.support.labels import KINDS, LAYOUTS, base_of, written
from tests.support.pool import Pools

EXACT = "exact"
WHOLE = "whole sequences"
TABLE: dict[str, dict[str, str]] = {
    layout: dict.fromkeys(KINDS, WHOLE if layout == "context" else EXACT) for layout in LAYOUTS
}
"""Layouts x kinds: exact, or a word of the reason why it is unsupported."""
BODY = {
    "single": "bert",
    "multi": "modernbert",
    "regression": "qwen3",
    "tokens": "bert",
    "reward": "llama",
}
CELLS = [(layout, kind) for layout, row in TABLE.items() for kind in row]


def body_of(layout: str, kind: str) -> str:
    """Return the body that a cell is tried with: dropout in attention can't be split over ranks."""
    if layout == "expert":
        return "qwen3_moe"
    return "qwen3" if layout == "tensor_zero2" and kind == "reward" else BODY[kind]


def ranks_of(layout: str) -> int:
    return 2 if layout in ("ddp", "zero2", "zero3", "fsdp", "lora") else 4


def run(
    pools: Pools, folder: Path, layout: str, kind: str, fault: Any = None, **trainer: Any
) -> tuple[bool, str, str]:
    body = trainer.pop("body", None) or body_of(layout, kind)
    if layout == "lora":
        trainer["model"] = {"name_or_path": base_of(folder, body)}
    path = written(folder, body, kind, layout, **trainer)
    ranks = ranks_of(layout)
    results = pools[ranks].run(certified, path=path, world_size=ranks, fault=fault)
    return results[0]  # type: ignore[no-any-return]


def test_the_table_has_no_empty_cell() -> None:
    assert all(row.keys() == set(KINDS) and all(row.values()) for row in TABLE.values())


@pytest.mark.more
@pytest.mark.parametrize(("layout", "kind"), CELLS, ids=[f"{a}-{b}" for a, b in CELLS])
def test_a_cell_of_the_table(layout: str, kind: str, pools: Pools, tmp_path: Path) -> None:
    expected = TABLE[layout][kind]
    if expected != EXACT:
        with pytest.raises(AssertionError, match=expected):
            run(pools, tmp_path, layout, kind)
        return
    passed, _, table = run(pools, tmp_path, layout, kind)
    assert passed, table


@pytest.mark.more
@pytest.mark.parametrize("engine", ["deepspeed", "accelerate", "mesh"])
@pytest.mark.parametrize("layout", ["ddp", "zero2", "zero3"])
@pytest.mark.parametrize("body", ["llama", "deberta-v2"])
def test_each_engine_trains_causal_and_bidirectional_bodies(
    body: str, layout: str, engine: str, pools: Pools, tmp_path: Path
) -> None:
    passed, _, table = run(pools, tmp_path, layout, "single", body=body, engine=engine)
    assert passed, table


FAULTS: dict[str, tuple[Callable[[str], Any], str, str, str]] = {
    "a padded token is scored": (faults.padding_scored, "llama", "single", "output"),
    "padding is attended to": (faults.padding_attended, "bert", "tokens", "output"),
    "padding on the wrong side": (faults.padding_on_the_other_side, "bert", "single", "output"),
    "labels shifted by one": (faults.labels_shifted, "bert", "tokens", "loss"),
    "mean of means": (faults.mean_of_means, "bert", "tokens", "loss"),
    "class weights": (faults.classes_weighted, "llama", "single", "loss"),
    "answers swapped on one rank": (
        faults.answers_swapped_on_one_rank,
        "llama",
        "reward",
        "output",
    ),
    "margins left out": (faults.margin_left_out, "llama", "reward", "loss"),
    "rewards not centred": (faults.not_centred, "llama", "reward", "loss"),
    "a head without gradient on one rank": (
        faults.head_without_gradient_on_one_rank,
        "llama",
        "single",
        "gradient",
    ),
}
"""What is planted, a body, a kind of labels, and the check that fails first."""


@pytest.mark.more
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name: str, pools: Pools, tmp_path: Path) -> None:
    fault, body, kind, expected = FAULTS[name]
    passed, check, table = run(pools, tmp_path, "ddp", kind, fault, body=body, engine="mesh")
    assert not passed, table
    assert check == expected, table
    assert expected != "gradient" or "score.weight" in table
