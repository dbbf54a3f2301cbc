"""Keys that several systems share: optimizer, schedule, intervals, precision, sharding, adapters, trackers."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path, PurePath
from typing import Any

from trainer.config.grammar import AUTO, show
from trainer.config.habits.draft import Asked, Draft, Group, Roles, asks, data, fill, names, number, tables
from trainer.config.habits.reading import beside, checked
from trainer.config.keys import OPTIMIZERS
from trainer.config.read import Json, read
from trainer.config.validate import evaluated_at
from trainer.errors import ConfigError, Problem, first_line

_OPTIMIZERS, _SCHEDULERS, _ATTENTION, _STAGES = data("arguments")["values"].values()
_TRACKERS = ("tensorboard", "mlflow", "wandb")
_FSDP = tables("arguments")[1]


def section_of(key: str, value: Any, folder: Path) -> Json:
    """Return a section that is given inline, as JSON text, or in the file that it names. Raises ConfigError."""
    if not value or isinstance(value, dict):
        return dict(value or {})
    if str(value).lstrip().startswith("{"):
        try:
            found: Json = checked(json.loads(value), key)
            return found
        except (ValueError, RecursionError) as error:
            raise ConfigError(Problem(key, first_line(error), "JSON")) from None
    file = beside(folder, str(value))
    if file is None:
        expected = f"a JSON file, seen from {folder} or from here"
        raise ConfigError(Problem(key, f"no file {show(value)}", expected, "Put it there."))
    return read(file)


def length(draft: Draft, roles: Roles) -> None:
    steps, epochs = roles.get("steps"), roles.get("epochs")
    if steps and steps.value > 0:
        draft.put(steps, "trainer.steps", int(steps.value) if steps.value == int(steps.value) else steps.value)
        if epochs:
            draft.skip(epochs)
        return
    if epochs:
        draft.put(epochs, "trainer.epochs", epochs.value)
    if steps:
        draft.keep(steps, "the epochs say it")


def optimizer(draft: Draft, roles: Roles) -> None:
    asked = roles["name"]
    kind, *why = _OPTIMIZERS.get(str(asked.value), ("AdamW",))
    draft.put(asked, "optimizer.type", kind, *why)
    if str(asked.value) not in _OPTIMIZERS:
        draft.lose(asked, "not offered")
    for role, name in (("lr", "lr"), ("decay", "weight_decay"), ("eps", "eps")):
        if role in roles and name in OPTIMIZERS[kind]:
            draft.put(roles[role], f"optimizer.params.{name}", roles[role].value)
    betas = [
        beta.value if (beta := roles.get(role)) else default for role, default in (("beta1", 0.9), ("beta2", 0.999))
    ]
    for role in ("beta1", "beta2"):
        if role in roles and "betas" in OPTIMIZERS[kind]:
            draft.put(roles[role], "optimizer.params.betas", betas)
    for role in {"beta1", "beta2", "eps"} & roles.keys() if kind == "SGD" else ():
        draft.skip(roles[role])
    if "optimizer" in draft.base and "decay" in roles and roles["decay"].value:
        why = "with an optimizer in the DeepSpeed file, the Trainer decays norms and biases as well"
        draft.put(roles["decay"], "trainer.weight_decay_excludes", "nothing", why)


def clipping(draft: Draft, roles: Roles) -> None:
    if (asked := roles.get("norm")) is None:
        return
    if not draft.base or "gradient_clipping" in draft.base:
        draft.put(asked, "gradient_clipping", asked.value)
    elif draft.explicit(asked):
        why = "the DeepSpeed file has no such key, so that DeepSpeed clipped at its own default"
        draft.put(asked, "gradient_clipping", asked.value, why)


def scheduler(draft: Draft, roles: Roles) -> None:
    asked, warmup = roles["type"], _warmup(draft, roles)
    if "scheduler" in draft.base:
        if draft.explicit(asked):
            draft.change(asked, "the DeepSpeed file has a scheduler of its own")
        if warmup and (held := draft.base["scheduler"].get("params", {}).get("warmup_num_steps")) is not None:
            _put_warmup(draft, *warmup, decides=held == AUTO)
        return
    if asked.value == "constant":
        draft.change(asked, "no scheduler: the rate is constant")
        for role in {"steps", "share"} & roles.keys():
            draft.skip(roles[role])
        return
    [kind] = _SCHEDULERS.get(str(asked.value), ["WarmupLR"])
    draft.put(asked, "scheduler.type", kind, "DeepSpeed's starts at 0, and is an update behind theirs")
    if str(asked.value) not in _SCHEDULERS:
        draft.lose(asked, "not offered")
    draft.put(asked, "scheduler.params.warmup_type", "linear")
    _put_warmup(draft, *(warmup or (asked, 0)))
    if kind != "WarmupLR":
        draft.put(asked, "scheduler.params.total_num_steps", AUTO)
    if kind == "WarmupDecayLR":
        draft.put(asked, "scheduler.params.warmup_max_lr", AUTO)
    if kind == "WarmupCosineLR":
        least = _least(draft, roles)
        draft.put(roles.get("least", roles.get("options", asked)), "scheduler.params.cos_min_ratio", least)


def _put_warmup(draft: Draft, asked: Asked, steps: int | str, decides: bool = True) -> None:
    """Set the warm-up steps; "auto" with the requested share of all steps, until the data gives their number."""
    draft.put(asked, "scheduler.params.warmup_num_steps", steps)
    if steps == AUTO and decides:
        draft.put(asked, "trainer.warmup_ratio", asked.value)


def _least(draft: Draft, roles: Roles) -> float:
    """Return the share of the learning rate at which a cosine schedule ends."""
    options = section_of(*roles["options"], draft.folder) if "options" in roles else {}
    more = {key: value for key, value in options.items() if key not in ("min_lr", "min_lr_rate")}
    if more and more != {"num_cycles": 0.5}:
        draft.lose(roles["options"], f"only min_lr and min_lr_rate are carried over, not {show(more)}")
    rate = number(draft.made.get("optimizer", {}).get("params", {}).get("lr"))
    least = number(options.get("min_lr", options.get("min_lr_rate", roles["least"].value if "least" in roles else 0)))
    if type(least) not in (int, float) or ("min_lr" in options and not (isinstance(rate, float | int) and rate)):
        raise ConfigError(Problem("min_lr", f"saw {show(least)}, and a rate of {show(rate)}", "two numbers"))
    return float(least) / float(rate) if "min_lr" in options else float(least)


def _warmup(draft: Draft, roles: Roles) -> tuple[Asked, int | str] | None:
    """Return the key that asks for a warm-up, and its steps; "auto" if that needs the number of all steps."""
    steps, share = roles.get("steps"), roles.get("share")
    if steps is None or (not steps.value and share is not None and draft.explicit(share)):
        steps, share = share, None
    if share is not None:
        draft.skip(share)
    if steps is None:
        return None
    if steps.value < 0:
        raise ConfigError(Problem(steps.key, f"saw {show(steps.value)}", "a number of at least 0"))
    if steps.value >= 1 or not steps.value:
        return steps, int(steps.value)
    return steps, _steps_of(draft, steps) or AUTO


def _steps_of(draft: Draft, asked: Asked) -> int | None:
    """Return a share of all steps as a number of steps; None if their number is unknown."""
    total = draft.made.get("trainer", {}).get("steps")
    return None if total is None else max(1, math.ceil(asked.value * total))


def evaluation(draft: Draft, roles: Roles) -> None:
    _interval(draft, roles, "trainer.evaluation.every", draft.lose)
    if (asked := roles.get("patience")) and asked.value and draft.has("trainer.evaluation.every"):
        draft.put(asked, "trainer.evaluation.patience", int(asked.value))


def saving(draft: Draft, roles: Roles) -> None:
    limit = roles.get("limit")
    why = "" if limit else "of the checkpoints the last 2 are kept"
    _interval(draft, roles, "trainer.checkpoint.every", lambda asked, _: draft.skip(asked), why)
    if limit and limit.value:
        draft.put(limit, "trainer.checkpoint.keep_last", max(1, int(limit.value)))
    if (best := roles.get("best")) is None or not best.value:
        return
    sections = draft.made.get("trainer", {})
    saves, evaluates = (sections.get(name, {}).get("every") for name in ("checkpoint", "evaluation"))
    if saves is None or evaluated_at(saves, evaluates):
        why = "the checkpoint of the lowest held-out loss is kept; final/ is the last one's"
        draft.put(best, "trainer.checkpoint.keep_best", True, why)
    else:
        draft.lose(best, "trainer.checkpoint.keep_best needs an evaluation at each checkpoint")


Drop = Callable[[Asked, str], None]


def _interval(draft: Draft, roles: Roles, path: str, drop: Drop, why: str = "") -> None:
    """Set an interval in steps, or as a share of all; `drop` reports one that can't be expressed so."""
    strategy, steps, often = roles.get("strategy"), roles.get("steps"), roles.get("per_epoch")
    kind = str(strategy.value) if strategy else "steps"
    if strategy and kind in ("no", "False"):
        draft.keep(strategy, "none on the way, one at the end")
        for asked in (steps, often):
            if asked:
                draft.skip(asked)
    elif often and often.value:
        _each_epoch(draft, often, path, drop, why)
        if steps:
            draft.skip(steps)
    elif kind == "steps" and steps and steps.value:
        every = int(steps.value) if steps.value >= 1 else _steps_of(draft, steps) or float(steps.value)
        if strategy:
            draft.keep(strategy, "intervals are of steps")
        draft.put(steps, path, every, why)
    elif kind == "epoch" and strategy:
        _each_epoch(draft, strategy._replace(value=1), path, drop, why)
        if steps:
            draft.skip(steps)
    elif strategy and kind != "steps":
        drop(strategy, "a number of steps, or a share of them, is what is offered")
    elif steps and "trainer.checkpoint" in path:
        draft.skip(steps)


