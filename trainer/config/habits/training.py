"""What several systems write alike: the optimizer, its schedule, intervals, precision, sharding, adapters, trackers."""

from __future__ import annotations

import json
import math
from pathlib import Path, PurePath
from typing import Any

from trainer.config.grammar import AUTO, show
from trainer.config.habits.draft import Asked, Draft, Group, Roles, fill, names, parse
from trainer.config.habits.reading import beside
from trainer.config.keys import OPTIMIZERS
from trainer.config.read import Json, read
from trainer.config.validate import evaluated_at
from trainer.errors import ConfigError, Problem, first_line

_OPTIMIZERS = parse("""
    adamw_torch adamw_torch_fused adamw_hf adamw_apex_fused adamw_anyprecision adamw : AdamW
    paged_adamw
    paged_adamw_32bit : AdamW ~ its state is not paged; zero_optimization.offload_optimizer has it on the CPU
    adamw_8bit
    adamw_bnb_8bit paged_adamw_8bit adamw_torch_8bit ao_adamw_8bit : AdamW ~ its state is in float32, not 8 bits
    adamw_torch_4bit ao_adamw_4bit ao_adamw_fp8 : AdamW ~ its state is in float32, not 4 or 8 bits
    sgd : SGD
    adagrad : Adagrad
    rmsprop rmsprop_bnb rmsprop_bnb_32bit : RMSprop
    lion lion_32bit paged_lion_32bit : Lion
    lion_8bit paged_lion_8bit : Lion ~ its state is in float32, not 8 bits
""")
_SCHEDULERS = parse("""
    linear : WarmupDecayLR
    cosine cosine_with_min_lr : WarmupCosineLR
    constant : -
    constant_with_warmup : WarmupLR
""")
_ATTENTION = parse("""
    flash_attention_2 fa2 flash : flash_attention_2
    flash_attention_3 fa3 flash_attention_4 : flash_attention_2 ~ the version that there is
    sdpa sdp : sdpa
    eager disabled : eager
    xformers : sdpa ~ PyTorch picks the kernel
    flex flex_attention : sdpa ~ packed samples choose their masks themselves
""")
_SHARD = "each block of the model is a unit"
_FSDP = parse(f"""
    sharding_strategy : @shard strategy
    reshard_after_forward : @shard reshard
    offload_params cpu_offload : @shard offload
    activation_checkpointing : @shard recompute
    auto_wrap_policy transformer_layer_cls_to_wrap min_num_params : - {_SHARD}
    version fsdp_version : - =2 it is PyTorch's FSDP2
    state_dict_type final_state_dict_type : - files are always whole, in safetensors
    cpu_ram_efficient_loading sync_module_states : - =true each rank reads what it keeps
    use_orig_params limit_all_gathers forward_prefetch backward_prefetch xla xla_fsdp_v2 : - FSDP2 knows no such thing
    xla_fsdp_grad_ckpt xla_fsdp_settings mixed_precision_policy : - bf16 and fp16 say the precision
""")
_STAGES = {"full_shard": 3, "shard_grad_op": 2, "no_shard": 0, "hybrid_shard": 3, "hybrid_shard_zero2": 2}
_TRACKERS = ("tensorboard", "mlflow", "wandb")
_UNKNOWN_STEPS = "how many steps that is depends on the data: --dry-run says in its line plan how many there are; set"


def section_of(key: str, value: Any, folder: Path) -> Json:
    """A section that theirs has in itself, as JSON text, or in the file that it names. Raises ConfigError."""
    if not value or isinstance(value, dict):
        return dict(value or {})
    if str(value).lstrip().startswith("{"):
        try:
            return dict(json.loads(value))
        except ValueError as error:
            raise ConfigError(Problem(key, first_line(error), "JSON")) from None
    found = beside(folder, str(value))
    if found is None:
        expected = f"a JSON file, seen from {folder} or from here"
        raise ConfigError(Problem(key, f"no file {value}", expected, "Put it there."))
    return read(found)


def length(draft: Draft, roles: Roles) -> None:
    steps, epochs = roles.get("steps"), roles.get("epochs")
    if steps and steps.value > 0:
        draft.put(steps, "trainer.steps", int(steps.value))
        return
    if epochs:
        draft.put(epochs, "trainer.epochs", epochs.value)
    if steps:
        draft.keep(steps, "the epochs say it")


