"""Keys of Hugging Face's Trainer that belong together, in all systems under the Trainer's names."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path, PurePath
from typing import Any

from trainer.config.grammar import AUTO, show
from trainer.config.keys import OPTIMIZERS
from trainer.config.read import Json, at, read
from trainer.config.validate import evaluated_at
from trainer.errors import ConfigError, Problem, refused
from trainer.tools.importers.draft import OTHERWISE, Draft, Entry, Roles, names, number
from trainer.tools.importers.reading import beside, checked
from trainer.tools.importers.tables import Group, fill, inner_table, read_table

_VALUES = read_table("arguments")["values"]
_BFLOAT16 = ("bfloat16", "torch.bfloat16")
_FLOAT32 = (AUTO, "float32", "torch.float32")
Leave = Callable[..., None]
"""Reports a key that is not carried over, with a reason of its own if there is one."""


def section_of(key: str, value: Any, folder: Path) -> Json:
    """Return a section given inline, as JSON text, or as the name of a file. Raises ConfigError."""
    if not value or isinstance(value, dict):
        return dict(value or {})
    if str(value).lstrip().startswith("{"):
        with refused(key, "JSON", ValueError, RecursionError):
            return checked(json.loads(value), key)  # type: ignore[no-any-return]
    if (file := beside(folder, str(value))) is None:
        expected = f"a JSON file, seen from {folder} or from here"
        raise ConfigError(Problem(key, f"no file {show(value)}", expected, "Put it there."))
    return read(file)


def length(draft: Draft, keys: Roles) -> None:
    steps, epochs = keys["max_steps"], keys["num_train_epochs"]
    if steps.key and steps.value > 0:
        whole = steps.value == int(steps.value)
        draft.put(steps, "trainer.steps", int(steps.value) if whole else steps.value)
        draft.skip(epochs)
    else:
        draft.put(epochs, "trainer.epochs", epochs.value)
        draft.skip(steps)


def optimizer(draft: Draft, keys: Roles) -> None:
    entry, decay = keys["optim"], keys["weight_decay"]
    kind, exact = _optimizer(str(entry.value))
    draft.put(entry, "optimizer.type", kind)
    if not exact and "optimizer" not in draft.base:
        draft.lose(entry, "its state is in 8 bits there, in float32 here, or it is not offered")
    values = {"lr": keys["learning_rate"], "weight_decay": decay, "eps": keys["adam_epsilon"]}
    for name, value in values.items():
        if name in OPTIMIZERS[kind]:
            draft.put(value, f"optimizer.params.{name}", value.value)
    beta1, beta2 = keys["adam_beta1"], keys["adam_beta2"]
    if "betas" in OPTIMIZERS[kind]:
        for beta in (beta1, beta2):
            betas = [beta1.value if beta1.key else 0.9, beta2.value if beta2.key else 0.999]
            draft.put(beta, "optimizer.params.betas", betas)
    if kind == "SGD":
        draft.skip(beta1, beta2, keys["adam_epsilon"])
    if "optimizer" in draft.base and decay.value:
        # with an optimizer in the DeepSpeed file, the Trainer decays norms and biases as well
        draft.put(decay, "trainer.weight_decay_excludes", "nothing")


def _optimizer(name: str) -> tuple[str, bool]:
    """Return the kind of optimizer that is nearest to `name`, and True if it is the same."""
    for section in ("optimizers", "low_precision_optimizers"):
        for kind, theirs in _VALUES[section].items():
            if name in theirs.split():
                return kind, section == "optimizers"
    return "AdamW", False


def clipping(draft: Draft, keys: Roles) -> None:
    norm = keys["max_grad_norm"]
    if not draft.base or "gradient_clipping" in draft.base:
        draft.put(norm, "gradient_clipping", norm.value)
    elif draft.explicit(norm):
        draft.put(norm, "gradient_clipping", norm.value)
        if norm.value != 1:
            draft.lose(norm, "the DeepSpeed file has no gradient_clipping: DeepSpeed clips at 1")


def scheduler(draft: Draft, keys: Roles) -> None:
    entry, (warmup, steps) = keys["lr_scheduler_type"], _warmup(draft, keys)
    if "scheduler" in draft.base:
        if draft.explicit(entry):
            draft.keep(entry, "the DeepSpeed file has a scheduler of its own")
        if (own := at(draft.base, "scheduler.params.warmup_num_steps")) is not None:
            _put_warmup(draft, warmup, steps, decides=own == AUTO)
        return
    if entry.value == "constant":
        draft.keep(entry, "no scheduler: the rate is constant")
        draft.skip(keys["warmup_steps"], keys["warmup_ratio"])
        return
    kind = _VALUES["schedulers"].get(str(entry.value), "constant_with_warmup")
    draft.put(entry, "scheduler.type", kind)
    if str(entry.value) not in _VALUES["schedulers"]:
        draft.lose(entry)
    _put_warmup(draft, warmup if warmup.key else entry, steps)
    if kind != "constant_with_warmup":
        draft.put(entry, "scheduler.params.total_num_steps", AUTO)
    if kind == "cosine":
        least, options = keys["cosine_min_lr_ratio"], keys["lr_scheduler_kwargs"]
        decisive = next(one for one in (least, options, entry) if one.key)
        draft.put(decisive, "scheduler.params.cos_min_ratio", _least(draft, options, least))


def _put_warmup(draft: Draft, entry: Entry, steps: int | str, decides: bool = True) -> None:
    """Set the warm-up steps; "auto" with a share of all steps, until their number is known."""
    draft.put(entry, "scheduler.params.warmup_num_steps", steps)
    if steps == AUTO and decides:
        draft.put(entry, "trainer.warmup_ratio", entry.value)


def _warmup(draft: Draft, keys: Roles) -> tuple[Entry, int | str]:
    """Return the key that asks for a warm-up, and its steps; "auto" if they are not known."""
    steps, share = keys["warmup_steps"], keys["warmup_ratio"]
    if not steps.value and (not steps.key or draft.explicit(share)):
        steps, share = share, Entry()
    draft.skip(share)
    if not steps.value:
        return steps, 0
    if steps.value < 0:
        raise ConfigError(Problem(steps.key, f"saw {show(steps.value)}", "a number of at least 0"))
    return steps, int(steps.value) if steps.value >= 1 else _steps_of(draft, steps) or AUTO


def _least(draft: Draft, entry: Entry, share: Entry) -> float:
    """Return the share of the learning rate at which a cosine schedule ends."""
    options = section_of(entry.key, entry.value, draft.folder)
    more = {key: value for key, value in options.items() if key not in ("min_lr", "min_lr_rate")}
    if more and more != {"num_cycles": 0.5}:
        draft.lose(entry, OTHERWISE)
    rate = number(draft.get("optimizer.params.lr"))
    absolute = "min_lr" in options
    least = number(options.get("min_lr", options.get("min_lr_rate", share.value or 0)))
    fits = type(least) in (int, float)
    if not fits or (absolute and not (isinstance(rate, float | int) and rate)):
        seen = f"saw {show(least)}, and a rate of {show(rate)}"
        raise ConfigError(Problem("min_lr", seen, "two numbers"))
    return float(least) / float(rate) if absolute else float(least)


def _steps_of(draft: Draft, entry: Entry) -> int | None:
    """Return a share of all steps as a number of steps; None if their number is unknown."""
    total = draft.get("trainer.steps")
    return None if total is None else max(1, math.ceil(entry.value * total))


def evaluation(draft: Draft, keys: Roles) -> None:
    _interval(draft, keys, "eval", "trainer.evaluation.every", draft.lose)
    patience = keys["early_stopping_patience"]
    if patience.value and draft.get("trainer.evaluation.every"):
        draft.put(patience, "trainer.evaluation.patience", int(patience.value))
        if not draft.get("trainer.evaluation.samples"):  # theirs evaluates on all rows held out
            draft.put(patience, "trainer.evaluation.samples", 10**9)


def saving(draft: Draft, keys: Roles) -> None:
    limit, best = keys["save_total_limit"], keys["load_best_model_at_end"]
    _interval(draft, keys, "save", "trainer.checkpoint.every", lambda entry, *_: draft.skip(entry))
    if limit.value:
        draft.put(limit, "trainer.checkpoint.keep_last", max(1, int(limit.value)))
    if not best.value:
        return
    saves, evaluates = (draft.get(f"trainer.{name}.every") for name in ("checkpoint", "evaluation"))
    if saves is None or evaluated_at(saves, evaluates):
        draft.put(best, "trainer.checkpoint.keep_best", True)
    draft.lose(best, "final/ is the last step's: keep_best keeps the best checkpoint beside it")


def _interval(draft: Draft, keys: Roles, name: str, path: str, leave: Leave) -> None:
    """Set an interval in steps, or as a share of all; `leave` keys that can't be expressed so."""
    strategy, steps = keys[f"{name}_strategy"], keys[f"{name}_steps"]
    often = keys[f"{name}s_per_epoch"]
    kind = str(strategy.value) if strategy.key else "steps"
    if kind in ("no", "False"):
        draft.skip(strategy, steps, often)
    elif often.value:
        draft.skip(steps)
        _each_epoch(draft, often, often.value, path, leave)
    elif kind == "steps" and steps.value:
        whole = int(steps.value) if steps.value >= 1 else _steps_of(draft, steps)
        draft.skip(strategy)
        draft.put(steps, path, whole or float(steps.value))
    elif kind == "epoch":
        draft.skip(steps)
        _each_epoch(draft, strategy, 1, path, leave)
    elif kind != "steps":
        leave(strategy)
    elif name == "save":
        draft.skip(steps)


