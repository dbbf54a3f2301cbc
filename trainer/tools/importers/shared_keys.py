"""Keys of Hugging Face's Trainer that belong together, in all systems under the Trainer's names."""

from __future__ import annotations

import json
from pathlib import Path, PurePath
from typing import Any

from trainer.config.keys import OPTIMIZERS
from trainer.config.keys.key import AUTO
from trainer.config.read import at, read
from trainer.errors import ConfigError, Problem, refused, show
from trainer.storage import Json
from trainer.tools.importers import intervals
from trainer.tools.importers.adapters import adapter
from trainer.tools.importers.draft import OTHERWISE, Draft, Entry, Roles, names, number
from trainer.tools.importers.intervals import in_steps
from trainer.tools.importers.reading import beside, checked
from trainer.tools.importers.tables import Group, fill, inner_table, read_table

_VALUES = read_table("arguments")["values"]
_BFLOAT16 = ("bfloat16", "torch.bfloat16")
_FLOAT32 = (AUTO, "float32", "torch.float32")
_EIGHT_BITS = "its state is in 8 bits there, in float32 here: the same updates, in more memory"
LOW_WEIGHTS = (
    "weights stay in bfloat16 there unless the launch adds DeepSpeed or FSDP, here in float32; "
    "bf16.bf16_master_weights_and_grads and bf16_optimizer_states with ZeRO 1 keep bfloat16"
)


def section_of(key: str, value: Any, folder: Path) -> Json:
    """Return a section: given inline, as JSON text, or as a file's name. Raises ConfigError."""
    if not value or isinstance(value, dict):
        return dict(value or {})
    if str(value).lstrip().startswith("{"):
        with refused(key, "JSON", ValueError, RecursionError):
            return checked(json.loads(value), key)  # type: ignore[no-any-return]
    if (file := beside(folder, str(value))) is None:
        expected = f"a JSON file, relative to {folder} or to the working directory"
        raise ConfigError(Problem(key, f"no file {show(value)}", expected, "Put it there."))
    return read(file)


def length(draft: Draft, keys: Roles) -> None:
    steps = keys["max_steps"]
    epochs = keys["num_train_epochs"]
    if steps.key and steps.value > 0:
        whole = steps.value == int(steps.value)
        draft.put(steps, "trainer.steps", int(steps.value) if whole else steps.value)
        draft.skip(epochs)
    else:
        draft.put(epochs, "trainer.epochs", epochs.value)
        draft.skip(steps)


def optimizer(draft: Draft, keys: Roles) -> None:
    entry = keys["optim"]
    decay = keys["weight_decay"]
    kind, exact = _optimizer(str(entry.value))
    draft.put(entry, "optimizer.type", kind)
    if not exact and "optimizer" not in draft.base:
        in_8_bits = str(entry.value) in _VALUES["in_8_bits"].split()
        report = draft.note if in_8_bits else draft.lose
        report(entry, _EIGHT_BITS if in_8_bits else "it is not offered here")
    values = {"lr": keys["learning_rate"], "weight_decay": decay, "eps": keys["adam_epsilon"]}
    for name, value in values.items():
        if name in OPTIMIZERS[kind]:
            draft.put(value, f"optimizer.params.{name}", value.value)
    beta1 = keys["adam_beta1"]
    beta2 = keys["adam_beta2"]
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
        least = keys["cosine_min_lr_ratio"]
        options = keys["lr_scheduler_kwargs"]
        decisive = next(one for one in (least, options, entry) if one.key)
        draft.put(decisive, "scheduler.params.cos_min_ratio", _least(draft, options, least))


def _put_warmup(draft: Draft, entry: Entry, steps: int | str, decides: bool = True) -> None:
    """Set the warm-up steps; for "auto" also the share of all steps, if this key `decides` it."""
    draft.put(entry, "scheduler.params.warmup_num_steps", steps)
    if steps == AUTO and decides:
        draft.put(entry, "trainer.warmup_ratio", entry.value)