def _each_epoch(draft: Draft, asked: Asked, path: str, drop: Drop, why: str) -> None:
    """Set an interval of so many per epoch as a share of all steps, unless steps are given: epochs are unknown then."""
    epochs, shown = draft.made.get("trainer", {}).get("epochs"), asked._replace(value=draft.given.get(asked.key))
    shown = asked if shown.value is None else shown
    if not epochs or isinstance(epochs, str):
        drop(shown, f"of epochs beside a number of steps: --dry-run says how many there are; set {path}")
    elif asked.value * epochs > 1:
        draft.put(shown, path, 1 / (asked.value * epochs), why)
    else:
        draft.keep(shown, "once, at the end")


def precision(draft: Draft, roles: Roles) -> None:
    bf16, fp16, pure, weights = (roles.get(role) for role in ("bf16", "fp16", "pure", "weights"))
    masters = "it computes in it, and keeps float32 weights for the update"
    if weights and str(weights.value) in (AUTO, "float32", "torch.float32"):
        draft.skip(weights)
    elif weights and str(weights.value) in ("bfloat16", "torch.bfloat16"):
        pure = weights
    if fp16 and fp16.value and not (bf16 and bf16.value and draft.explicit(bf16)):
        draft.put(fp16, "fp16.enabled", True)
    else:
        for asked, why in ((bf16, masters if bf16 and bf16.value == "full" else ""), (pure, masters)):
            if asked and asked.value:
                draft.put(asked, "bf16.enabled", AUTO if asked.value == AUTO else True, why)
    for asked, name in ((bf16, "bf16"), (fp16, "fp16")):
        if asked and not asked.value and draft.base.get(name, {}).get("enabled") == AUTO:
            draft.put(asked, f"{name}.enabled", False)


