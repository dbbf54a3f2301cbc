"""A run in words and files: the printed plan, and the descriptions saved beside the results."""

from __future__ import annotations

import json
import platform
import re
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from trainer.config import origin_table
from trainer.data.order import sample_ids
from trainer.engines import ENGINES, Machine
from trainer.errors import show
from trainer.layout import AXES, PIPELINE_SCHEDULES, Layout, Recompute
from trainer.models.spec import MadeWeights, NoWeights
from trainer.run.prepare import Prepared
from trainer.state import VERSION
from trainer.storage import Json, disk_errors, ensure_writable, replace_file

PREVIEWED = 4000
"""The most characters of a run of tokens."""
PACKAGES = (
    *("torch", "deepspeed", "transformers", "accelerate"),
    *("datasets", "tokenizers", "safetensors"),
)


def plan_lines(prepared: Prepared, in_full: bool) -> Iterator[str]:
    """Describe the run to come, a line each; `in_full` adds every resolved value and samples."""
    config = prepared.config
    subject = prepared.subject
    section = config.trainer
    spec = subject.spec
    data = subject.data
    samples = prepared.steps * prepared.layout.train_batch
    engine = ": ".join(filter(None, prepared.engine))
    yield f"layout  {prepared.layout.describe()} (engine {engine})"
    millions = spec.parameters / 1e6
    yield f"model   {spec.name}: {millions:,.1f} M parameters, {len(spec.blocks)} blocks"
    yield f"data    {data.describe()}"
    yield from subject.lines(prepared.workers)
    epochs = samples / len(data.train)
    unit = "times the first file" if section.data.stream else "epochs"
    amount = f"{samples:,} samples ({epochs:.2f} {unit}){subject.amount(samples, section)}"
    yield f"plan    {prepared.steps:,} steps, {amount}"
    yield f"update  {_update_line(prepared)}"
    for note in (*prepared.model_notes, *config.notes, *_rate_notes(prepared)):
        yield f"note    {note}"
    if not in_full:
        return
    yield "resolved values"
    for key, value, origin in origin_table(config):
        yield f"  {key} = {value}  <- {origin}"
    yield "config"
    yield json.dumps(resolved(prepared), indent=2)
    if shown := subject.samples(list(range(min(2, len(data.train))))):
        yield "samples"
        yield shown
    counts = [f"{len(source)}{name and f' of {name}'}" for name, source in data.evaluations.items()]
    yield f"evaluation: {' and '.join(counts) or 0} held-out samples, seed {section.seed}"


def preview_lines(prepared: Prepared, count: int) -> Iterator[str]:
    """Describe the data, and show its first `count` samples in the order of training; of a stream,
    `count` samples of the first file."""
    subject = prepared.subject
    yield f"data    {subject.data.describe()}"
    yield from subject.lines(prepared.workers)
    length = len(subject.data.train)
    seed, order = prepared.sample_order
    numbers = sample_ids(seed, 0, min(count, length), length, order).tolist()
    yield from subject.samples(numbers, width=PREVIEWED, in_full=True).splitlines()


def _update_line(prepared: Prepared) -> str:
    optimizer = prepared.config.optimizer
    if not (decay := optimizer.params["weight_decay"]):
        return f"{optimizer.type} without weight decay"
    excludes = show(prepared.config.trainer.weight_decay_excludes)
    excluded = f"(trainer.weight_decay_excludes: {excludes})"
    return f"{optimizer.type}, weight decay {decay:g} on {_decayed(prepared)} {excluded}"


def _decayed(prepared: Prepared) -> str:
    """Return which parameters have weight decay. How many are trained is said elsewhere, once."""
    spared = sum(prepared.undecayed.values())
    if prepared.learned == (whole := prepared.subject.spec.parameters):
        return f"{whole - spared:,} of {whole:,} parameters"
    return "all trained parameters" + (f" but {spared:,}" if spared else "")


def _rate_notes(prepared: Prepared) -> list[str]:
    """Warn of a warm-up as long as the run, and of a rate that undoes what a model has learned.

    Those of `ds_configs/` may be. Of the rate under the optimizers named Adam, without an adapter.
    """
    optimizer = prepared.config.optimizer
    spec = prepared.subject.spec
    scheduler = prepared.config.scheduler
    notes = list[str]()
    warmup = scheduler.params.get("warmup_num_steps", 0) if scheduler else 0
    if warmup >= prepared.steps:
        start = f"scheduler.params.warmup_num_steps is {warmup}, and the run has {prepared.steps}"
        notes = [f"{start} steps: all of it is warm-up; lower it, or train for more steps"]
    # an own module's values are its constructor's: nobody knows if these were trained
    initial = type(spec.building.weights) in (NoWeights, MadeWeights)
    begun = initial or prepared.config.trainer.adapter is not None
    if begun or "adam" not in optimizer.type.lower() or optimizer.params["lr"] < 1e-3:
        return notes
    start = f"optimizer.params.lr is {optimizer.params['lr']:g}, and the model's weights are loaded"
    return [*notes, f"{start}: fine-tuning all of them usually takes 1e-6 to 1e-4"]


