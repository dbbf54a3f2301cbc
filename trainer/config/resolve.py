"""Replaces every "auto" as Hugging Face does (transformers/integrations/deepspeed.py)."""

from __future__ import annotations

import math
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Literal

from trainer.config.axes import mesh_sizes, nearest, ranks_inside, secondary_shard
from trainer.config.compiled import FILE, OVERRIDE, Config
from trainer.config.keys import AUTOS, DIFFERS, LOW_PRECISION
from trainer.config.keys.key import AUTO
from trainer.config.read import at, leaves
from trainer.config.rules import ACCUMULATION, BATCH, MICRO, WARMUP, conflicts
from trainer.errors import ConfigError, Problem, show
from trainer.storage import Json

MICRO_BATCH = 8
"""Hugging Face's `per_device_train_batch_size`, for batch sizes that are "auto"."""


@dataclass(frozen=True)
class RuntimeFacts:
    """Facts outside the config on which its "auto" values depend; None: not known yet."""

    world_size: int
    hidden_size: int | None
    total_steps: int | None
    bf16: bool
    """True if the device computes in bfloat16."""
    device: Literal["cpu", "cuda"]
    local_world_size: int | None = None
    """The number of processes on one machine."""


RECOMPUTE = "trainer.activation_checkpointing"
"""The key whose "auto" the planner decides, by `recomputing`, once the model is known."""
Decisions = dict[str, tuple[object, str]]


def resolve(config: Config, facts: RuntimeFacts) -> Config:
    """Return `config` with its "auto" values replaced and its batch sizes complete.

    May be called again when more facts are known: values that need a fact that is None stay "auto"
    until then. Raises ConfigError if the mesh or the batch sizes do not fit the world size, if the
    GPU lacks bfloat16, or if keys contradict one another.
    """
    config = _within_machines(config, facts)
    if facts.device == "cuda" and not facts.bf16 and at(config.settings, "bf16.enabled") is True:
        actual = "saw true, for a GPU that does not multiply in bfloat16 (V100, T4 and older)"
        expected = "a GPU of compute capability 8.0 or later"
        hint = 'Set bf16.enabled to "auto" or false, and fp16.enabled true.'
        raise ConfigError(Problem("bf16.enabled", actual, expected, hint))
    data_ranks = mesh_sizes(config, facts.world_size).data_ranks
    decisions = _values(config, facts) | _batch(config.settings, data_ranks)
    settings = deepcopy(config.settings)
    origins = dict(config.origins)
    for path, (value, reason) in decisions.items():
        section, _, name = path.rpartition(".")
        at(settings, section)[name] = value
        origins[path] = f"auto: {reason}"
    waiting = _waiting(settings, config)
    for path in [name for name, value in leaves(settings) if value == AUTO and name not in waiting]:
        section, _, name = path.rpartition(".")
        del at(settings, section)[name]
        origins[path] = "auto: DeepSpeed's default"
    if problems := conflicts(settings):
        raise ConfigError(*problems)
    return _in_steps(replace(config, settings=settings, origins=origins), facts.total_steps)


def _in_steps(config: Config, steps: int | None) -> Config:
    """Convert shares of all steps to steps, once those are known; rounded up, as by Trainer."""
    if steps is None:
        return config
    update: Json = {"warmup_ratio": None}
    origins = dict(config.origins)
    for name in ("checkpoint", "evaluation"):
        section = getattr(config.trainer, name)
        if section.every is not None and section.every < 1:
            update[name] = section.model_copy(update={"every": _share_of(section.every, steps)})
            origins[f"trainer.{name}.every"] = f"auto: {section.every:g} of {steps:,} steps"
    return replace(config, trainer=config.trainer.model_copy(update=update), origins=origins)


def _share_of(share: float, steps: int) -> int:
    return max(1, math.ceil(round(share * steps, 6)))  # a third of 99 is 33, not 34