def sharding(draft: Draft, roles: Roles) -> None:
    if (asked := roles.get("deepspeed")) and asked.value:
        stage = draft.base.get("zero_optimization", {}).get("stage", 0)
        draft.change(
            asked, f'it is the base of this config, ZeRO stage {stage}; "auto" stays where theirs says nothing'
        )
        return
    fsdp, options = roles.get("fsdp"), roles.get("options")
    given = section_of(*options, draft.folder) if options else {}
    asked = fsdp if fsdp and fsdp.value else options
    if asked is None or not (asked.value or given):
        return
    words = names(asked.value) if isinstance(asked.value, list | str) else []
    stage = next((_STAGES[word] for word in words if word in _STAGES), 3)
    draft.put(asked, "zero_optimization.stage", stage)
    draft.put(asked, "trainer.engine", "accelerate", "FSDP2 by Accelerate; machines are replicas of one another")
    if "offload" in words:
        _offload(draft, asked)
    if options and given:
        draft.keep(options, "key by key")
    inner = {key.removeprefix("fsdp_"): value for key, value in given.items()}
    part = Draft(inner, draft.folder, prefix="fsdp_config.", made=draft.made)
    fill(part, _FSDP, {}, {"shard": _fsdp})
    draft.take(part)


def _fsdp(draft: Draft, roles: Roles) -> None:
    if (asked := roles.get("strategy")) and str(asked.value).lower() in _STAGES:
        draft.put(asked, "zero_optimization.stage", _STAGES[str(asked.value).lower()])
    if (asked := roles.get("reshard")) is not None and isinstance(asked.value, bool):
        draft.put(asked, "zero_optimization.stage", 3 if asked.value else 2)
    if (asked := roles.get("offload")) and asked.value:
        _offload(draft, asked)
    if (asked := roles.get("recompute")) and asked.value:
        draft.put(asked, "trainer.activation_checkpointing", "full")


