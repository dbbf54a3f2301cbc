"""The optimizer and the scheduler: their types, and the parameters of each type."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches

from trainer.config.check import check
from trainer.config.keys import AUTOS, NOT_OFFERED, OPTIMIZERS, SCHEDULERS, UNBUILT
from trainer.config.keys.hints import LONGEST_NAME
from trainer.config.keys.key import AUTO, Table
from trainer.config.rules import EVERYWHERE
from trainer.errors import Problem, show
from trainer.plugins import NAMED
from trainer.storage import Json

DEFAULT_OPTIMIZER: Json = {
    "type": "AdamW",
    "params": {
        name: AUTOS[f"optimizer.params.{name}"] for name in ("lr", "betas", "eps", "weight_decay")
    },
}
"""Hugging Face's defaults for a config without an optimizer."""


@dataclass(frozen=True)
class Chosen:
    """A section with DeepSpeed's spelling of the type and checked parameters."""

    section: Json
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def choose_optimizer(section: Json) -> Chosen:
    """Check an optimizer's section, and fill in the defaults of its parameters."""
    params = section.get("params", {})
    if str(section.get("type")) in NAMED["optimizer"]:
        defaults = {name: DEFAULT_OPTIMIZER["params"][name] for name in ("lr", "weight_decay")}
        return _of_plugin(section, {**defaults, **params})
    own = {name: it for name, it in params.items() if name != "max_grad_norm"}
    chosen = _choose("optimizer", section | {"params": own}, OPTIMIZERS)
    checked = chosen.section["params"]
    chosen.problems.extend(_misuse(checked, str(chosen.section.get("type"))))
    if "max_grad_norm" in params:
        actual = f"saw {show(params['max_grad_norm'])}"
        hint = 'Use the top-level "gradient_clipping".'
        place = "optimizer.params.max_grad_norm"
        chosen.problems.append(Problem(place, actual, "no clipping here", hint))
    if not chosen.problems:
        keys = OPTIMIZERS[chosen.section["type"]]
        defaults = {name: key.default for name, key in keys.items() if key.default is not None}
        is_adamw = chosen.section["type"] == "AdamW" or checked.get("adam_w_mode", True)
        if checked.get("torch_adam") and is_adamw:
            defaults["weight_decay"] = 0.01  # of torch.optim.AdamW, which DeepSpeed then builds
        if chosen.section["type"] == "Muon" and "lr" not in checked:
            defaults["adam_lr"] = 3e-4  # DeepSpeed's default, as is 0.02 for the matrices
        checked.update({name: it for name, it in defaults.items() if name not in checked})
    return chosen


def _of_plugin(section: Json, params: Json) -> Chosen:
    keys = {f"optimizer.params.{name}": OPTIMIZERS["SGD"][name] for name in ("lr", "weight_decay")}
    own = {name: value for name, value in params.items() if f"optimizer.params.{name}" in keys}
    checked = check(own, keys, path="optimizer.params.")
    return Chosen(section | {"params": params | checked.values}, checked.problems)


def _misuse(params: Json, kind: str) -> Iterator[Problem]:
    """Yield the problems of values of the right type that the optimizers' own checks reject."""
    place = "optimizer.params"
    betas = params.get("betas", AUTO)
    if betas != AUTO and not _are_betas(betas):
        yield Problem(f"{place}.betas", f"saw {show(betas)}", "two numbers from 0 to below 1")
    if (
        kind != "Muon"
        and params.get("nesterov")
        and not (params.get("momentum") and not params.get("dampening"))
    ):
        expected = "a momentum above 0 and no dampening with it"
        yield Problem(f"{place}.nesterov", "saw true", expected)
    if params.get("fused") and params.get("foreach"):
        yield Problem(f"{place}.fused", "saw true, and foreach true", "at most one of the two")


def _are_betas(betas: object) -> bool:
    return (
        isinstance(betas, list)
        and len(betas) == 2
        and all(isinstance(beta, int | float) and 0 <= beta < 1 for beta in betas)
    )


def choose_scheduler(section: Json) -> Chosen:
    """Check a scheduler's section."""
    chosen = _choose("scheduler", section, SCHEDULERS)
    kind = chosen.section.get("type")
    params = chosen.section["params"]
    for name, key in SCHEDULERS.get(str(kind), {}).items():
        if key.needed and name not in params:
            hint = f'Set "{name}"' + (' to "auto".' if key.auto else ".")
            actual = f"saw no {name}"
            expected = f"{name} for {kind}"
            chosen.problems.append(Problem("scheduler.params", actual, expected, hint))
    if params.get("warmup_num_steps") == 0 and str(kind).startswith("Warmup"):
        params["warmup_num_steps"] = 1
        note = "scheduler.params.warmup_num_steps: 0 is read as 1, the least that DeepSpeed accepts"
        chosen.notes.append(note)
    return chosen


def _choose(place: str, section: Json, types: Mapping[str, Table]) -> Chosen:
    kind = section.get("type")
    params = section.get("params", {})
    # DeepSpeed ignores the case of optimizer names, but not of scheduler names
    name = {known.lower(): known for known in types}.get(str(kind).lower())
    if name is None:
        return Chosen(section | {"params": params}, [_unknown_type(place, kind, list(types))])
    table = {f"{place}.params.{key}": value for key, value in types[name].items()}
    checked = check(params, table, EVERYWHERE, f"{place}.params.")
    settings = section | {"type": name, "params": checked.values}
    return Chosen(settings, checked.problems, checked.notes)


def _unknown_type(place: str, kind: object, types: list[str]) -> Problem:
    actual = "saw no type" if kind is None else f"saw {show(kind)}"
    offered = {known.lower(): known for known in types if known not in UNBUILT}
    name = str(kind)[:LONGEST_NAME].lower()
    if kind is None:
        return Problem(f"{place}.type", actual, f"one of {', '.join(offered.values())}")
    bare = re.sub("deepspeed|fused|cpu|torch|hf|xla|[^a-z]", "", name)
    if bare in NOT_OFFERED:
        hint = NOT_OFFERED[bare]
    elif bare in offered:
        right = offered[bare]
        hint = f'Write "{right}": which kernel runs it follows from the device and the offload.'
    else:
        near = get_close_matches(name, offered, n=1)
        hint = f'Did you mean "{offered[near[0]]}"?' if near else ""
    return Problem(f"{place}.type", actual, f"one of {', '.join(offered.values())}", hint)