def optimizer(draft: Draft, roles: Roles) -> None:
    asked = roles["name"]
    row = _OPTIMIZERS.get(str(asked.value))
    kind, why = (row.path, row.why) if row else ("AdamW", f"{show(asked.value)} is not offered")
    draft.put(asked, "optimizer.type", kind, why)
    for role, name in (("lr", "lr"), ("decay", "weight_decay"), ("eps", "eps")):
        if role in roles and name in OPTIMIZERS[kind]:
            draft.put(roles[role], f"optimizer.params.{name}", roles[role].value)
    betas = [
        beta.value if (beta := roles.get(role)) else default for role, default in (("beta1", 0.9), ("beta2", 0.999))
    ]
    for role in ("beta1", "beta2"):
        if role in roles and "betas" in OPTIMIZERS[kind]:
            draft.put(roles[role], "optimizer.params.betas", betas)
    if "optimizer" in draft.base and "decay" in roles and roles["decay"].value:
        why = "with an optimizer in the DeepSpeed file, the Trainer decays norms and biases as well"
        draft.put(roles["decay"], "trainer.weight_decay_excludes", "nothing", why)


def clipping(draft: Draft, roles: Roles) -> None:
    if (asked := roles.get("norm")) is None:
        return
    if not draft.base or "gradient_clipping" in draft.base:
        draft.put(asked, "gradient_clipping", asked.value)
    elif draft.explicit(asked):
        why = "the DeepSpeed file has no such key, so that DeepSpeed did not clip"
        draft.put(asked, "gradient_clipping", asked.value, why)


def scheduler(draft: Draft, roles: Roles) -> None:
    asked, warmup = roles["type"], _warmup(draft, roles)
    if "scheduler" in draft.base:
        if draft.explicit(asked):
            draft.leave(asked, "the DeepSpeed file has a scheduler of its own")
        if warmup and (held := draft.base["scheduler"].get("params", {}).get("warmup_num_steps")) is not None:
            _put_warmup(draft, *warmup, decides=held == AUTO)
        return
    row = _SCHEDULERS.get(str(asked.value))
    if row and row.path == "-":
        draft.change(asked, "no scheduler: the rate is constant")
        return
    kind = row.path if row else "WarmupLR"
    why = "" if row else f"{show(asked.value)} is not offered: constant after the warm-up. "
    draft.put(asked, "scheduler.type", kind, f"{why}DeepSpeed's starts at 0, and is an update behind theirs")
    draft.put(asked, "scheduler.params.warmup_type", "linear")
    _put_warmup(draft, *(warmup or (asked, 0)))
    if kind != "WarmupLR":
        draft.put(asked, "scheduler.params.total_num_steps", AUTO)
    if kind == "WarmupDecayLR":
        draft.put(asked, "scheduler.params.warmup_max_lr", AUTO)
    if kind == "WarmupCosineLR":
        draft.put(
            roles.get("least", roles.get("options", asked)), "scheduler.params.cos_min_ratio", _least(draft, roles)
        )


def _put_warmup(draft: Draft, asked: Asked, steps: int | str, decides: bool = True) -> None:
    """So many steps, or "auto": the share of them that is asked for, once the data says how many there are."""
    draft.put(asked, "scheduler.params.warmup_num_steps", steps)
    if steps == AUTO and decides:
        draft.put(asked, "trainer.warmup_ratio", asked.value)


def _least(draft: Draft, roles: Roles) -> float:
    """The share of the learning rate at which a cosine ends."""
    options = section_of(*roles["options"], draft.folder) if "options" in roles else {}
    if "min_lr" in options:
        return float(options["min_lr"]) / float(draft.made["optimizer"]["params"]["lr"])
    return float(options.get("min_lr_rate", roles["least"].value if "least" in roles else 0.0))


def _warmup(draft: Draft, roles: Roles) -> tuple[Asked, int | str] | None:
    """What asks for a warm-up, and of how many steps; "auto" where that needs the number of all steps."""
    steps, share = roles.get("steps"), roles.get("share")
    if steps is None or (not steps.value and share is not None and draft.explicit(share)):
        steps = share
    if steps is None:
        return None
    if steps.value >= 1 or not steps.value:
        return steps, int(steps.value)
    return steps, _steps_of(draft, steps) or AUTO


def _steps_of(draft: Draft, asked: Asked) -> int | None:
    """A share of all steps as a number of steps; None where theirs is not known."""
    total = draft.made.get("trainer", {}).get("steps")
    return None if total is None else max(1, math.ceil(asked.value * total))


def evaluation(draft: Draft, roles: Roles) -> None:
    _interval(draft, roles, "trainer.evaluation.every")
    if (asked := roles.get("patience")) and asked.value:
        if draft.has("trainer.evaluation.every"):
            draft.put(asked, "trainer.evaluation.patience", int(asked.value))
        else:
            draft.leave(asked, "set trainer.evaluation.patience with trainer.evaluation.every")


def saving(draft: Draft, roles: Roles) -> None:
    limit = roles.get("limit")
    _interval(draft, roles, "trainer.checkpoint.every", "" if limit else "of the checkpoints the last 2 are kept")
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
        draft.leave(best, "trainer.checkpoint.keep_best needs an evaluation at each checkpoint")