def _offload(draft: Draft, asked: Asked) -> None:
    for name in ("offload_param", "offload_optimizer"):
        draft.put(asked, f"zero_optimization.{name}.device", "cpu")


def recomputation(draft: Draft, roles: Roles) -> None:
    off, on = roles.get("off"), roles.get("on")
    if off and off.value:
        draft.keep(off, "nothing is computed again")
        if on:
            draft.skip(on)
    elif on and on.value:
        why = f"{show(on.value)} is not offered: blocks are computed again" if isinstance(on.value, str) else ""
        draft.put(on, "trainer.activation_checkpointing", "full", why)


def attention(draft: Draft, roles: Roles) -> None:
    for role, asked in roles.items():
        found = _ATTENTION.get(str(asked.value) if role == "name" else role)
        if asked.value == AUTO:
            draft.skip(asked)
        elif found and asked.value:
            draft.put(asked, "trainer.model.attention", *found)


def adapter(draft: Draft, roles: Roles) -> None:
    """Convert LoRA, if requested. Raises ConfigError for another method: without it, all would be trained."""
    if (kind := roles.get("kind")) is None:
        return
    rest = {role: asked for role, asked in roles.items() if role != "kind"}
    if not asks(kind.value) or kind.value in (0, "full"):
        draft.keep(kind, "all parameters are trained")
        for asked in rest.values():
            draft.skip(asked)
        return
    if kind.value not in (1, "lora", "qlora"):
        raise ConfigError(Problem(kind.key, f"saw {show(kind.value)}", "lora, or all parameters: no other is offered"))
    draft.put(kind, "trainer.adapter.type", "lora")
    if kind.value == "qlora":
        draft.lose(kind, "the base is kept in 16 or 32 bits, not in 4")
    if (dropout := rest.get("dropout")) and dropout.value:
        draft.put(dropout, "trainer.adapter.dropout", dropout.value)
    elif dropout:
        draft.keep(dropout, "none")
    if (folder := rest.get("path")) and folder.value:
        draft.put(folder, "trainer.adapter.path", folder.value)
        for role in rest.keys() - {"path", "dropout"}:
            draft.keep(rest[role], "the adapter's folder says it")
        return
    for role in ("r", "alpha", "bias", "rslora", "dora"):
        if role in rest and rest[role].value not in (None, False, ""):
            draft.put(rest[role], f"trainer.adapter.{role}", rest[role].value)
    _modules(draft, rest)
    known = {_AS.get(role, role) for role, asked in rest.items() if asks(asked.value)}
    if silent := [role for role in ("r", "alpha", "dropout", "targets") if role not in known]:
        draft.lose(kind, f"nothing says LoRA's {', '.join(silent)}")