def _within_machines(config: Config, facts: RuntimeFacts) -> Config:
    """Let FSDP shard within each machine and replicate across, unless `trainer.mesh` has sizes."""
    local = facts.local_world_size or facts.world_size
    mesh = config.trainer.mesh
    sizes = mesh_sizes(config, facts.world_size, local)
    machines = facts.world_size // local
    config = _with_note(config, _crossing(sizes.tensor, local, machines))
    inside = ranks_inside(local, sizes.tensor, sizes.averaging_ranks)
    if mesh.shard == "node":
        lone = machines > 1 and inside == sizes.averaging_ranks > 1
        note = f"a node has no two ranks to shard over: shards over all {inside}" if lone else None
    elif (
        config.trainer.engine not in ("accelerate", "mesh")
        or mesh.replicate
        or mesh.shard
        or sizes.pipeline > 1
        or secondary_shard(config.settings) > 1  # a copy in each machine, of what all shard
    ):
        return config
    elif sizes.shard == 1 or inside == sizes.averaging_ranks or facts.world_size % local:
        return config  # nothing to choose; or machines of unequal sizes, which are refused later
    else:
        note = f"shards within each machine ({inside} ranks) and replicates across {machines}"
        note += "; trainer.mesh.shard=-1 shards over all"
    trainer = config.trainer.model_copy(update={"mesh": mesh.model_copy(update={"shard": inside})})
    origins = config.origins | {"trainer.mesh.shard": f"auto: from {local} processes on a machine"}
    return _with_note(replace(config, trainer=trainer, origins=origins), note)


def recomputing(config: Config, mode: str, reason: str) -> Config:
    """Replace "auto" in `trainer.activation_checkpointing` by a mode; a note gives the reason."""
    update = {"activation_checkpointing": mode}
    origins = config.origins | {RECOMPUTE: f"auto: {reason}"}
    trainer = config.trainer.model_copy(update=update)
    config = replace(config, trainer=trainer, origins=origins)
    return _with_note(config, recompute_note(reason))


def recompute_note(reason: str) -> str:
    """Say what was taken for "auto", and why, to the user."""
    return f'{RECOMPUTE} "auto": {reason}'


def _crossing(tensor: int, local: int, machines: int) -> str | None:
    if tensor == 1 or machines == 1 or local % tensor == 0:
        return None
    return (
        f"tensor parallel groups of {tensor} cross machines of {local} processes: each block waits "
        "for the network four times; tensor_parallel.autotp_size should be a divisor of the "
        "processes on a machine"
    )


def _with_note(config: Config, note: str | None) -> Config:
    if note is None or note in config.notes:
        return config
    return replace(config, notes=(*config.notes, note))


def origin_table(config: Config) -> list[tuple[str, str, str]]:
    """Return (key, value, origin) of every value that was decided rather than written."""
    values = dict(leaves(config.settings)) | dict(leaves({"trainer": config.trainer.model_dump()}))
    low = LOW_PRECISION if values.get("bf16.enabled") is True else ()
    differing = {path: f"default: {DIFFERS[path]}" for path in low if values.get(path) is None}
    return [
        (path, show(values[path]) if path in values else "-", origin)
        for path, origin in sorted((config.origins | differing).items())
        if origin not in (FILE, OVERRIDE)
        and not (origin == "default" and path.startswith("trainer."))
        and values.get(path) != AUTO
    ]


def _values(config: Config, facts: RuntimeFacts) -> Decisions:
    """Return the decision for each key that is "auto"."""
    params = config.settings["optimizer"]["params"]
    least = int(str(config.settings.get("scheduler", {}).get("type")).startswith("Warmup"))
    lr = AUTOS["optimizer.params.lr"] if params.get("lr") == AUTO else params.get("lr")
    known: Decisions = {
        **{path: (value, "Hugging Face's default") for path, value in deepcopy(AUTOS).items()},
        "scheduler.params.warmup_max_lr": (lr, "from optimizer.params.lr"),
        WARMUP: (least, "Hugging Face's default is no warm-up, and DeepSpeed's least 1 step"),
        "pipeline.stages": (1, "no pipeline"),
        **_precision(config.settings, facts),
        **_from_hidden_size(config.settings, facts.hidden_size),
        **_from_steps(facts.total_steps, config.trainer.warmup_ratio),
    }
    autos = {path for path, value in leaves(config.settings) if value == AUTO}
    return {path: known[path] for path in known if path in autos and known[path][0] != AUTO}


def _precision(settings: Json, facts: RuntimeFacts) -> Decisions:
    fp16 = settings.get("fp16", {}).get("enabled") is True
    able = facts.device == "cuda" and facts.bf16
    reasons = [
        (fp16, "from fp16.enabled true"),
        (able, "from a CUDA device with bfloat16"),
        (facts.device == "cpu", "from the device cpu: float32"),
    ]
    reason = next((text for holds, text in reasons if holds), "from a CUDA device without bfloat16")
    return {"bf16.enabled": (able and not fp16, reason)}


