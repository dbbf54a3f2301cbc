"""Keys that several systems share: optimizer, schedule, intervals, precision, sharding, adapters,
trackers.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path, PurePath
from typing import Any

from trainer.config.grammar import AUTO, show
from trainer.config.keys import OPTIMIZERS
from trainer.config.read import Json, read
from trainer.config.validate import evaluated_at
from trainer.errors import ConfigError, Problem, first_line
from trainer.tools.importers.draft import (
    Draft,
    Entry,
    Group,
    Roles,
    asks,
    data,
    fill,
    names,
    number,
    tables,
)
from trainer.tools.importers.reading import beside, checked

_OPTIMIZERS, _SCHEDULERS, _ATTENTION, _STAGES = data("arguments")["values"].values()
_TRACKERS = ("tensorboard", "mlflow", "wandb")
_FSDP = tables("arguments")[1]


def section_of(key: str, value: Any, folder: Path) -> Json:
    """Return a section that is given inline, as JSON text, or in the file that it names. Raises
    ConfigError.
    """
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
        draft.put(
            steps,
            "trainer.steps",
            int(steps.value) if steps.value == int(steps.value) else steps.value,
        )
        draft.skip(epochs)
        return
    if epochs:
        draft.put(epochs, "trainer.epochs", epochs.value)
    draft.skip(steps)


def optimizer(draft: Draft, roles: Roles) -> None:
    entry = roles["name"]
    kind, *why = _OPTIMIZERS.get(str(entry.value), ("AdamW", "not offered"))
    draft.put(entry, "optimizer.type", kind)
    if why and "optimizer" not in draft.base:
        draft.lose(entry, *why)
    for role, name in (("lr", "lr"), ("decay", "weight_decay"), ("eps", "eps")):
        if role in roles and name in OPTIMIZERS[kind]:
            draft.put(roles[role], f"optimizer.params.{name}", roles[role].value)
    betas = [
        beta.value if (beta := roles.get(role)) else default
        for role, default in (("beta1", 0.9), ("beta2", 0.999))
    ]
    for role in ("beta1", "beta2"):
        if role in roles and "betas" in OPTIMIZERS[kind]:
            draft.put(roles[role], "optimizer.params.betas", betas)
    if kind == "SGD":
        draft.skip(*(roles.get(role) for role in ("beta1", "beta2", "eps")))
    if "optimizer" in draft.base and "decay" in roles and roles["decay"].value:
        why = "with an optimizer in the DeepSpeed file, the Trainer decays norms and biases as well"
        draft.put(roles["decay"], "trainer.weight_decay_excludes", "nothing", why)


def clipping(draft: Draft, roles: Roles) -> None:
    if (entry := roles.get("norm")) is None:
        return
    if not draft.base or "gradient_clipping" in draft.base:
        draft.put(entry, "gradient_clipping", entry.value)
    elif draft.explicit(entry):
        draft.put(entry, "gradient_clipping", entry.value)
        if entry.value != 1:
            draft.lose(
                entry,
                (
                    "the DeepSpeed file has no gradient_clipping, and DeepSpeed clips at 1 then: "
                    "say "
                    "it there"
                ),
            )


def scheduler(draft: Draft, roles: Roles) -> None:
    entry, warmup = roles["type"], _warmup(draft, roles)
    if "scheduler" in draft.base:
        if draft.explicit(entry):
            draft.keep(entry, "the DeepSpeed file has a scheduler of its own")
        if (
            warmup
            and (held := draft.base["scheduler"].get("params", {}).get("warmup_num_steps"))
            is not None
        ):
            _put_warmup(draft, *warmup, decides=held == AUTO)
        return
    if entry.value == "constant":
        draft.keep(entry, "no scheduler: the rate is constant")
        draft.skip(roles.get("steps"), roles.get("share"))
        return
    kind = _SCHEDULERS.get(str(entry.value), "constant_with_warmup")
    draft.put(entry, "scheduler.type", kind)
    if str(entry.value) not in _SCHEDULERS:
        draft.lose(entry, "not offered")
    _put_warmup(draft, *(warmup or (entry, 0)))
    if kind != "constant_with_warmup":
        draft.put(entry, "scheduler.params.total_num_steps", AUTO)
    if kind == "cosine":
        least = _least(draft, roles)
        draft.put(
            roles.get("least", roles.get("options", entry)), "scheduler.params.cos_min_ratio", least
        )


def _put_warmup(draft: Draft, entry: Entry, steps: int | str, decides: bool = True) -> None:
    """Set the warm-up steps; "auto" with the requested share of all steps, until the data gives
    their number.
    """
    draft.put(entry, "scheduler.params.warmup_num_steps", steps)
    if steps == AUTO and decides:
        draft.put(entry, "trainer.warmup_ratio", entry.value)


def _least(draft: Draft, roles: Roles) -> float:
    """Return the share of the learning rate at which a cosine schedule ends."""
    options = section_of(*roles["options"], draft.folder) if "options" in roles else {}
    more = {key: value for key, value in options.items() if key not in ("min_lr", "min_lr_rate")}
    if more and more != {"num_cycles": 0.5}:
        draft.lose(
            roles["options"], f"only min_lr and min_lr_rate are carried over, not {show(more)}"
        )
    rate = number(draft.made.get("optimizer", {}).get("params", {}).get("lr"))
    least = number(
        options.get(
            "min_lr", options.get("min_lr_rate", roles["least"].value if "least" in roles else 0)
        )
    )
    if type(least) not in (int, float) or (
        "min_lr" in options and not (isinstance(rate, float | int) and rate)
    ):
        raise ConfigError(
            Problem("min_lr", f"saw {show(least)}, and a rate of {show(rate)}", "two numbers")
        )
    return float(least) / float(rate) if "min_lr" in options else float(least)


def _warmup(draft: Draft, roles: Roles) -> tuple[Entry, int | str] | None:
    """Return the key that asks for a warm-up, and its steps; "auto" if that needs the number of all
    steps.
    """
    steps, share = roles.get("steps"), roles.get("share")
    if steps is None or (not steps.value and share is not None and draft.explicit(share)):
        steps, share = share, None
    draft.skip(share)
    if steps is None:
        return None
    if steps.value < 0:
        raise ConfigError(Problem(steps.key, f"saw {show(steps.value)}", "a number of at least 0"))
    if steps.value >= 1 or not steps.value:
        return steps, int(steps.value)
    return steps, _steps_of(draft, steps) or AUTO


def _steps_of(draft: Draft, entry: Entry) -> int | None:
    """Return a share of all steps as a number of steps; None if their number is unknown."""
    total = draft.made.get("trainer", {}).get("steps")
    return None if total is None else max(1, math.ceil(entry.value * total))


def evaluation(draft: Draft, roles: Roles) -> None:
    _interval(draft, roles, "trainer.evaluation.every", draft.lose)
    if (entry := roles.get("patience")) and entry.value and draft.has("trainer.evaluation.every"):
        draft.put(entry, "trainer.evaluation.patience", int(entry.value))
        if not draft.has("trainer.evaluation.samples"):
            draft.put(entry, "trainer.evaluation.samples", 10**9, "all that are held out")


def saving(draft: Draft, roles: Roles) -> None:
    _interval(draft, roles, "trainer.checkpoint.every", lambda entry, _: draft.skip(entry))
    if (limit := roles.get("limit")) and limit.value:
        draft.put(limit, "trainer.checkpoint.keep_last", max(1, int(limit.value)))
    if (best := roles.get("best")) is None or not best.value:
        return
    sections = draft.made.get("trainer", {})
    saves, evaluates = (
        sections.get(name, {}).get("every") for name in ("checkpoint", "evaluation")
    )
    if saves is None or evaluated_at(saves, evaluates):
        draft.put(best, "trainer.checkpoint.keep_best", True)
    draft.lose(
        best,
        (
            "final/ is the last step's; trainer.checkpoint.keep_best keeps the best checkpoint "
            "beside "
            "it"
        ),
    )


def _interval(draft: Draft, roles: Roles, path: str, drop: Callable[[Entry, str], None]) -> None:
    """Set an interval in steps, or as a share of all; `drop` reports one that can't be expressed
    so.
    """
    strategy, steps, often = roles.get("strategy"), roles.get("steps"), roles.get("per_epoch")
    kind = str(strategy.value) if strategy else "steps"
    if strategy and kind in ("no", "False"):
        draft.skip(strategy, steps, often)
    elif often and often.value:
        _each_epoch(draft, often, path, drop)
        draft.skip(steps)
    elif kind == "steps" and steps and steps.value:
        every = (
            int(steps.value) if steps.value >= 1 else _steps_of(draft, steps) or float(steps.value)
        )
        draft.skip(strategy)
        draft.put(steps, path, every)
    elif kind == "epoch" and strategy:
        _each_epoch(draft, strategy._replace(value=1), path, drop)
        draft.skip(steps)
    elif strategy and kind != "steps":
        drop(strategy, "a number of steps, or a share of them, is what is offered")
    elif steps and "trainer.checkpoint" in path:
        draft.skip(steps)


def _each_epoch(draft: Draft, entry: Entry, path: str, drop: Callable[[Entry, str], None]) -> None:
    """Set an interval of so many per epoch as a share of all steps, unless steps are given: epochs
    are unknown then.
    """
    epochs = draft.made.get("trainer", {}).get("epochs")
    shown = entry._replace(value=draft.given.get(entry.key, entry.value))
    if not epochs or isinstance(epochs, str):
        drop(
            shown,
            f"of epochs beside a number of steps: --dry-run says how many there are; set {path}",
        )
    elif entry.value * epochs > 1:
        draft.put(shown, path, 1 / (entry.value * epochs))
    else:
        draft.skip(shown)


def precision(draft: Draft, roles: Roles) -> None:
    bf16, fp16, pure, weights = (roles.get(role) for role in ("bf16", "fp16", "pure", "weights"))
    if weights and str(weights.value) in (AUTO, "float32", "torch.float32"):
        draft.skip(weights)
    elif weights and str(weights.value) in ("bfloat16", "torch.bfloat16"):
        pure = weights
    masters = (
        draft.base or draft.has("trainer.adapter.type") or draft.has("trainer.engine")
    )  # FSDP's are in float32
    for entry in (
        pure if pure and pure.value else None,
        bf16 if bf16 and bf16.value == "full" else None,
    ):
        if entry and not masters:
            draft.lose(
                entry,
                "the weights that are updated are in float32 here, those of theirs in bfloat16",
            )
    if fp16 and fp16.value and not (bf16 and bf16.value and draft.explicit(bf16)):
        draft.put(fp16, "fp16.enabled", True)
    else:
        for entry in (bf16, pure):
            if entry and entry.value:
                draft.put(entry, "bf16.enabled", AUTO if entry.value == AUTO else True)
    for entry, name in ((bf16, "bf16"), (fp16, "fp16")):
        if entry and not entry.value and draft.base.get(name, {}).get("enabled") == AUTO:
            draft.put(entry, f"{name}.enabled", False)


def sharding(draft: Draft, roles: Roles) -> None:
    if (entry := roles.get("deepspeed")) and entry.value:
        stage = draft.base.get("zero_optimization", {}).get("stage", 0)
        draft.keep(
            entry,
            f'the base of this config, ZeRO stage {stage}; "auto" stays where theirs says nothing',
        )
        return
    fsdp, options = roles.get("fsdp"), roles.get("options")
    given = section_of(*options, draft.folder) if options else {}
    entry = fsdp if fsdp and fsdp.value else options
    if entry is None or not (entry.value or given):
        return
    words = names(entry.value) if isinstance(entry.value, list | str) else []
    stage = next((_STAGES[word] for word in words if word in _STAGES), 3)
    draft.put(entry, "zero_optimization.stage", stage)
    draft.put(
        entry,
        "trainer.engine",
        "accelerate",
        "FSDP2 by Accelerate; machines are replicas of one another",
    )
    if "offload" in words:
        _offload(draft, entry)
    if options and given:
        draft.skip(options)
    inner = {key.removeprefix("fsdp_"): value for key, value in given.items()}
    part = Draft(inner, draft.folder, prefix="fsdp_config.", made=draft.made)
    fill(part, _FSDP, {}, {"shard": _fsdp})
    draft.take(part)


def _fsdp(draft: Draft, roles: Roles) -> None:
    if (entry := roles.get("strategy")) and str(entry.value).lower() in _STAGES:
        draft.put(entry, "zero_optimization.stage", _STAGES[str(entry.value).lower()])
    if (entry := roles.get("reshard")) is not None and isinstance(entry.value, bool):
        draft.put(entry, "zero_optimization.stage", 3 if entry.value else 2)
    if (entry := roles.get("offload")) and entry.value:
        _offload(draft, entry)
    if (entry := roles.get("recompute")) and entry.value:
        draft.put(entry, "trainer.activation_checkpointing", "full")


def _offload(draft: Draft, entry: Entry) -> None:
    for name in ("offload_param", "offload_optimizer"):
        draft.put(entry, f"zero_optimization.{name}.device", "cpu")


def recomputation(draft: Draft, roles: Roles) -> None:
    off, on = roles.get("off"), roles.get("on")
    if off and off.value:
        draft.skip(off, on)
    elif on and on.value:
        why = (
            f"{show(on.value)} is not offered: blocks are computed again"
            if isinstance(on.value, str)
            else ""
        )
        draft.put(on, "trainer.activation_checkpointing", "full", why)


def attention(draft: Draft, roles: Roles) -> None:
    for role, entry in roles.items():
        found = _ATTENTION.get(str(entry.value) if role == "name" else role)
        if entry.value == AUTO:
            draft.skip(entry)
        elif found and entry.value:
            draft.put(entry, "trainer.model.attention", *found)


def adapter(draft: Draft, roles: Roles) -> None:
    """Convert LoRA, if requested. Raises ConfigError for another method: without it, all would be
    trained.
    """
    if (kind := roles.get("kind")) is None:
        return
    rest = {role: entry for role, entry in roles.items() if role != "kind"}
    if not asks(kind.value) or kind.value in (0, "full"):
        draft.skip(*roles.values())
        return
    if kind.value not in (1, "lora", "qlora"):
        raise ConfigError(
            Problem(
                kind.key, f"saw {show(kind.value)}", "lora, or all parameters: no other is offered"
            )
        )
    draft.put(kind, "trainer.adapter.type", "lora")
    if kind.value == "qlora":
        draft.lose(kind, "the base is in 16 bits, not in 4: say lora, and load_in_4bit: false")
    if (dropout := rest.get("dropout")) and dropout.value:
        draft.put(dropout, "trainer.adapter.dropout", dropout.value)
    elif dropout:
        draft.skip(dropout)
    if (folder := rest.get("path")) and folder.value:
        draft.put(folder, "trainer.adapter.path", folder.value)
        draft.skip(*(entry for role, entry in rest.items() if role not in ("path", "dropout")))
        return
    for role in ("r", "alpha", "bias", "rslora", "dora"):
        if role in rest and rest[role].value not in (None, False, ""):
            draft.put(rest[role], f"trainer.adapter.{role}", rest[role].value)
    _modules(draft, rest)
    known = {_AS.get(role, role) for role, entry in rest.items() if asks(entry.value)}
    if silent := [role for role in ("r", "alpha", "dropout", "targets") if role not in known]:
        draft.lose(kind, f"nothing says LoRA's {', '.join(silent)}")


_AS = {"linear": "targets", "names": "targets"}
_NAME = re.compile(r"[\w.-]+")


def _modules(draft: Draft, roles: Roles) -> None:
    """Set the adapted modules: names, or a text that PEFT takes as a regular expression."""
    if (save := roles.get("save")) and asks(save.value):
        draft.put(save, "trainer.adapter.modules_to_save", names(save.value))
    entry, linear = roles.get("targets") or roles.get("names"), roles.get("linear")
    found = names(entry.value) if entry and asks(entry.value) else []
    if linear and linear.value:
        draft.put(linear, "trainer.adapter.targets", "all-linear")
        if entry and all(name.endswith("_proj") for name in found):
            draft.skip(entry)  # Axolotl joins both, and all-linear contains these
    elif entry and found == (["all-linear"] if "targets" in roles else ["all"]):
        draft.put(entry, "trainer.adapter.targets", "all-linear")
    elif entry and found and all(map(_NAME.fullmatch, found)):
        draft.put(entry, "trainer.adapter.targets", found)
    elif entry and "targets" in roles and isinstance(entry.value, str):
        draft.put(entry, "trainer.adapter.targets", entry.value)
    elif entry and found:
        draft.lose(entry, "in a list PEFT takes names as they are, and no layer is called so")


def trackers(draft: Draft, roles: Roles) -> None:
    wanted: list[str] = []
    for role, entry in roles.items():
        if (
            not asks(entry.value)
            or entry.value == ["none"]
            or (role in _TRACKERS and entry.value == "disabled")
        ):
            continue
        for name in [role] if role in _TRACKERS else names(entry.value):
            if name not in _TRACKERS:
                draft.skip(entry)
                continue
            wanted += [name] if name not in wanted else []
            draft.put(entry, "trainer.log.trackers", wanted)


def run_folder(draft: Draft, roles: Roles) -> None:
    if entry := roles.get("folder"):
        path = PurePath(str(entry.value))
        draft.put(entry, "trainer.run.folder", str(path.parent))
        if path.name:
            draft.put(entry, "trainer.run.name", path.name)


GROUPS: dict[str, Group] = {
    "length": length,
    "sharding": sharding,
    "adapter": adapter,
    "precision": precision,
    "optimizer": optimizer,
    "clipping": clipping,
    "scheduler": scheduler,
    "evaluation": evaluation,
    "saving": saving,
    "recomputation": recomputation,
    "attention": attention,
    "trackers": trackers,
    "run": run_folder,
}
"""The groups in the order in which they depend on one another."""
