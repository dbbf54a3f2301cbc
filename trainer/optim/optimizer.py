"""The optimizer of a resolved config, over whole or sharded parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from inspect import signature

import torch
from torch import nn

from trainer.errors import ConfigError, Problem, named_line
from trainer.models.spec import Tuning
from trainer.optim import patches
from trainer.optim.builders import Builder
from trainer.optim.decay import Group, groups_of
from trainer.optim.lr_schedules import Update
from trainer.optim.muon import Muon, Shared
from trainer.optim.on_shards import OnShards, on_shards


def optimizer_of(
    builder: Builder,
    named: Iterable[tuple[str, nn.Parameter]],
    undecayed: Mapping[str, int],
    tuned: Mapping[str, Tuning],
    shared: Shared | None = None,
) -> torch.optim.Optimizer:
    """Build a builder's optimizer over the trainable parameters of `named`; Muon's is `shared`.

    Raises ConfigError if that of a plug-in or a script is none, or has other parameters.
    """
    # a pipeline stage may be frozen as a whole
    decay = builder.params["weight_decay"]
    matrices = shared.matrices if shared else ()
    groups = groups_of(named, undecayed, decay, tuned, matrices) or [{"params": []}]
    if shared is not None:
        return Muon(groups, shared=shared, **builder.params)
    if builder.build is None:
        return on_shards(builder.library, builder.params)(groups, **builder.params)
    wanted = {parameter for group in groups for parameter in group["params"]}
    try:
        optimizer: torch.optim.Optimizer = builder.build(groups, **builder.params)
        signature(optimizer.step).bind()  # without a closure
        given = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        fits = given == wanted and isinstance(optimizer, torch.optim.Optimizer)
        actual = "" if fits else type(optimizer).__name__
    except Exception as error:  # whatever a user's own code raises
        actual = named_line(error)
    if actual:
        expected = "a torch.optim.Optimizer of all that is trained, whose step needs no closure"
        raise ConfigError(Problem(f"optimizer {builder.library}", actual, expected))
    return optimizer


def set_update(groups: Iterable[Group], update: Update) -> None:
    """Set the schedule's values in an optimizer's groups, scaled by each `lr_multiplier`."""
    for group in groups:
        group["lr"] = update.learning_rate * group.get("lr_multiplier", 1.0)
        if update.betas is not None:
            group["betas"] = update.betas


def scaling_in_kernel(
    optimizer: torch.optim.Optimizer,
) -> Callable[[list[torch.Tensor], torch.Tensor], None] | None:
    """Return a function that has a fused kernel scale the gradients that it reads in a step.

    None for optimizers without such a kernel, and for gradients in 16 bits: PyTorch's own clipping
    rounds them, a kernel does not.
    """
    if not (isinstance(optimizer, OnShards) and optimizer.kernels_read_all):
        return None
    if not optimizer.defaults.get("fused"):
        return None
    dtypes = {p.dtype for group in optimizer.param_groups for p in group["params"]}
    if dtypes != {torch.float32}:
        return None

    def scale(gradients: list[torch.Tensor], factor: torch.Tensor) -> None:
        patches.set_grad_scale(optimizer, factor.reciprocal().to(gradients[0].device))

    return scale


def step_if_finite(
    optimizer: torch.optim.Optimizer, norm: torch.Tensor, step: Callable[[], object] | None = None
) -> None:
    """Take a step if the gradient norm is finite; otherwise change neither weights nor state.

    Fused kernels decide that on the device; for others the host waits for the norm (PyTorch's own
    fused SGD leaves momentum uninitialised in a step that it skips). `step` is called in place of
    `optimizer.step`.
    """
    step = step or optimizer.step
    if not optimizer.param_groups[0]["params"]:
        return
    skips = isinstance(optimizer, OnShards) or "betas" in optimizer.defaults
    if optimizer.defaults.get("fused") and skips:
        # moved before the kernel reads it: if on the host, it does not wait for the device
        device = optimizer.param_groups[0]["params"][0].device
        patches.set_found_inf(optimizer, (~norm.isfinite()).float().to(device))
        step()
    elif bool(norm.isfinite()):
        step()