def _each_epoch(draft: Draft, entry: Entry, often: float, path: str, leave: Leave) -> None:
    """Set an interval of so many per epoch as a share of all steps, if the epochs are known."""
    epochs = draft.get("trainer.epochs")
    if not epochs or isinstance(epochs, str):
        leave(entry, f"--dry-run says how many steps an epoch has: set {path}")
    elif often * epochs > 1:
        draft.put(entry, path, 1 / (often * epochs))
    else:
        draft.skip(entry)


def precision(draft: Draft, keys: Roles) -> None:
    bf16, fp16, pure, dtype = (keys[name] for name in ("bf16", "fp16", "pure_bf16", "dtype"))
    if str(dtype.value) in _FLOAT32:
        draft.skip(dtype)
    elif str(dtype.value) in _BFLOAT16:
        pure = dtype
    # masters are in float32 with DeepSpeed, FSDP and adapters there, too
    masters = draft.base or draft.get("trainer.adapter.type") or draft.get("trainer.engine")
    for entry in (pure, bf16 if bf16.value == "full" else Entry()):
        if entry.value and not masters:
            draft.lose(entry, OTHERWISE)
    if fp16.value and not (bf16.value and draft.explicit(bf16)):
        draft.put(fp16, "fp16.enabled", True)
    else:
        for entry in (bf16, pure):
            if entry.value:
                draft.put(entry, "bf16.enabled", AUTO if entry.value == AUTO else True)
    for entry, name in ((bf16, "bf16"), (fp16, "fp16")):
        if not entry.value and at(draft.base, f"{name}.enabled") == AUTO:
            draft.put(entry, f"{name}.enabled", False)


