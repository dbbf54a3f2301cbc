"""The layouts in which each loss is certified, and the page's table of them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.support.certify.certifying import config
from tests.support.commands import ROOT
from tests.support.layouts import EXPERTS
from tests.support.training import GPT2

DROPPED = {"config": GPT2 | {"n_layer": 2, "vocab_size": 61}}
ROUTED = EXPERTS | {"vocab_size": 61, "output_router_logits": True}
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


def asked_in(
    folder: Path, layout: str, engine: str | None = None, **trainer: Any
) -> tuple[int, str]:
    """Write the config of a task in a layout; return the ranks, too."""
    size, usual, stage, more = LAYOUTS[layout]
    section: dict[str, Any] = {"model": {"config": LLAMA | {"vocab_size": 61}}, **more, **trainer}
    if "adapter" in section:
        section["model"] = {"name_or_path": base(folder)}
    return size, config(folder, engine or usual, stage, **section)


def base(folder: Path) -> str:
    """Save a tiny model."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    rest = {name: value for name, value in LLAMA.items() if name != "model_type"}
    model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes, **rest, vocab_size=61))
    model.save_pretrained(folder / "base")
    return str(folder / "base")


def set_precision(path: str, precision: str) -> None:
    """Let a config compute in bfloat16 if the `precision` that is certified is the config's."""
    content = json.loads(Path(path).read_text()) | {"bf16": {"enabled": precision == "config"}}
    Path(path).write_text(json.dumps(content))


def table_of(page: str, losses: Iterable[str]) -> tuple[list[str], dict[str, list[str]]]:
    """Return the layouts of a page's table, and the cells of each loss."""
    lines = (ROOT / "docs" / page).read_text().splitlines()
    rows = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in lines]
    [head] = [row for row in rows if row[1:2] == ["ddp"]]
    known = [*losses]
    return head[1:], {row[0]: row[1:] for row in rows if row[0] in known and len(row) == len(head)}
