"""Replaces every "auto" as Hugging Face users know it (transformers/integrations/deepspeed.py)."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, Literal

from trainer.config.compiled import FILE, OVERRIDE, Config
from trainer.config.grammar import AUTO, show
from trainer.config.mesh import mesh_sizes
from trainer.config.read import Json, leaves
from trainer.errors import ConfigError, Problem

BATCH, MICRO, ACCUMULATION = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
WARMUP_SHARE = 0.03
"""Share of all steps that `warmup_num_steps: "auto"` spends on warm-up."""


@dataclass(frozen=True)
class Facts:
    """What the config does not say and its "auto" values depend on; None: not known yet."""

    world_size: int
    hidden_size: int | None
    total_steps: int | None
    bf16: bool
    """The device computes in bfloat16."""
    device: Literal["cpu", "cuda"]
    local_world_size: int | None = None
    """Processes on one machine."""


Decisions = dict[str, tuple[Any, str]]


def resolve(config: Config, facts: Facts) -> Config:
    """`config` with its "auto" values replaced and its batch sizes complete.

    May be called again when more facts are known: values that need a fact that is None stay "auto" until then.
    Raises ConfigError where the mesh or the batch sizes do not fit the world size.
    """
    config = _within_machines(config, facts)
    decisions = _values(config, facts) | _batch(config.settings, mesh_sizes(config, facts.world_size).data_ranks)
    settings, origins = deepcopy(config.settings), dict(config.origins)
    for path, (value, reason) in decisions.items():
        _put(settings, path, value)
        origins[path] = f"auto: {reason}"
    waiting = _waiting(settings)
    for path in [name for name, value in leaves(settings) if value == AUTO and name not in waiting]:
        _drop(settings, path)
        origins[path] = "auto: DeepSpeed's default"
    return replace(config, settings=settings, origins=origins)


def _within_machines(config: Config, facts: Facts) -> Config:
    """FSDP over several machines shards within each and replicates across, unless `trainer.mesh` says otherwise."""
    local, mesh = facts.local_world_size or facts.world_size, config.trainer.mesh
    sizes = mesh_sizes(config, facts.world_size)
    own, inside = config.trainer.engine in ("accelerate", "mesh"), local // sizes.tensor
    machines = facts.world_size // local
    if not own or mesh.replicate or mesh.shard or machines == 1 or sizes.shard == 1 or sizes.pipeline > 1:
        return config
    note = (
        f"shards within each machine ({inside} ranks) and replicates across {machines}; "
        "trainer.mesh.shard=-1 shards over all"
    )
    trainer = config.trainer.model_copy(update={"mesh": mesh.model_copy(update={"shard": inside})})
    origins = config.origins | {"trainer.mesh.shard": f"auto: from {local} processes on a machine"}
    return replace(config, trainer=trainer, origins=origins, notes=(*config.notes, note))


def origin_table(config: Config) -> list[tuple[str, str, str]]:
    """(key, value, origin) of every value that was decided rather than written, for printing."""
    values = dict(leaves(config.settings)) | dict(leaves({"trainer": config.trainer.model_dump()}))
    return [
        (path, show(values[path]) if path in values else "-", origin)
        for path, origin in sorted(config.origins.items())
        if origin not in (FILE, OVERRIDE)
        and not (origin == "default" and path.startswith("trainer."))
        and values.get(path) != AUTO
    ]


def _values(config: Config, facts: Facts) -> Decisions:
    """The decision for each key that is "auto"."""
    params = config.settings["optimizer"]["params"]
    lr = 5e-5 if params.get("lr") == AUTO else params.get("lr")
    known: Decisions = {
        "optimizer.params.lr": (lr, "Hugging Face's default"),
        "optimizer.params.betas": ([0.9, 0.999], "Hugging Face's default"),
        "optimizer.params.eps": (1e-8, "Hugging Face's default"),
        "optimizer.params.weight_decay": (0.0, "Hugging Face's default"),
        "gradient_clipping": (1.0, "Hugging Face's default"),
        "scheduler.params.warmup_min_lr": (0.0, "Hugging Face's default"),
        "scheduler.params.warmup_max_lr": (lr, "from optimizer.params.lr"),
        "pipeline.stages": (1, "no pipeline"),
        **_precision(config.settings, facts),
        **_from_hidden_size(facts.hidden_size),
        **_from_steps(facts.total_steps),
    }
    autos = {path for path, value in leaves(config.settings) if value == AUTO}
    return {path: decision for path, decision in known.items() if path in autos}


def _precision(settings: Json, facts: Facts) -> Decisions:
    fp16 = settings.get("fp16", {}).get("enabled") is True
    able = facts.device == "cuda" and facts.bf16
    reasons = [
        (fp16, "from fp16.enabled true"),
        (able, "from a CUDA device with bfloat16"),
        (facts.device == "cpu", "from the device cpu: float32"),
    ]
    reason = next((text for holds, text in reasons if holds), "from a CUDA device without bfloat16")
    return {"fp16.enabled": (False, "Hugging Face's default"), "bf16.enabled": (able and not fp16, reason)}


def _from_hidden_size(hidden: int | None) -> Decisions:
    if hidden is None:
        return {}
    origin = f"from hidden size {hidden}"
    return {
        "zero_optimization.reduce_bucket_size": (hidden * hidden, origin),
        "zero_optimization.stage3_prefetch_bucket_size": (int(0.9 * hidden * hidden), origin),
        "zero_optimization.stage3_param_persistence_threshold": (10 * hidden, origin),
    }


def _from_steps(steps: int | None) -> Decisions:
    if steps is None:
        return {}
    warmup = max(1, round(WARMUP_SHARE * steps))
    return {
        "scheduler.params.total_num_steps": (steps, f"from {steps} steps"),
        "scheduler.params.warmup_num_steps": (warmup, f"from {steps} steps: {WARMUP_SHARE:.0%}, at least 1"),
    }


def _waiting(settings: Json) -> set[str]:
    """The keys that stay "auto" until a fact is known."""
    return {*_from_hidden_size(1), *_from_steps(1)} & {path for path, _ in leaves(settings)}


def _batch(settings: Json, ranks: int) -> Decisions:
    """The missing ones of train batch = micro-batch x accumulation x data ranks. Raises ConfigError."""
    given = {name: settings.get(name) for name in (BATCH, MICRO, ACCUMULATION)}
    train, micro, accumulation = (None if value == AUTO else value for value in given.values())
    reasons = {name: _reason(given, name, ranks) for name in given}
    if accumulation is None:
        # only a batch and a micro-batch together say how often gradients are accumulated
        accumulation = train // (micro * ranks) if train and micro else 1
    if micro is None:
        micro = train // (accumulation * ranks) if train else 1
    if train is None:
        train = micro * accumulation * ranks
    if train != micro * accumulation * ranks or not train:
        raise ConfigError(_misfit(given, ranks, (train, micro, accumulation)))
    decided = {BATCH: train, MICRO: micro, ACCUMULATION: accumulation}
    return {name: (value, reasons[name]) for name, value in decided.items() if given[name] in (None, AUTO)}


def _reason(given: Json, name: str, ranks: int) -> str:
    others = [other for other, value in given.items() if other != name and value not in (None, AUTO)]
    if (name == ACCUMULATION and len(others) < 2) or (name == MICRO and BATCH not in others):
        return "1, for want of other batch sizes"
    return f"from {', '.join([*others, f'{ranks} data ranks'])}"


def _misfit(given: Json, ranks: int, found: tuple[int, int, int]) -> Problem:
    train, micro, accumulation = found
    if all(value not in (None, AUTO) for value in given.values()):
        seen = f"saw {train}, but {micro} (micro-batch) x {accumulation} (accumulation) x {ranks} (data ranks)"
        seen += f" = {micro * accumulation * ranks}"
        return Problem(BATCH, seen, "the two to be equal", 'Set one of the three to "auto".')
    factors = [(MICRO, "micro-batch"), (ACCUMULATION, "accumulation")]
    parts = [f"{given[name]} ({word})" for name, word in factors if given[name] not in (None, AUTO)]
    divisor = " x ".join([*parts, f"{ranks} (data ranks)"])
    product = ranks
    for name, _ in factors:
        product *= given[name] if given[name] not in (None, AUTO) else 1
    return Problem(BATCH, f"saw {train}", f"a multiple of {divisor} = {product}")


def _put(tree: Json, path: str, value: Any) -> None:
    *sections, name = path.split(".")
    for section in sections:
        tree = tree[section]
    tree[name] = value


def _drop(tree: Json, path: str) -> None:
    *sections, name = path.split(".")
    for section in sections:
        tree = tree[section]
    del tree[name]