def _warmup(draft: Draft, keys: Roles) -> tuple[Entry, int | str]:
    """Return the key that asks for a warm-up, and its steps: "auto" if all steps are not known."""
    steps = keys["warmup_steps"]
    share = keys["warmup_ratio"]
    if not steps.value and (not steps.key or draft.explicit(share)):
        steps = share
        share = Entry()
    draft.skip(share)
    if not steps.value:
        return steps, 0
    if steps.value < 0:
        raise steps.refused("a number of at least 0")
    return steps, in_steps(draft, steps) or AUTO


def _least(draft: Draft, entry: Entry, share: Entry) -> float:
    """Return the share of the learning rate at which a cosine ends. Raises ConfigError."""
    options = section_of(entry.key, entry.value, draft.folder)
    more = {key: value for key, value in options.items() if key not in ("min_lr", "min_lr_rate")}
    if more and more != {"num_cycles": 0.5}:
        draft.lose(entry, OTHERWISE)
    rate = number(draft.get("optimizer.params.lr"))
    absolute = "min_lr" in options
    least = number(options.get("min_lr", options.get("min_lr_rate", share.value or 0)))
    fits = type(least) in (int, float)
    if not fits or (absolute and not (isinstance(rate, float | int) and rate)):
        actual = f"saw {show(least)}, and a learning rate of {show(rate)}"
        raise ConfigError(Problem("min_lr", actual, "two numbers"))
    return float(least) / float(rate) if absolute else float(least)


def precision(draft: Draft, keys: Roles) -> None:
    """Convert the dtypes of weights and computation.

    With DeepSpeed, FSDP or an adapter, theirs keeps master weights in float32, as here. Without
    these, keys that keep all in bfloat16 are converted. A dtype in which weights are loaded is
    noted: there the launch decides if float32 is kept.
    """
    bf16, fp16, pure, dtype = (keys[name] for name in ("bf16", "fp16", "pure_bf16", "dtype"))
    loaded = dtype if str(dtype.value) in _BFLOAT16 else Entry()
    if str(dtype.value) in _FLOAT32:
        draft.skip(dtype)
    masters = draft.base or draft.get("trainer.adapter.type") or draft.get("trainer.engine")
    if fp16.value and not (bf16.value and draft.explicit(bf16)):
        draft.put(fp16, "fp16.enabled", True)
    else:
        for entry in (bf16, pure, loaded):
            if entry.value:
                draft.put(entry, "bf16.enabled", AUTO if entry.value == AUTO else True)
        for entry in (pure, bf16 if bf16.value == "full" else Entry()):
            if entry.value and not masters:
                _put_low_weights(draft, entry)
        if loaded.value and not masters:
            draft.note(loaded, LOW_WEIGHTS)
    for entry, name in ((bf16, "bf16"), (fp16, "fp16")):
        if not entry.value and at(draft.base, f"{name}.enabled") == AUTO:
            draft.put(entry, f"{name}.enabled", False)


def _put_low_weights(draft: Draft, entry: Entry) -> None:
    """Keep weights and the optimizer's state in bfloat16, which needs ZeRO stage 1 at least."""
    draft.put(entry, "bf16.bf16_master_weights_and_grads", True)
    draft.put(entry, "bf16.bf16_optimizer_states", True)
    draft.put(entry, "zero_optimization.stage", 1)


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


def trackers(draft: Draft, keys: Roles) -> None:
    known = _VALUES["trackers"]
    wanted = []
    report_to = keys["report_to"]
    requested = [(report_to, name) for name in names(report_to.value)] if report_to.is_set else []
    requested += [(keys[role], name) for role, name in known.items() if keys[role].is_set]
    for entry, name in requested:
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
    intervals.evaluation,
    intervals.saving,
    intervals.logging,
    trackers,
    run_folder,
)
"""The groups in the order in which they depend on one another."""
