"""The certificate of distillation: each divergence in each layout, and what it catches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.certify.certifying import certified
from tests.support.certify.faults import distillation as faults
from tests.support.certify.layout_table import (
    DROPPED,
    LAYOUTS,
    ROUTED,
    asked_in,
    set_precision,
    table_of,
)
from tests.support.layouts import FAMILIES
from trainer.tasks.losses.divergences import DIVERGENCES


def asked(folder: Path, layout: str, divergence: str, **trainer: Any) -> tuple[int, str]:
    """Write the config of a divergence in a layout; return the ranks, too."""
    keys = {"divergence": divergence, "top_k": 6, "temperature": 2.0, "hard_weight": 0.3}
    keys |= {"teacher": {"name_or_path": "teacher"}, **trainer.pop("distillation", {})}
    return asked_in(folder, layout, task="distillation", distillation=keys, **trainer)


EVERY = [(layout, divergence) for layout in LAYOUTS for divergence in DIVERGENCES]
SOME = [(layout, [*DIVERGENCES][number % 3]) for number, layout in enumerate(LAYOUTS)]
"""Each layout once; all others are left to `--whole`."""


@pytest.mark.more
@pytest.mark.parametrize(
    ("layout", "divergence"),
    [pytest.param(*one, marks=() if one in SOME else pytest.mark.whole) for one in EVERY],
)
def test_each_divergence_is_exact_in_each_layout(
    pools: Any, tmp_path: Path, layout: str, divergence: str
) -> None:
    size, path = asked(tmp_path, layout, divergence)
    for passed, _, table in pools[size].run(certified, path=path, world_size=size):
        assert passed, table


CAPPED = FAMILIES["gemma2"] | {"vocab_size": 61, "num_hidden_layers": 2}
ODD: dict[str, tuple[str, dict[str, Any], str]] = {
    "a router's loss": ("fsdp", {"model": {"config": ROUTED}}, "float32"),
    "capped logits": ("tensor_zero2", {"model": {"config": CAPPED}}, "float32"),
    "dropout and noise": ("ddp", {"model": DROPPED, "neftune_alpha": 5.0}, "float32"),
    "smoothing": ("fsdp", {"label_smoothing": 0.1}, "float32"),
    "packed": ("fsdp", {"data": {"documents": "pack"}}, "float32"),
    "packed, over context ranks": ("context", {"data": {"documents": "pack"}}, "float32"),
    "bfloat16": ("fsdp", {}, "config"),
}


@pytest.mark.more
@pytest.mark.parametrize("name", ODD)
def test_other_models_and_precisions(pools: Any, tmp_path: Path, name: str) -> None:
    layout, more, precision = ODD[name]
    size, path = asked(tmp_path, layout, "jensen_shannon", **more)
    set_precision(path, precision)
    arguments = {"path": path, "world_size": size, "precision": precision}
    for passed, _, table in pools[size].run(certified, **arguments):
        assert passed, table


FAULTS: dict[Callable[[str], Any], tuple[str, str, dict[str, Any]]] = {
    faults.column_of_another_sample: ("fsdp", "loss", {}),
    faults.dropout_in_the_teacher: ("fsdp", "loss", {"model": DROPPED}),
    faults.a_prompt_token_counted: ("fsdp", "loss", {}),
    faults.square_of_the_temperature_missing: ("fsdp", "loss", {}),
    faults.a_mean_of_micro_batches: ("fsdp", "loss", {}),
    faults.likeliest_of_one_rank: ("fsdp", "loss", {}),
    faults.words_of_other_ranks_not_summed: ("tensor_zero2", "loss", {}),
    faults.gradient_of_other_words_missing: ("tensor_zero2", "gradient", {}),
    faults.places_of_another_part: ("context", "loss", {}),
}
"""The layout in which each fault is planted, the check that finds it, and more of the config."""


@pytest.mark.more
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_planted_fault_is_caught_and_named(
    pools: Any, tmp_path: Path, fault: Callable[[str], Any]
) -> None:
    layout, check, more = FAULTS[fault]
    size, path = asked(tmp_path, layout, "forward", **more)
    arguments = {"path": path, "world_size": size, "fault": fault}
    for passed, first, table in pools[size].run(certified, **arguments):
        assert not passed
        assert first == check, table


def test_the_page_has_the_table_of_divergences_and_layouts() -> None:
    """No cell is empty, and each that says exact is a case of the certificate."""
    head, cells = table_of("distillation.md", DIVERGENCES)
    assert head == list(LAYOUTS)
    assert list(cells) == list(DIVERGENCES)
    assert all(set(row) == {"exact"} for row in cells.values())


def test_what_the_faults_patch_is_there() -> None:
    for fault in FAULTS:
        with fault("mesh"):
            pass