def sharding(draft: Draft, keys: Roles) -> None:
    deepspeed, fsdp, options = (keys[name] for name in ("deepspeed", "fsdp", "fsdp_config"))
    if deepspeed.value:
        stage = at(draft.base, "zero_optimization.stage") or 0
        draft.keep(deepspeed, f"the base of this config, ZeRO stage {stage}")
        return
    given = section_of(options.key, options.value, draft.folder)
    entry = fsdp if fsdp.value else options
    if not (entry.value or given):
        return
    words = names(entry.value) if isinstance(entry.value, list | str) else []
    stages = _VALUES["stages"]
    stage = next((stages[word] for word in words if word in stages), 3)
    draft.put(entry, "zero_optimization.stage", stage)
    draft.put(entry, "trainer.engine", "accelerate")
    if "offload" in words:
        for name in ("offload_param", "offload_optimizer"):
            draft.put(entry, f"zero_optimization.{name}.device", "cpu")
    if given:
        draft.skip(options)
    inner = {key.removeprefix("fsdp_"): value for key, value in given.items()}
    part = Draft(inner, draft.folder, prefix="fsdp_config.", made=draft.made)
    fill(part, inner_table("arguments"), {})
    draft.take(part)


def adapter(draft: Draft, keys: Roles) -> None:
    """Convert LoRA, if requested. Raises ConfigError for another method."""
    kind, dropout, folder = keys["use_peft"], keys["lora_dropout"], keys["lora_path"]
    same = [(keys[name], ours) for name, ours in _VALUES["adapter"].items()]
    targets = [keys[name] for name in _TARGETS]
    rest = [*(entry for entry, _ in same), *targets, keys["lora_modules_to_save"]]
    if not kind.key:
        return
    if not kind.is_set or kind.value in (0, "full"):
        draft.skip(kind, dropout, folder, *rest)
        return
    if kind.value not in (1, "lora", "qlora"):
        expected = "lora, or all parameters: no other is offered"
        raise ConfigError(Problem(kind.key, f"saw {show(kind.value)}", expected))
    draft.put(kind, "trainer.adapter.type", "lora")
    if kind.value == "qlora":
        draft.lose(kind, "the base is in 16 bits, not in 4: say lora, and load_in_4bit: false")
    if dropout.value:
        draft.put(dropout, "trainer.adapter.dropout", dropout.value)
    draft.skip(*(() if dropout.value else (dropout,)))
    if folder.value:
        draft.put(folder, "trainer.adapter.path", folder.value)
        draft.skip(*rest)
        return
    for entry, ours in same:
        if entry.value not in (None, False, ""):
            draft.put(entry, f"trainer.adapter.{ours}", entry.value)
    _modules(draft, keys)
    given = {"r": keys["lora_r"].is_set, "alpha": keys["lora_alpha"].is_set}
    given |= {"dropout": dropout.is_set, "targets": any(entry.is_set for entry in targets)}
    if missing := [name for name, known in given.items() if not known]:
        draft.lose(kind, f"nothing says LoRA's {', '.join(missing)}")


