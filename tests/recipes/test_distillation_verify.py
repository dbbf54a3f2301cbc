"""The certificate of distillation: each divergence in each layout, and what it catches."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.certify.certifying import certified, config
from tests.support.certify.faults import distillation as faults
from tests.support.commands import ROOT
from tests.support.layouts import EXPERTS, FAMILIES
from tests.support.training import GPT2
from trainer.tasks.losses.divergences import DIVERGENCES

DROPPED = {"config": GPT2 | {"n_layer": 2, "vocab_size": 61}}
LLAMA = {"model_type": "llama", "num_hidden_layers": 2, "num_key_value_heads": 2}
LAYOUTS: dict[str, tuple[int, str, int, dict[str, Any]]] = {
    "ddp": (2, "mesh", 0, {}),
    "zero2": (2, "deepspeed", 2, {}),
    "zero3": (2, "deepspeed", 3, {}),
    "fsdp": (2, "mesh", 3, {}),
    "pipeline_zero2": (4, "mesh", 2, {"stages": 2}),
    "tensor_zero2": (4, "mesh", 2, {"tensor": 2}),
    "context": (4, "mesh", 2, {"context": 2}),
    "hsdp": (4, "mesh", 3, {"mesh": {"replicate": 2}}),
    "expert": (2, "mesh", 2, {"expert": 2, "model": {"config": EXPERTS | {"vocab_size": 61}}}),
    "lora": (2, "mesh", 2, {"adapter": {"r": 4, "dropout": 0.1}}),
}
"""The ranks, the engine, the ZeRO stage, and more of the config. All are exact."""


def asked(folder: Path, layout: str, divergence: str, **trainer: Any) -> tuple[int, str]:
    """Write the config of a divergence in a layout; return the ranks, too."""
    size, engine, stage, more = LAYOUTS[layout]
    keys = {"divergence": divergence, "top_k": 6, "temperature": 2.0, "hard_weight": 0.3}
    keys |= {"teacher": {"name_or_path": "teacher"}}
    section: dict[str, Any] = {"model": {"config": LLAMA | {"vocab_size": 61}}, **more, **trainer}
    if "adapter" in section:
        section["model"] = {"name_or_path": base(folder)}
    task = {"task": "distillation", "distillation": keys | section.pop("distillation", {})}
    return size, config(folder, engine, stage, **task, **section)


def base(folder: Path) -> str:
    """Save a tiny model."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    rest = {name: value for name, value in LLAMA.items() if name != "model_type"}
    model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes, **rest, vocab_size=61))
    model.save_pretrained(folder / "base")
    return str(folder / "base")


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


ROUTED = EXPERTS | {"vocab_size": 61, "output_router_logits": True}
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
    content = json.loads(Path(path).read_text()) | {"bf16": {"enabled": precision == "config"}}
    Path(path).write_text(json.dumps(content))
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
    lines = (ROOT / "docs" / "distillation.md").read_text().splitlines()
    rows = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in lines]
    [head] = [row for row in rows if row[1:2] == ["ddp"]]
    cells = {row[0]: row[1:] for row in rows if row[0] in DIVERGENCES and len(row) == len(head)}
    assert head[1:] == list(LAYOUTS)
    assert list(cells) == list(DIVERGENCES)
    assert all(set(row) == {"exact"} for row in cells.values())


def test_what_the_faults_patch_is_there() -> None:
    for fault in FAULTS:
        with fault("mesh"):
            pass
