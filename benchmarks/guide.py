#!/usr/bin/env python3
"""The table of docs/which.md: what each config takes of 7 and 70 billion parameters, as `meshloom
plan` says it.

python benchmarks/guide.py            # writes the table between the marks of docs/which.md
python benchmarks/guide.py 3          # prints the third row
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import warnings
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("DS_ACCELERATOR", "cpu")

PAGE = ROOT / "docs" / "which.md"
BEGIN, END = "<!-- by benchmarks/guide.py -->", "<!-- end -->"
SHAPE = {
    "model_type": "llama",
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
MODELS = {
    "7 B": SHAPE
    | {
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
    },
    "70 B": SHAPE
    | {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
    },
}
BATCH = {
    "train_batch_size": 1024,
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": "auto",
}
HEAD = """| model | GPUs | config | fullest GPU | host, each process | a step at the data sheet's peak |
| --- | --- | --- | --- | --- | --- |"""


class Case(NamedTuple):
    model: str
    nodes: int
    gpus: int
    device: str
    config: str
    full: bool = False
    stages: int = 1


CASES = (
    Case("7 B", 1, 1, "h100-80gb", "zero2_offload", full=True),
    Case("7 B", 1, 1, "4090-24gb", "zero3_offload", full=True),
    Case("7 B", 1, 8, "h100-80gb", "zero1"),
    Case("7 B", 1, 8, "a100-40gb", "zero2", full=True),
    Case("7 B", 1, 8, "4090-24gb", "zero3", full=True),
    Case("7 B", 8, 8, "h100-80gb", "hsdp"),
    Case("7 B", 8, 8, "4090-24gb", "hsdp", full=True),
    Case("70 B", 8, 8, "h100-80gb", "zero3", full=True),
    Case("70 B", 8, 8, "h100-80gb", "pipeline_zero1", full=True, stages=8),
    Case("70 B", 8, 8, "h100-80gb", "pipeline_zero2", full=True, stages=8),
    Case("70 B", 8, 8, "h100-80gb", "pipeline_zero2", full=True, stages=16),
)


def row(case: Case) -> str:
    """One line of the table."""
    from trainer.config import load
    from trainer.tools.planner.cluster import Cluster, device_of, gib
    from trainer.tools.planner.from_config import planned

    words = ["trainer.activation_checkpointing=full"] if case.full else []
    words += [f"pipeline.stages={case.stages}"] if case.stages > 1 else []
    given = json.loads((ROOT / "ds_configs" / f"{case.config}.json").read_text()) | BATCH
    given["trainer"] |= {"model": {"config": MODELS[case.model]}}
    config = load(given, [*words, "trainer.data.sequence_length=4096"])
    plan = planned(config, Cluster(case.nodes, case.gpus, device_of(case.device)))
    where = f"{case.nodes} x {case.gpus}" if case.nodes > 1 else str(case.gpus)
    name = f"`{case.config}`" + (", full" if case.full else "")
    name += f", {case.stages} stages" if case.stages > 1 else ""
    fits = gib(plan.needed) + ("" if plan.fits else f": {gib(plan.needed - plan.room)} too much")
    host = gib(plan.on_host) if plan.on_host else ""
    step = f"{float(f'{plan.time.least:.2g}'):,g} s"
    return f"| {case.model} | {where} {case.device} | {name} | {fits} | {host} | {step} |"


def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    if len(sys.argv) > 1:
        print(row(CASES[int(sys.argv[1]) - 1]))
        return
    table = "\n".join([HEAD, *map(row, CASES)])
    page = PAGE.read_text()
    PAGE.write_text(re.sub(f"{BEGIN}.*{END}", f"{BEGIN}\n{table}\n{END}", page, flags=re.DOTALL))


if __name__ == "__main__":
    main()