def _from_hidden_size(settings: Json, hidden: int | None) -> Decisions:
    if hidden is None:
        return {}
    origin = f"from hidden size {hidden}"
    result: Decisions = {"zero_optimization.reduce_bucket_size": (hidden * hidden, origin)}
    if settings.get("zero_optimization", {}).get("stage", 0) == 3:
        prefetched = int(0.9 * hidden * hidden)
        result["zero_optimization.stage3_prefetch_bucket_size"] = (prefetched, origin)
        result["zero_optimization.stage3_param_persistence_threshold"] = (10 * hidden, origin)
    return result


def _from_steps(steps: int | None, warmup_ratio: float | None) -> Decisions:
    if steps is None:
        return {} if warmup_ratio is None else {WARMUP: (AUTO, "")}
    result: Decisions = {"scheduler.params.total_num_steps": (steps, f"from {steps} steps")}
    if warmup_ratio is not None:
        reason = f"{warmup_ratio:g} of {steps:,} steps (trainer.warmup_ratio)"
        result[WARMUP] = (_share_of(warmup_ratio, steps), reason)
    return result


def _waiting(settings: Json, config: Config) -> set[str]:
    """Return the keys that stay "auto" until a fact is known."""
    later = {*_from_hidden_size(settings, 1), *_from_steps(1, config.trainer.warmup_ratio)}
    return later & {path for path, _ in leaves(settings)}


def _batch(settings: Json, ranks: int) -> Decisions:
    """Complete train batch = micro-batch x accumulation x data ranks. Raises ConfigError."""
    given = {name: settings.get(name) for name in (BATCH, MICRO, ACCUMULATION)}
    train, micro, accumulation = (None if value == AUTO else value for value in given.values())
    least = MICRO_BATCH if AUTO in given.values() else 1
    reasons = {name: _reason(given, name, ranks) for name in given}
    if accumulation is None:
        # only a batch and a micro-batch together determine the accumulation
        accumulation = train // (micro * ranks) if train and micro else 1
    if micro is None:
        micro = train // (accumulation * ranks) if train else least
    if train is None:
        train = micro * accumulation * ranks
    if train != micro * accumulation * ranks or not train:
        raise ConfigError(_misfit(given, ranks, (train, micro, accumulation)))
    decided = {BATCH: train, MICRO: micro, ACCUMULATION: accumulation}
    return {name: (decided[name], reasons[name]) for name in _missing(given)}


def _missing(given: Json) -> list[str]:
    """Return the batch sizes that the config leaves open."""
    return [name for name, value in given.items() if value in (None, AUTO)]


def _reason(given: Json, name: str, ranks: int) -> str:
    others = [other for other in given if other not in (name, *_missing(given))]
    if name == MICRO and BATCH not in others and AUTO in given.values():
        return "Hugging Face's default"
    if (name == ACCUMULATION and len(others) < 2) or (name == MICRO and BATCH not in others):
        return "1, as no other batch size is given"
    return f"from {', '.join([*others, f'{ranks} data ranks'])}"


def _misfit(given: Json, ranks: int, sizes: tuple[int, int, int]) -> Problem:
    train, micro, accumulation = sizes
    if not _missing(given):
        factors = f"{micro} (micro-batch) x {accumulation} (accumulation) x {ranks} (data ranks)"
        actual = f"saw {train}, but {factors} = {micro * accumulation * ranks}"
        others = {MICRO: accumulation * ranks, ACCUMULATION: micro * ranks}
        free = [BATCH, *(name for name, rest in others.items() if train % rest == 0)]
        hint = f'Set {" or ".join(free)} to "auto".'
        if len(free) == 1:
            hint += f" {ACCUMULATION} can be, with a batch {nearest(train, micro * ranks)}."
        return Problem(BATCH, actual, "the two to be equal", hint)
    words = {MICRO: "micro-batch", ACCUMULATION: "accumulation"}
    known = [name for name in words if name not in _missing(given)]
    parts = [f"{given[name]} ({words[name]})" for name in known]
    divisor = " x ".join([*parts, f"{ranks} (data ranks)"])
    product = ranks * math.prod(given[name] for name in known)
    expected = f"a multiple of {divisor} = {product}, {nearest(train, product)}"
    return Problem(BATCH, f"saw {train}", expected)