def device_notes(precision: str, machine: Machine) -> Iterator[str]:
    """Yield notes on GPUs: matrix products could be faster; a slow rank is not detected."""
    if machine.device.type != "cuda":
        return
    if precision == "float32" and torch.get_float32_matmul_precision() == "highest":
        yield (
            "note    float32 on a GPU, without TF32: matrix products take several times the "
            "time. Set bf16.enabled=true, or TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1 in the environment"
        )
    if machine.ranks.world_size > 1:
        yield "note    a slow rank is not reported: NCCL waits on the device, not on the host"


def resolved(prepared: Prepared) -> Json:
    """Return the whole config with nothing left to resolve, a config that starts the same run."""
    return {**prepared.config.settings, "trainer": prepared.config.trainer.model_dump()}


def run_description(prepared: Prepared) -> Json:
    """Return the content of a checkpoint's `trainer.json`, without the position."""
    return {
        "seed": prepared.config.trainer.seed,
        "order": prepared.order,
        "engine": prepared.engine.name,
        "layout": prepared.layout.to_json(),
        "config": resolved(prepared),
        "data": {
            "fingerprint": prepared.subject.data.fingerprint,
            **prepared.subject.data.description(),
        },
        "model": prepared.subject.spec.config,
        "sources": dict(prepared.sources),
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    result = {"meshloom": VERSION, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            result[package] = version(package)
        except PackageNotFoundError:
            continue
    return result


def write(folder: Path, prepared: Prepared, machine: Machine, overrides: Sequence[str]) -> None:
    """Write `environment.json` and `config.json` where a checkpoint fits. Raises DiskError."""
    ensure_writable(folder / "checkpoints", prepared.saved_bytes)
    environment = {
        "versions": versions(),
        "engine": prepared.engine.name,
        "layout": prepared.layout.to_json(),
        "device": machine.device.type,
        "unit": prepared.subject.units,
        "platform": platform.platform(),
        "command": sys.argv,
        "config": str(prepared.config.path),
        "overrides": list(overrides),
        "request": prepared.config.raw,
    }
    files = {"environment.json": environment, "config.json": resolved(prepared)}
    for name, value in files.items():
        with disk_errors(folder / name):
            replace_file(folder / name, (json.dumps(value, indent=2) + "\n").encode())


_NO_OFFLOAD = {"offload_optimizer": "none", "offload_param": "none"}
_OFFERED = (
    "DDP (ZeRO-0); ZeRO-1; ZeRO-2; ZeRO-3; ZeRO-2, optimizer on the CPU; ZeRO-3, all on the CPU; "
    "HSDP; pipeline; pipeline x ZeRO-1; pipeline x ZeRO-2; pipeline x ZeRO-3; pipeline x HSDP; "
    "zero-bubble pipeline x ZeRO-3; tensor parallel; tensor parallel x ZeRO-2; "
    "tensor parallel x ZeRO-3; expert parallel x ZeRO-2; expert parallel x ZeRO-3; "
    "expert parallel x HSDP; pipeline x expert parallel x ZeRO-2; "
    "tensor x expert parallel x ZeRO-2; context x expert parallel x ZeRO-3; "
    "context parallel x ZeRO-2; context parallel x ZeRO-3; context parallel x HSDP; "
    "pipeline x context parallel; tensor x context parallel x ZeRO-2; "
    "pipeline x tensor parallel x ZeRO-2"
)
_PARTS: dict[str, Json] = {
    "DDP (ZeRO-0)": {},
    "HSDP": {"shard": 2, "zero_stage": 3},
    **{f"ZeRO-{stage}": {"replicate": 1, "shard": 4, "zero_stage": stage} for stage in (1, 2, 3)},
    **{axis: {axis: 2} for axis in ("pipeline", "tensor", "expert", "context")},
    "zero-bubble pipeline": {"pipeline": 2, "schedule": PIPELINE_SCHEDULES["ZBVZeroBubble"]},
    "optimizer on the CPU": {"offload_optimizer": "cpu"},
    "all on the CPU": {"offload_optimizer": "cpu", "offload_param": "cpu"},
}
"""The fields of Layout that a part of an offered layout's name stands for."""


def layout_table() -> str:
    """Return the table of which engine runs which layout, from the engines' own refusals."""
    lines = [
        "| layout | " + " | ".join(f"`{name}`" for name in ENGINES) + " |",
        "| --- |" + " --- |" * len(ENGINES),
    ]
    reasons: dict[str, int] = {}
    for name in _OFFERED.split("; "):
        given: Json = {"replicate": 2}
        for part in re.split(" x |, ", name.replace(" parallel", "")):
            given |= _PARTS[part]
        layout = _plain_layout(given)
        cells = []
        for kind in ENGINES.values():
            reason = kind.refusal(layout)
            number = reasons.setdefault(reason, len(reasons) + 1) if reason else 0
            cells.append(f"no [{number}]" if number else "yes")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", *(f"{number}. {reason}" for reason, number in reasons.items())])


def _plain_layout(given: Json) -> Layout:
    sizes: Json = dict.fromkeys((*AXES, "micro_batch"), 1)
    sizes |= {"zero_stage": 0, "precision": "float32", **_NO_OFFLOAD, **given}
    return Layout(**sizes, accumulation=2 * sizes["pipeline"], recompute=Recompute())
