"""The certificate of preference optimisation: each loss in each layout, and what it catches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.certify.certifying import certified
from tests.support.certify.faults import pairs as faults
from tests.support.certify.layout_table import (
    DROPPED,
    LAYOUTS,
    ROUTED,
    asked_in,
    set_precision,
    table_of,
)
from tests.support.layouts import FAMILIES
from trainer.recipes.pairs.losses import LOSSES


def asked(folder: Path, layout: str, loss: str, **trainer: Any) -> tuple[int, str]:
    """Write the config of a loss in a layout, with all that the loss has; return the ranks, too."""
    kind = LOSSES[loss]
    keys: dict[str, Any] = {"loss": loss, "sft_weight": 0.3}
    keys |= {"label_smoothing": 0.1} if kind.smooths else {}
    return asked_in(folder, layout, task="pairs", pairs=keys, **trainer)


EVERY = [(layout, loss) for layout in LAYOUTS for loss in LOSSES]
SOME = {
    *zip(LAYOUTS, list(LOSSES)[: len(LAYOUTS)], strict=True),
    *zip(["ddp", "context", "tensor_zero2", "pipeline_zero2"], [*LOSSES][10:], strict=True),
}
"""Each layout and each loss once; all others are left to `--whole`."""


@pytest.mark.more
@pytest.mark.parametrize(
    ("layout", "loss"),
    [pytest.param(*one, marks=() if one in SOME else pytest.mark.whole) for one in EVERY],
)
def test_each_loss_is_exact_in_each_layout(
    pools: Any, tmp_path: Path, layout: str, loss: str
) -> None:
    size, path = asked(tmp_path, layout, loss)
    for passed, _, table in pools[size].run(certified, path=path, world_size=size):
        assert passed, table


ODD: dict[str, tuple[str, dict[str, Any], str]] = {
    "a router's loss": ("fsdp", {"model": {"config": ROUTED}}, "float32"),
    "capped logits": (
        "tensor_zero2",
        {"model": {"config": FAMILIES["gemma2"] | {"vocab_size": 61, "num_hidden_layers": 2}}},
        "float32",
    ),
    "dropout and noise": ("ddp", {"model": DROPPED, "neftune_alpha": 5.0}, "float32"),
    **{
        f"bfloat16, {layout}": (layout, {"data": {"sequence_length": 512}}, "config")
        for layout in ("fsdp", "zero3", "pipeline_zero2", "tensor_zero2", "context")
    },
    "bfloat16, accelerate": ("fsdp", {"engine": "accelerate"}, "config"),
}
"""The layout, more of the config, and the precision."""


@pytest.mark.more
@pytest.mark.parametrize("name", ODD)
def test_other_models_and_precisions(pools: Any, tmp_path: Path, name: str) -> None:
    layout, more, precision = ODD[name]
    size, path = asked(tmp_path, layout, "sigmoid", **more)
    set_precision(path, precision)
    arguments = {"path": path, "world_size": size, "precision": precision}
    for passed, _, table in pools[size].run(certified, **arguments):
        assert passed, table


DROPPING = {"model": DROPPED}
FAULTS: dict[Callable[[str], Any], tuple[str, str, dict[str, Any]]] = {
    faults.answers_swapped_on_one_rank: ("fsdp", "loss", {}),
    faults.a_prompt_token_counted: ("fsdp", "loss", {}),
    faults.padding_counted: ("fsdp", "loss", {}),
    faults.reference_of_another_sample: ("fsdp", "loss", {}),
    faults.a_rounded_reference: ("fsdp", "loss", {}),
    faults.tokens_of_one_rank: ("fsdp", "loss", {}),
    faults.truncated_unequally: ("fsdp", "output", {}),
    faults.dropout_in_the_reference: ("fsdp", "loss", DROPPING),
    faults.gradient_of_other_words_missing: ("tensor_zero2", "gradient", {}),
    faults.a_sigmoid_for_each_part_of_a_sequence: ("context", "loss", {}),
    faults.gradient_counted_by_each_part: ("context", "gradient", {}),
}
"""The layout in which each fault is planted, the check that finds it, and more of the config."""


@pytest.mark.more
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_planted_fault_is_caught_and_named(
    pools: Any, tmp_path: Path, fault: Callable[[str], Any]
) -> None:
    layout, check, more = FAULTS[fault]
    size, path = asked(tmp_path, layout, "sigmoid", **more)
    arguments = {"path": path, "world_size": size, "fault": fault}
    for passed, first, table in pools[size].run(certified, **arguments):
        assert not passed
        assert first == check, table


def test_the_page_has_the_table_of_losses_and_layouts() -> None:
    """No cell is empty, and each that says exact is a case of the certificate."""
    head, cells = table_of("preferences_layouts.md", LOSSES)
    assert head == list(LAYOUTS)
    assert list(cells) == list(LOSSES)
    assert all(set(row) == {"exact"} for row in cells.values())


def test_what_the_faults_patch_is_there() -> None:
    for fault in FAULTS:
        with fault("mesh"):
            pass
