"""The optimizer and the scheduler: their types, and the parameters of each type."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any

from trainer.config.check import check
from trainer.config.grammar import LONGEST_NAME, Key, show
from trainer.config.keys import GONE_OPTIMIZERS, NEEDED, OPTIMIZERS, SCHEDULERS, UNBUILT
from trainer.config.read import Json
from trainer.errors import Problem

DEFAULT_OPTIMIZER: Json = {
    "type": "AdamW",
    "params": {"lr": 5e-5, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0},
}
"""Hugging Face's defaults for a config without an optimizer."""


def choose_optimizer(section: Json) -> tuple[Json, list[Problem], list[str]]:
    """Return the optimizer section with DeepSpeed's spelling of the type and checked parameters,
    problems and notes.
    """
    if "max_grad_norm" in section.get("params", {}):
        params = {
            name: value for name, value in section["params"].items() if name != "max_grad_norm"
        }
        chosen, problems, notes = choose_optimizer(section | {"params": params})
        seen = f"saw {show(section['params']['max_grad_norm'])}"
        mend = 'Use the top-level "gradient_clipping".'
        return (
            chosen,
            [*problems, Problem("optimizer.params.max_grad_norm", seen, "no clipping here", mend)],
            notes,
        )
    chosen, problems, notes = _choose("optimizer", section, OPTIMIZERS)
    params = chosen["params"]
    problems += [Problem(f"optimizer.params.{name}", *found) for name, *found in _misuse(params)]
    if not problems:
        defaults = {
            name: key.default
            for name, key in OPTIMIZERS[chosen["type"]].items()
            if key.default is not None
        }
        if params.get("torch_adam") and (
            chosen["type"] == "AdamW" or params.get("adam_w_mode", True)
        ):
            defaults["weight_decay"] = (
                0.01  # the default of torch.optim.AdamW, which DeepSpeed then builds
            )
        params |= {name: value for name, value in defaults.items() if name not in params}
    return chosen, problems, notes


def _misuse(params: Json) -> Iterator[tuple[str, str, str]]:
    """Yield (parameter, seen, expected) for values of the right type that the optimizers' own
    checks reject.
    """
    betas = params.get("betas", "auto")
    if betas != "auto" and not _are_betas(betas):
        yield "betas", f"saw {show(betas)}", "two numbers from 0 to below 1"
    if params.get("nesterov") and not (params.get("momentum") and not params.get("dampening")):
        yield "nesterov", "saw true", "a momentum above 0 and no dampening with it"
    if params.get("fused") and params.get("foreach"):
        yield "fused", "saw true, and foreach true", "at most one of the two"


def choose_scheduler(section: Json) -> tuple[Json, list[Problem], list[str]]:
    """Return the scheduler section with DeepSpeed's spelling of the type and checked parameters,
    problems and notes.
    """
    chosen, problems, notes = _choose("scheduler", section, SCHEDULERS)
    params = chosen["params"]
    if section.get("type") is not None and chosen["type"] in SCHEDULERS:
        for name in NEEDED.get(chosen["type"], ()):
            if name not in params:
                mend = f'Set "{name}"' + (' to "auto".' if name == "total_num_steps" else ".")
                problems.append(
                    Problem(
                        "scheduler.params", f"saw no {name}", f"{name} for {chosen['type']}", mend
                    )
                )
    if params.get("warmup_num_steps") == 0 and chosen["type"].startswith("Warmup"):
        params["warmup_num_steps"] = 1
        notes.append(
            "scheduler.params.warmup_num_steps: 0 is read as 1, the least that DeepSpeed takes"
        )
    return chosen, problems, notes


def _choose(
    place: str, section: Json, types: Mapping[str, Mapping[str, Key]]
) -> tuple[Json, list[Problem], list[str]]:
    kind, params = section.get("type"), section.get("params", {})
    # DeepSpeed ignores the case of optimizer names, but not of scheduler names
    name = {known.lower(): known for known in types}.get(str(kind).lower())
    if name is None:
        return section | {"params": params}, [_unknown_type(place, kind, list(types))], []
    table = {f"{place}.params.{key}": value for key, value in types[name].items()}
    checked = check(params, table, path=f"{place}.params.")
    return section | {"type": name, "params": checked.values}, checked.problems, checked.notes


def _unknown_type(place: str, kind: Any, types: list[str]) -> Problem:
    seen = "saw no type" if kind is None else f"saw {show(kind)}"
    types = [known for known in types if known not in UNBUILT]
    near, name = {known.lower(): known for known in types}, str(kind)[:LONGEST_NAME].lower()
    match = get_close_matches(name, near, n=1)
    bare = re.sub("deepspeed|fused|cpu|torch|hf|xla|[^a-z]", "", name)
    if name in GONE_OPTIMIZERS:
        mend = "DeepSpeed removed it: use Adam."
    elif bare in map(str.lower, UNBUILT):
        mend = "No engine here runs it."
    elif bare in near:
        mend = (
            f'Write "{near[bare]}": which kernel runs it follows from the device and the offload.'
        )
    else:
        mend = f'Did you mean "{near[match[0]]}"?' if match else ""
    return Problem(f"{place}.type", seen, f"one of {', '.join(types)}", mend)


def _are_betas(betas: Any) -> bool:
    found = betas if isinstance(betas, list) else []
    return len(found) == 2 and all(
        isinstance(beta, int | float) and 0 <= beta < 1 for beta in found
    )
