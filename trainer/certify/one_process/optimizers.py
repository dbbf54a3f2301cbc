"""The optimizer and scheduler of the one process: PyTorch's, transformers', DeepSpeed's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim._muon import muon

from trainer.certify.parameters import Learner
from trainer.certify.tiny_run import Tiny
from trainer.config import Config
from trainer.plugins import NAMED
from trainer.storage import required

_OF_DEEPSPEED = "adam_w_mode torch_adam bias_correction fp32_optimizer_states fused ns_method"
NOT_OF_TORCH = tuple(_OF_DEEPSPEED.split())


def matrices_of(model: nn.Module, blocks: Sequence[str]) -> set[str]:
    """Return the names of the weights that Muon updates, as docs/optimizers.md says."""
    matrices = set[str]()
    for block in blocks:
        for name, module in model.get_submodule(block).named_modules(prefix=block):
            if not isinstance(module, nn.Embedding | nn.Conv1d):
                own = module.named_parameters(name, recurse=False)
                matrices |= {key for key, p in own if p.ndim in (2, 3) and 1 not in p.shape[-2:]}
    return matrices


class MuonOfTorch(torch.optim.AdamW):
    """`torch.optim.Muon`'s update in groups with `muon`, expert by expert; AdamW's in the others.

    Each group has one parameter.
    """

    def __init__(self, groups: list[dict[str, Any]], **params: Any) -> None:
        halves = {True: params.pop("muon_lr", None), False: params.pop("adam_lr", None)}
        for group in groups:
            if (rate := halves[group["muon"]]) is not None:
                group["lr_multiplier"] *= rate / params["lr"]
        ours = "momentum", "nesterov", "ns_steps", "adjust_lr_fn"
        wanted = {name: params.pop(name) for name in ours if name in params}
        self._muon = torch.optim.Muon([torch.zeros(2, 2)], **wanted).defaults
        super().__init__(groups, **params)

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        everything = self.param_groups
        self.param_groups = [group for group in everything if not group["muon"]]
        super().step()
        self.param_groups = everything
        for group in everything:
            [parameter] = group["params"]
            if group["muon"] and parameter.grad is not None:
                zeros = torch.zeros_like(parameter)
                buffer = self.state[parameter].setdefault("momentum_buffer", zeros)
                tensors = parameter.detach(), parameter.grad, buffer
                chosen: Any = self._muon | {key: group[key] for key in ("lr", "weight_decay")}
                muon(*([*t] if t.ndim == 3 else [t] for t in tensors), **chosen, has_complex=False)


def optimizer_of(own: Learner, small: Tiny, blocks: Sequence[str]) -> torch.optim.Optimizer:
    """Build PyTorch's optimizer, or a plug-in's, with each parameter as a group by itself.

    Its settings are the config's, or DeepSpeed's defaults. Weight decay leaves out what Hugging
    Face's Trainer leaves out, unless the config has other groups.
    """
    from transformers import Trainer

    wanted = small.config.optimizer
    section = small.config.trainer
    matrices = matrices_of(own.model, blocks) if wanted.type == "Muon" else set[str]()
    decoupled = wanted.type == "Adam" and wanted.params.get("adam_w_mode", True)
    params = {key: value for key, value in wanted.params.items() if key not in NOT_OF_TORCH}
    params = {"weight_decay": 0.0, **params, "foreach": False}
    named = dict(own.model.named_parameters())
    decayed = set(named)
    if section.weight_decay_excludes != "nothing":
        decayed &= set(Trainer.get_decay_parameter_names(None, own.model))
    groups = []
    for key, parameter in named.items():
        multiplier, decay = own.groups.get(key, (1.0, None))
        if decay is None:
            decay = params["weight_decay"] if key in decayed else 0.0
        group = {"params": [parameter], "lr": params["lr"], "lr_multiplier": multiplier}
        groups.append({**group, "weight_decay": decay, "muon": key in matrices})
    if build := NAMED["optimizer"].get(wanted.type):
        return build(groups, **wanted.params)  # type: ignore[no-any-return]
    name = "AdamW" if decoupled else wanted.type
    kind: Any = MuonOfTorch if matrices else getattr(torch.optim, name)
    return kind(groups, **params)  # type: ignore[no-any-return]


def scheduler_of(optimizer: torch.optim.Optimizer, config: Config) -> Any:
    """Build DeepSpeed's own scheduler, or transformers', to be stepped after each update.

    None if the config has none. Raises ConfigError if DeepSpeed is needed and not installed.
    """
    from transformers import get_scheduler

    if (section := config.scheduler) is None:
        return None
    if section.type[0].isupper():  # transformers' names are in lower case
        place = f"scheduler.type: {section.type}, compared with DeepSpeed's own"
        lr_schedules = required("deepspeed.runtime.lr_schedules", place, "meshloom[deepspeed]")
        return getattr(lr_schedules, section.type)(optimizer, **section.params)
    steps = (section.params.get(f"{which}_num_steps", 0) for which in ("warmup", "total"))
    least = {"min_lr_rate": rate} if (rate := section.params.get("cos_min_ratio")) else None
    return get_scheduler("cosine_with_min_lr" if least else section.type, optimizer, *steps, least)


def state_of_optimizer(
    optimizer: torch.optim.Optimizer, named: Mapping[str, nn.Parameter]
) -> dict[tuple[str, str], torch.Tensor]:
    """Copy an optimizer's state of each parameter to the host, by name and part."""
    return {
        (name, part): value.detach().cpu().clone()
        for name, parameter in named.items()
        for part, value in optimizer.state[parameter].items()
        if torch.is_tensor(value)
    }


def update_by(optimizer: torch.optim.Optimizer, rate: float | None) -> None:
    """Take a step in which each group has its multiple of the learning rate.

    `rate`: the learning rate from here on; None: as the schedule has set it.
    """
    groups = optimizer.param_groups
    if rate is not None:
        for group in groups:
            group["lr"] = rate
    scheduled = [group["lr"] for group in groups]
    for group in groups:
        group["lr"] *= group["lr_multiplier"]
    optimizer.step()
    for group, own in zip(groups, scheduled, strict=True):
        group["lr"] = own