_AS = {"linear": "targets", "names": "targets"}
_NAME = re.compile(r"[\w.-]+")


def _modules(draft: Draft, roles: Roles) -> None:
    """Set the adapted modules: names, or a text that PEFT takes as a regular expression."""
    if (save := roles.get("save")) and asks(save.value):
        draft.put(save, "trainer.adapter.modules_to_save", names(save.value))
    asked, linear = roles.get("targets") or roles.get("names"), roles.get("linear")
    found = names(asked.value) if asked and asks(asked.value) else []
    if linear and linear.value:
        draft.put(linear, "trainer.adapter.targets", "all-linear")
        if asked and all(name.endswith("_proj") for name in found):
            draft.skip(asked)  # Axolotl joins both, and all-linear contains these
    elif asked and found == (["all-linear"] if "targets" in roles else ["all"]):
        draft.put(asked, "trainer.adapter.targets", "all-linear")
    elif asked and found and all(map(_NAME.fullmatch, found)):
        draft.put(asked, "trainer.adapter.targets", found)
    elif asked and "targets" in roles and isinstance(asked.value, str):
        draft.put(asked, "trainer.adapter.targets", asked.value)
    elif asked and found:
        draft.lose(asked, "in a list PEFT takes names as they are, and no layer is called so")


def trackers(draft: Draft, roles: Roles) -> None:
    wanted: list[str] = []
    for role, asked in roles.items():
        if not asks(asked.value) or asked.value == ["none"] or (role in _TRACKERS and asked.value == "disabled"):
            continue
        for name in [role] if role in _TRACKERS else names(asked.value):
            if name not in _TRACKERS:
                draft.skip(asked)
                continue
            wanted += [name] if name not in wanted else []
            why = 'the project is called "meshloom" there, the run as trainer.run.name' if role == "wandb" else ""
            draft.put(asked, "trainer.log.trackers", wanted, why)


def run_folder(draft: Draft, roles: Roles) -> None:
    if asked := roles.get("folder"):
        path = PurePath(str(asked.value))
        draft.put(asked, "trainer.run.folder", str(path.parent))
        if path.name:
            draft.put(asked, "trainer.run.name", path.name)


def logging(draft: Draft, roles: Roles) -> None:
    steps, strategy = roles.get("steps"), roles.get("strategy")
    if strategy:
        draft.skip(strategy)
    if steps and steps.value >= 1:
        draft.put(steps, "trainer.log.every", int(steps.value))
    elif steps:
        draft.skip(steps)


GROUPS: dict[str, Group] = {
    "length": length,
    "sharding": sharding,
    "precision": precision,
    "optimizer": optimizer,
    "clipping": clipping,
    "scheduler": scheduler,
    "evaluation": evaluation,
    "saving": saving,
    "recomputation": recomputation,
    "attention": attention,
    "adapter": adapter,
    "trackers": trackers,
    "run": run_folder,
    "logging": logging,
}
"""The groups in the order in which they depend on one another."""