_TARGETS = ("lora_target_modules", "lora_target", "lora_target_linear")
_NAME = re.compile(r"[\w.-]+")


def _modules(draft: Draft, keys: Roles) -> None:
    """Set the adapted modules: names, or a text that PEFT takes as a regular expression."""
    save, linear = keys["lora_modules_to_save"], keys["lora_target_linear"]
    if save.is_set:
        draft.put(save, "trainer.adapter.modules_to_save", names(save.value))
    expressions = bool(keys["lora_target_modules"].key)
    entry = keys["lora_target_modules"] if expressions else keys["lora_target"]
    modules = names(entry.value) if entry.is_set else []
    if linear.value:
        draft.put(linear, "trainer.adapter.targets", "all-linear")
        if all(name.endswith("_proj") for name in modules):
            draft.skip(entry)  # Axolotl joins both, and all-linear contains these
    elif modules == (["all-linear"] if expressions else ["all"]):
        draft.put(entry, "trainer.adapter.targets", "all-linear")
    elif modules and all(map(_NAME.fullmatch, modules)):
        draft.put(entry, "trainer.adapter.targets", modules)
    elif modules and expressions and isinstance(entry.value, str):
        draft.put(entry, "trainer.adapter.targets", entry.value)
    elif modules:
        draft.lose(entry, "in a list PEFT takes names as they are, and no layer is called so")


def trackers(draft: Draft, keys: Roles) -> None:
    known, wanted = _VALUES["trackers"], []
    report_to = keys["report_to"]
    asked = [(report_to, name) for name in names(report_to.value)] if report_to.is_set else []
    asked += [(keys[role], name) for role, name in known.items() if keys[role].is_set]
    for entry, name in asked:
        if name not in known.values():
            draft.skip(entry)
            continue
        if name not in wanted:
            wanted.append(name)
        draft.put(entry, "trainer.log.trackers", wanted)


def run_folder(draft: Draft, keys: Roles) -> None:
    if (entry := keys["output_dir"]).key:
        path = PurePath(str(entry.value))
        draft.put(entry, "trainer.run.folder", str(path.parent))
        if path.name:
            draft.put(entry, "trainer.run.name", path.name)


GROUPS: tuple[Group, ...] = (
    length,
    sharding,
    adapter,
    precision,
    optimizer,
    clipping,
    scheduler,
    evaluation,
    saving,
    trackers,
    run_folder,
)
"""The groups in the order in which they depend on one another."""


_USUAL = {"split": "train", "text_column": "text"}


def put_sources(
    draft: Draft, entry: Entry, parts: Sequence[Json], labels: Sequence[str], test: bool = False
) -> None:
    """Set one data set as `trainer.data`, several as its sources; evaluation sets by path alone."""
    named = dict(zip(_unlike(labels), parts, strict=True))
    if test:
        paths = {label: part["path"] for label, part in named.items()}
        value = paths if len(paths) > 1 else parts[0]["path"]
        draft.put(entry, "trainer.data.evaluation_path", value)
        if any(_reads_otherwise(draft.get("trainer.data"), part) for part in parts):
            draft.lose(entry, "its rows are read as those that are trained on")
    elif len(parts) == 1:
        draft.made.setdefault("trainer", {}).setdefault("data", {}).update(parts[0])
        draft.keep(entry, "trainer.data")
    else:
        sources = [{"label": label, **part} for label, part in named.items()]
        draft.put(entry, "trainer.data.sources", sources)


def put_share(draft: Draft, held: Entry) -> None:
    """Set the share of the rows that is held out, unless there are data sets to evaluate on."""
    if held.value > 1:
        draft.lose(held, "a share is held out, not a number of rows")
    elif not draft.get("trainer.data.evaluation_path"):
        draft.put(held, "trainer.data.evaluation_fraction", held.value)
    elif not held.value:
        draft.skip(held)


def _reads_otherwise(data: Json, part: Json) -> bool:
    """Return True if the rows of an evaluation set need other options than those trained on."""
    # with several sources, the rows themselves decide what they hold
    decided = {"path", "records", "chat_column"} if "sources" in data else {"path"}
    options = {key: value for key, value in part.items() if key not in decided}
    return any(data.get(key, _USUAL.get(key)) != value for key, value in options.items())


def _unlike(labels: Sequence[str]) -> list[str]:
    """Shorten each path to its last part, numbered where that is not unique."""
    short = [label.rstrip("/").rpartition("/")[2][:80] or "source" for label in labels]
    return [f"{name}-{at}" if short.count(name) > 1 else name for at, name in enumerate(short)]
