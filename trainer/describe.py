"""A run in words and files: the plan that is printed, and what is saved beside the results."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer import __version__
from trainer.checkpoint.disk import disk_errors, replace_file
from trainer.config import origin_table
from trainer.data.preview import preview
from trainer.engines import ENGINES
from trainer.layout import AXES, SCHEDULES, Layout, Recompute
from trainer.models.spec import flops_per_token

if TYPE_CHECKING:
    from trainer.run import Prepared

PACKAGES = ("torch", "deepspeed", "transformers", "accelerate", "datasets", "tokenizers", "safetensors")


def plan_lines(prepared: Prepared, in_full: bool) -> Iterator[str]:
    """What is about to happen, a line each; `in_full` adds every resolved value, the whole config and samples."""
    config, spec, data = prepared.config, prepared.spec, prepared.data
    section, sequence = config.trainer, config.trainer.data.sequence_length
    samples = prepared.steps * prepared.layout.train_batch
    yield f"layout  {prepared.layout.describe()} (engine {prepared.engine_name})"
    yield f"model   {spec.name}: {spec.parameters / 1e6:,.1f} M parameters, {len(spec.blocks)} blocks"
    yield f"data    {data.summary.describe()}"
    yield (
        f"plan    {prepared.steps:,} steps, {samples:,} samples ({samples / len(data.train):.2f} epochs), "
        f"at most {samples * sequence / 1e6:,.1f} M tokens, {flops_per_token(spec, sequence) / 1e6:,.0f} MFLOP a token"
    )
    for note in config.notes:
        yield f"note    {note}"
    if not in_full:
        return
    yield "resolved values"
    for key, value, origin in origin_table(config):
        yield f"  {key} = {value}  <- {origin}"
    yield "config"
    yield json.dumps(resolved(prepared), indent=2)
    yield "samples"
    yield preview(data.train, prepared.tokenizer)
    yield f"evaluation: {len(data.evaluation) if data.evaluation else 0} held-out samples, seed {section.seed}"


def resolved(prepared: Prepared) -> dict[str, Any]:
    """The whole config with nothing left to resolve; itself a config that starts the same run."""
    return {**prepared.config.settings, "trainer": prepared.config.trainer.model_dump()}


def run_description(prepared: Prepared) -> dict[str, Any]:
    """What `trainer.json` of a checkpoint says beside the position."""
    return {
        "seed": prepared.config.trainer.seed,
        "engine": prepared.engine_name,
        "layout": asdict(prepared.layout),
        "config": resolved(prepared),
        "data": {"fingerprint": prepared.data.fingerprint, **asdict(prepared.data.summary)},
        "model": prepared.spec.config,
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    found = {"meshloom": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def write(folder: Path, prepared: Prepared, overrides: Sequence[str]) -> None:
    """`environment.json` and `config.json` of a run folder."""
    environment = {
        "versions": versions(),
        "platform": platform.platform(),
        "command": sys.argv,
        "config": str(prepared.config.path),
        "overrides": list(overrides),
        "request": prepared.config.raw,
    }
    _write_json(folder / "environment.json", environment)
    _write_json(folder / "config.json", resolved(prepared))


def framed_sample(text: str) -> str:
    return "sample  " + "\n        ".join(text.splitlines())


def _write_json(path: Path, value: Any) -> None:
    with disk_errors(path):
        replace_file(path, (json.dumps(value, indent=2) + "\n").encode())


# layout -> what a Layout needs beside the sizes of one that is plain
_OFFERED: dict[str, dict[str, Any]] = {
    "DDP (ZeRO-0)": {"replicate": 4},
    "ZeRO-1": {"shard": 4, "zero_stage": 1},
    "ZeRO-2": {"shard": 4, "zero_stage": 2},
    "ZeRO-3": {"shard": 4, "zero_stage": 3},
    "ZeRO-2, optimizer on the CPU": {"shard": 4, "zero_stage": 2, "offload_optimizer": "cpu"},
    "ZeRO-3, all on the CPU": {"shard": 4, "zero_stage": 3, "offload_optimizer": "cpu", "offload_param": "cpu"},
    "HSDP": {"replicate": 2, "shard": 2, "zero_stage": 3},
    "pipeline": {"pipeline": 2, "replicate": 2},
    "pipeline x ZeRO-1": {"pipeline": 2, "shard": 2, "zero_stage": 1},
    "pipeline x ZeRO-2": {"pipeline": 2, "shard": 2, "zero_stage": 2},
    "pipeline x ZeRO-3": {"pipeline": 2, "shard": 2, "zero_stage": 3},
    "pipeline x HSDP": {"pipeline": 2, "replicate": 2, "shard": 2, "zero_stage": 3},
    "zero-bubble pipeline x ZeRO-3": {
        "pipeline": 2,
        "shard": 2,
        "zero_stage": 3,
        "schedule": SCHEDULES["ZBVZeroBubble"],
    },
    "tensor parallel": {"tensor": 2, "replicate": 2},
    "tensor parallel x ZeRO-2": {"tensor": 2, "shard": 2, "zero_stage": 2},
    "tensor parallel x ZeRO-3": {"tensor": 2, "shard": 2, "zero_stage": 3},
    "pipeline x tensor parallel x ZeRO-2": {"pipeline": 2, "tensor": 2, "shard": 2, "zero_stage": 2},
}


def layout_table(cell: Callable[[str, Layout], str] = lambda engine, layout: "yes") -> str:
    """Which engine runs which layout, as Markdown, from the engines' own refusals; `cell` words the agreement."""
    lines = ["| layout | " + " | ".join(f"`{name}`" for name in ENGINES) + " |", "| --- |" + " --- |" * len(ENGINES)]
    for name, given in _OFFERED.items():
        layout = _plain_layout(given)
        cells = [
            f"no: {reason}" if (reason := kind.refusal(layout)) else cell(engine, layout)
            for engine, kind in ENGINES.items()
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def proof(engine: str, layout: Layout) -> str:
    """A link to the test that an engine runs a layout as one process would."""
    kind = "tensor" if layout.tensor > 1 else "pipeline" if layout.pipeline > 1 else "engine"
    whose = "deepspeed" if engine == "deepspeed" else "torch"
    return f"[yes](tests/test_{kind}_{whose}.py)"


def _plain_layout(given: dict[str, Any]) -> Layout:
    sizes: dict[str, Any] = dict.fromkeys((*AXES, "micro_batch"), 1)
    sizes |= {"zero_stage": 0, "offload_optimizer": "none", "offload_param": "none", "precision": "float32", **given}
    ranks, accumulation = sizes["replicate"] * sizes["shard"], 2 * sizes["pipeline"]
    world_size, train_batch = ranks * sizes["pipeline"] * sizes["tensor"], accumulation * ranks
    return Layout(
        **sizes, world_size=world_size, accumulation=accumulation, train_batch=train_batch, recompute=Recompute()
    )