def _interval(draft: Draft, roles: Roles, path: str, why: str = "") -> None:
    """Every so many steps, or a share of them all."""
    strategy, steps, often = roles.get("strategy"), roles.get("steps"), roles.get("per_epoch")
    kind = str(strategy.value) if strategy else "steps"
    if often and often.value:
        _each_epoch(draft, often, often.value, path, why)
    elif kind == "steps" and (steps := steps or roles.get("else")) and steps.value:
        every = int(steps.value) if steps.value >= 1 else _steps_of(draft, steps) or float(steps.value)
        if strategy:
            draft.keep(strategy, "intervals are of steps")
        draft.put(steps, path, every, why)
    elif kind == "epoch" and strategy:
        _each_epoch(draft, strategy, 1, path, why)
    elif strategy and kind in ("no", "False"):
        draft.keep(strategy, "none on the way, one at the end")
    elif strategy and kind != "steps":
        draft.leave(strategy, f"{_UNKNOWN_STEPS} {path}")


def _each_epoch(draft: Draft, asked: Asked, times: float, path: str, why: str) -> None:
    """So often in each epoch, as a share of all steps; not where theirs are a number: nobody knows how many epochs."""
    epochs = draft.made.get("trainer", {}).get("epochs")
    if not epochs:
        draft.leave(asked, f"{_UNKNOWN_STEPS} {path}")
    elif times * epochs > 1:
        draft.put(asked, path, 1 / (times * epochs), why)
    else:
        draft.keep(asked, "once, at the end")


def precision(draft: Draft, roles: Roles) -> None:
    bf16, fp16 = roles.get("bf16"), roles.get("fp16")
    masters = "it computes in it, and keeps float32 weights for the update"
    if fp16 and fp16.value is True and not (bf16 and bf16.value and draft.explicit(bf16)):
        draft.put(fp16, "fp16.enabled", True)
    elif pure := next((roles[role] for role in ("pure", "whole") if role in roles and roles[role].value), None):
        draft.put(pure, "bf16.enabled", True, masters)
    elif bf16 and bf16.value:
        draft.put(bf16, "bf16.enabled", AUTO if bf16.value == AUTO else True, masters if bf16.value == "full" else "")
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
    elif on and on.value:
        why = "" if on.value is True else f"{show(on.value)} is not offered: blocks are computed again, not offloaded"
        draft.put(on, "trainer.activation_checkpointing", "full", why)


def attention(draft: Draft, roles: Roles) -> None:
    for role, asked in roles.items():
        row = _ATTENTION.get(str(asked.value) if role == "name" else role)
        if row and asked.value and asked.value != AUTO:
            draft.put(asked, "trainer.model.attention", row.path, row.why)


def adapter(draft: Draft, roles: Roles) -> None:
    """LoRA, where it is asked for. Raises ConfigError for another method: without it all would be trained."""
    kind = roles.get("kind")
    if kind is None or not kind.value or kind.value == "full":
        if kind and kind.value:
            draft.keep(kind, "all parameters are trained")
        return
    if kind.value not in (True, "lora", "qlora"):
        raise ConfigError(Problem(kind.key, f"saw {show(kind.value)}", "lora, or all parameters: no other is offered"))
    why = "the base is kept in 16 or 32 bits, not in 4" if kind.value == "qlora" else ""
    draft.put(kind, "trainer.adapter.type", "lora", why)
    if (dropout := roles.get("dropout")) and dropout.value:
        draft.put(dropout, "trainer.adapter.dropout", dropout.value)
    if (folder := roles.get("path")) and folder.value:
        draft.put(folder, "trainer.adapter.path", folder.value)
        for role in roles.keys() - {"kind", "path", "dropout"}:
            draft.keep(roles[role], "the adapter's folder says it")
        return
    for role in ("r", "alpha", "bias", "rslora", "dora"):
        if role in roles and roles[role].value not in (None, False, ""):
            draft.put(roles[role], f"trainer.adapter.{role}", roles[role].value)
    if (asked := roles.get("save")) and asked.value:
        draft.put(asked, "trainer.adapter.modules_to_save", names(asked.value))
    linear, targets = roles.get("linear"), roles.get("targets")
    if linear and linear.value:
        draft.put(linear, "trainer.adapter.targets", "all-linear")
    elif targets and targets.value:
        found = names(targets.value)
        whole = found in (["all"], ["all-linear"], ["all_linear"])
        draft.put(targets, "trainer.adapter.targets", "all-linear" if whole else found)


def trackers(draft: Draft, roles: Roles) -> None:
    wanted: list[str] = []
    for role, asked in roles.items():
        if not asked.value or asked.value in ("none", ["none"]) or (role in _TRACKERS and asked.value == "disabled"):
            continue
        found = [role] if role in _TRACKERS else names(asked.value)
        for name in found:
            if name not in _TRACKERS:
                draft.leave(asked, f"trackers are {', '.join(_TRACKERS)}")
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
}
"""In the order in which they need one another."""
