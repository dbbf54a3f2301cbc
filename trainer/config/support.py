"""Notes on the keys that an engine does not honour; refusals where numbers depend on them."""

from __future__ import annotations

from collections.abc import Iterator

from trainer.config.compiled import FILE, OVERRIDE, Config
from trainer.config.keys import KEYS
from trainer.config.keys.key import Key
from trainer.config.read import at, leaves
from trainer.errors import show
from trainer.storage import Json

OTHERS = ("accelerate", "mesh")
"""The engines that do not honour DeepSpeed's own keys."""
_SUMS = "data_types.grad_accum_dtype"


def refusals(config: Config) -> dict[str, str]:
    """Return a sentence for each engine that would compute other numbers than the config asks for.

    The keys are names of engines.
    """
    low = _is_low(config.settings)
    strange = [
        f"It does not honour {path} {show(value)}: {key.instead}."
        for path, value, key in _own(config)
        if key.changes_numbers and not (path == _SUMS and low)
    ]
    strange += filter(None, [_reduction(config.settings), _updated(config.settings)])
    return dict.fromkeys(OTHERS, " ".join(strange)) if strange else {}


def _is_low(settings: Json) -> bool:
    """Return True if the optimizer updates bfloat16 weights, without float32 masters."""
    bf16 = settings.get("bf16", {})
    return all(bf16.get(key) is True for key in ("enabled", "bf16_master_weights_and_grads"))


def _updated(settings: Json) -> str | None:
    """Return a sentence if PyTorch can't keep the optimizer's state as the config asks for it."""
    if not _is_low(settings):
        return None
    if settings["bf16"].get("bf16_optimizer_states") is not True:
        return (
            "PyTorch's optimizers keep no float32 state beside bfloat16 weights; set "
            "bf16.bf16_optimizer_states to true, too, or bf16.bf16_master_weights_and_grads to "
            "false."
        )
    sums = settings.get("data_types", {}).get("grad_accum_dtype")
    if sums and sums != "bf16":
        return f"It adds gradients up in the weights' bfloat16, and {_SUMS} is {sums}."
    return None


def _reduction(settings: Json) -> str | None:
    """Return a sentence if gradients can't be reduced in the precision that the config asks for."""
    kind = settings.get("communication_data_type")
    if kind == "fp16":
        return "Gradients reduced in float16 need a loss scale, which DDP and FSDP2 do not bring."
    sharded = settings.get("zero_optimization", {}).get("stage", 0) > 0
    if kind == "bf16" and sharded and settings.get("pipeline", {}).get("stages", 1) > 1:
        return (
            "With communication_data_type bf16, a pipeline with ZeRO would add gradients up in "
            "bfloat16, too; without ZeRO or pipeline stages they are added up in float32."
        )
    return None


def notes(config: Config, engine: str) -> list[str]:
    """Return a line for each reason for which `engine` ignores keys that the user wrote."""
    reasons: dict[str, list[str]] = {}
    pipeline = config.settings.get("pipeline", {})
    for path, _, key in _own(config):
        if engine in OTHERS:
            reasons.setdefault(key.instead, []).append(path)
        elif path == "wall_clock_breakdown" and pipeline.get("stages", 1) > 1:
            why = "DeepSpeed's pipeline prints none; metrics.jsonl has the time of each step"
            reasons[why] = [path]
    return [
        f"the {engine} engine ignores {', '.join(paths)}: {why}" for why, paths in reasons.items()
    ]


def has_reports(config: Config) -> bool:
    """Return True if DeepSpeed is asked to print where time, memory or communication goes."""
    flags = ("wall_clock_breakdown", "memory_breakdown")
    sections = ("comms_logger.enabled", "flops_profiler.enabled")
    return any(at(config.settings, path) for path in (*flags, *sections))


def _own(config: Config) -> Iterator[tuple[str, object, Key]]:
    """Yield (path, value, key) of the user's keys that only DeepSpeed honours and that ask for
    anything."""
    written = dict(leaves(config.raw))
    for path, value in leaves(config.settings):
        key = KEYS.get(path)
        origin = config.origins.get(path, "")
        from_user = origin in (FILE, OVERRIDE) or origin.removeprefix("auto: from ") in written
        if key and key.instead and from_user and key.asks(value) and _is_on(config.settings, path):
            yield path, value, key


def _is_on(settings: Json, path: str) -> bool:
    """Return True if the sections around a key are on; and for keys of ZeRO-3, the stage is 3."""
    sections = path.split(".")[:-1]
    inner = settings
    on = True
    for depth, section in enumerate(sections, start=1):
        inner = inner[section]
        within = ".".join(sections[:depth])
        on &= f"{within}.enabled" not in KEYS or inner.get("enabled") is True
        on &= f"{within}.device" not in KEYS or inner.get("device", "none") != "none"
    return on and (KEYS[path].needs != "ZeRO stage 3" or inner.get("stage", 0) == 3)
