"""Masked language models are exact under every layout, and what would make them wrong is found.

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
from tests.support.certify.faults import masked as faults
from tests.support.labels import LAYOUTS
from tests.support.masked import masked_base, written
from tests.support.pool import Pools

EXACT = "exact"
TABLE: dict[str, dict[str, str]] = {
    "ddp": {"bert": EXACT, "modernbert": EXACT, "esm": EXACT},
    "zero2": {"roberta": EXACT, "albert": EXACT},
    "zero3": {"bert": EXACT, "deberta-v2": EXACT},
    "fsdp": {"modernbert": EXACT, "deberta-v2": EXACT},
    "hsdp": {"roberta": EXACT},
    "pipeline_zero2": {"bert": EXACT, "modernbert": EXACT},
    "tensor_zero2": {"roberta": EXACT, "modernbert": EXACT},
    "context": {"bert": "both sides"},
    "expert": {"bert": "expert"},
    "lora": {"bert": EXACT, "modernbert": EXACT},
}
"""Layouts x bodies: exact, or a word of the reason why it is unsupported."""
CELLS = [(layout, body) for layout, row in TABLE.items() for body in row]


def run(
    pools: Pools, folder: Path, layout: str, body: str, fault: Any = None, **trainer: Any
) -> tuple[bool, str, str]:
    if layout == "lora":
        trainer["model"] = {"name_or_path": masked_base(folder, body)}
    path = written(folder, body, layout, **trainer)
    ranks = 2 if layout in ("ddp", "zero2", "zero3", "fsdp", "lora") else 4
    results = pools[ranks].run(certified, path=path, world_size=ranks, fault=fault)
    return results[0]  # type: ignore[no-any-return]


def test_the_table_has_every_layout() -> None:
    assert TABLE.keys() == LAYOUTS.keys()


@pytest.mark.more
@pytest.mark.parametrize(("layout", "body"), CELLS, ids=[f"{a}-{b}" for a, b in CELLS])
def test_a_cell_of_the_table(layout: str, body: str, pools: Pools, tmp_path: Path) -> None:
    expected = TABLE[layout][body]
    if expected != EXACT:
        with pytest.raises(AssertionError, match=expected):
            run(pools, tmp_path, layout, body)
        return
    passed, _, table = run(pools, tmp_path, layout, body)
    assert passed, table


@pytest.mark.more
@pytest.mark.parametrize("engine", ["deepspeed", "accelerate", "mesh"])
def test_each_engine_smooths_labels(engine: str, pools: Pools, tmp_path: Path) -> None:
    passed, _, table = run(pools, tmp_path, "zero2", "bert", engine=engine, label_smoothing=0.1)
    assert passed, table


FAULTS: dict[str, tuple[Callable[[str], Any], str]] = {
    "masks by rank": (faults.masks_by_rank, "output"),
    "the same masks in each epoch": (faults.the_same_masks, "output"),
    "padding is attended to": (faults.padding_attended, "output"),
    "a token that is not masked counts": (faults.all_counted, "loss"),
    "mean of means": (faults.mean_of_means, "loss"),
    "places of another row": (faults.places_moved, "loss"),
}
"""What is planted, and the check that fails first."""


@pytest.mark.more
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name: str, pools: Pools, tmp_path: Path) -> None:
    fault, expected = FAULTS[name]
    passed, check, table = run(pools, tmp_path, "ddp", "bert", fault, engine="mesh")
    assert not passed, table
    assert check == expected, table
