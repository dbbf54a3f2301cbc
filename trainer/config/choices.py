"""The optimizer and the scheduler: their types, and the parameters that each type takes."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from trainer.config.check import check
from trainer.config.grammar import Key, show
from trainer.config.keys import GONE_OPTIMIZERS, NEEDED, OPTIMIZERS, SCHEDULERS
from trainer.config.read import Json
from trainer.errors import Problem

DEFAULT_OPTIMIZER: Json = {
    "type": "AdamW",
    "params": {"lr": 5e-5, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0},
}
"""Hugging Face's defaults for a config without an optimizer."""

ADAM_FAMILY_LR = 1e-3
"""DeepSpeed's learning rate where the parameters name none."""


def choose_optimizer(section: Json) -> tuple[Json, list[Problem]]:
    """The optimizer section with DeepSpeed's spelling of the type and checked parameters."""
    if "max_grad_norm" in section.get("params", {}):
        params = {name: value for name, value in section["params"].items() if name != "max_grad_norm"}
        chosen, problems = choose_optimizer(section | {"params": params})
        seen = f"saw {show(section['params']['max_grad_norm'])}"
        mend = 'Use the top-level "gradient_clipping".'
        return chosen, [*problems, Problem("optimizer.params.max_grad_norm", seen, "no clipping here", mend)]
    chosen, problems = _choose("optimizer", section, OPTIMIZERS)
    betas = chosen["params"].get("betas", "auto")
    if betas != "auto" and not _are_betas(betas):
        expected = "two numbers from 0 to below 1"
        problems.append(Problem("optimizer.params.betas", f"saw {show(betas)}", expected))
    if not problems and "lr" not in chosen["params"]:
        if chosen["type"] in ("Adam", "AdamW", "Lamb", "Lion"):
            chosen["params"]["lr"] = ADAM_FAMILY_LR
        else:
            problems.append(Problem("optimizer.params", "saw no lr", "a learning rate"))
    return chosen, problems


def choose_scheduler(section: Json) -> tuple[Json, list[Problem], list[str]]:
    """The scheduler section with DeepSpeed's spelling of the type and checked parameters, and notes."""
    chosen, problems = _choose("scheduler", section, SCHEDULERS)
    params = chosen["params"]
    if section.get("type") is not None and chosen["type"] in SCHEDULERS:
        for name in NEEDED.get(chosen["type"], ()):
            if name not in params:
                mend = f'Set "{name}"' + (' to "auto".' if name == "total_num_steps" else ".")
                problems.append(Problem("scheduler.params", f"saw no {name}", f"{name} for {chosen['type']}", mend))
    notes = []
    if params.get("warmup_num_steps") == 0:
        params["warmup_num_steps"] = 1
        notes.append("scheduler.params.warmup_num_steps: 0 is read as 1, the least that DeepSpeed takes")
    return chosen, problems, notes


def _choose(place: str, section: Json, types: Mapping[str, Mapping[str, Key]]) -> tuple[Json, list[Problem]]:
    kind, params = section.get("type"), section.get("params", {})
    # DeepSpeed compares optimizer names without case, and scheduler names with it
    name = {known.lower(): known for known in types}.get(str(kind).lower())
    if name is None:
        return section | {"params": params}, [_unknown_type(place, kind, list(types))]
    table = {f"{place}.params.{key}": value for key, value in types[name].items()}
    checked = check(params, table, path=f"{place}.params.")
    return section | {"type": name, "params": checked.values}, checked.problems


def _unknown_type(place: str, kind: Any, types: list[str]) -> Problem:
    seen = "saw no type" if kind is None else f"saw {show(kind)}"
    near = {known.lower(): known for known in types}
    match = get_close_matches(str(kind).lower(), near, n=1)
    if kind in GONE_OPTIMIZERS:
        mend = "DeepSpeed removed it: use Adam or Lamb."
    else:
        mend = f'Did you mean "{near[match[0]]}"?' if match else ""
    return Problem(f"{place}.type", seen, f"one of {', '.join(types)}", mend)


def _are_betas(betas: list[Any]) -> bool:
    return len(betas) == 2 and all(isinstance(beta, int | float) and 0 <= beta < 1 for beta in betas)
