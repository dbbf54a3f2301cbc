"""What has to hold between keys, after each of them is right by itself."""

from __future__ import annotations

from trainer.config.grammar import show
from trainer.config.read import Json
from trainer.errors import Problem


def conflicts(settings: Json) -> list[Problem]:
    """The problems of keys that do not go together."""
    zero = settings.get("zero_optimization", {})
    stage = zero.get("stage", 0)
    return [*_precision(settings, stage), *_autocast(settings), *_offload(zero, stage), *_norm(settings, zero, stage)]


def notes_of(settings: Json) -> list[str]:
    """One line about keys that are right and change nothing at this ZeRO stage."""
    zero = settings.get("zero_optimization", {})
    idle = sorted(name for name in zero if name.startswith("stage3_"))
    if not idle or zero.get("stage", 0) == 3:
        return []
    names = ", ".join(f"zero_optimization.{name}" for name in idle)
    return [f"{names} {'has' if len(idle) == 1 else 'have'} no effect here: the ZeRO stage is {zero.get('stage', 0)}"]


def _precision(settings: Json, stage: int) -> list[Problem]:
    fp16, bf16 = settings.get("fp16", {}), settings.get("bf16", {})
    found = []
    if fp16.get("enabled") is True and bf16.get("enabled") is True:
        found.append(Problem("fp16.enabled", "saw true, and bf16.enabled true", "at most one of the two"))
    if fp16.get("enabled") is True and fp16.get("loss_scale", 0) in (0, "auto"):
        for name in ("loss_scale_window", "min_loss_scale"):
            if fp16.get(name) == 0:
                found.append(Problem(f"fp16.{name}", "saw 0", "at least 1 where the loss scale is dynamic"))
    for place, section in (("fp16", fp16), ("bf16", bf16)):
        for name in (f"{place}_master_weights_and_grads", "bf16_optimizer_states"):
            if section.get(name) is True and stage == 0:
                found.append(Problem(f"{place}.{name}", "saw true with ZeRO stage 0", "ZeRO stage 1, 2 or 3"))
    if bf16.get("bf16_optimizer_states") is True and bf16.get("bf16_master_weights_and_grads") is not True:
        found.append(Problem("bf16.bf16_optimizer_states", "saw true", "bf16_master_weights_and_grads true with it"))
    return found


def _autocast(settings: Json) -> list[Problem]:
    if settings.get("torch_autocast", {}).get("enabled") is not True:
        return []
    return [Problem("torch_autocast.enabled", "saw true", "false, or no such section", "Set bf16.enabled instead.")]


def _offload(zero: Json, stage: int) -> list[Problem]:
    needs = {"offload_param": ((3,), "stage 3"), "offload_optimizer": ((1, 2, 3), "stage 1, 2 or 3")}
    found = []
    for name, (stages, text) in needs.items():
        section = zero.get(name) or {}
        device, place = section.get("device", "none"), f"zero_optimization.{name}"
        if device in ("none", "auto"):
            continue
        if stage not in stages:
            seen = f'saw device "{device}" with ZeRO stage {stage}'
            found.append(Problem(place, seen, text, 'Set zero_optimization.stage, or the device "none".'))
        if device == "nvme" and section.get("nvme_path") in (None, "auto"):
            found.append(Problem(f"{place}.nvme_path", "saw none", "a folder on the NVMe device"))
        if section.get("ratio", 1.0) != "auto" and section.get("ratio", 1.0) < 1 and stage != 3:
            seen = f"saw {section['ratio']:g} with ZeRO stage {stage}"
            found.append(Problem(f"{place}.ratio", seen, "1, or stage 3"))
    return found


def _norm(settings: Json, zero: Json, stage: int) -> list[Problem]:
    """The norm is not computed only where nothing reads it."""
    if zero.get("compute_grad_norm", True) is not False:
        return []
    clipping = settings.get("gradient_clipping")
    if stage in (1, 2) and clipping == 0:
        return []
    seen = f"saw false with ZeRO stage {stage} and gradient_clipping {show(clipping)}"
    return [Problem("zero_optimization.compute_grad_norm", seen, "stage 1 or 2, and gradient_clipping 0")]
