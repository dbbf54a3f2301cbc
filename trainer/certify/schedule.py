"""The learning-rate schedule of the run itself, step by step, without training."""

from __future__ import annotations

import torch

from trainer.certify.comparison import TOLERANCES, Finding
from trainer.certify.reference import scheduler_of
from trainer.config import Config
from trainer.optim.lr_schedules import schedule_of

MOST_STEPS = 200_000
"""The most steps that are compared, in a few seconds."""


def compare_schedule(own: Config, steps: int) -> Finding:
    """Compare the optimizer settings of each step of the run with DeepSpeed's scheduler."""
    base, scheduler = float(own.optimizer.params["lr"]), own.scheduler
    ours = schedule_of(vars(own.optimizer), None if scheduler is None else vars(scheduler))
    optimizer = torch.optim.AdamW([torch.zeros(1)], lr=base)
    theirs = scheduler_of(optimizer, own)
    worst = Finding("schedule", 0, 0.0, TOLERANCES["schedule"], f"(the first {steps:,} steps)", 0)
    for step in range(min(steps, MOST_STEPS)):
        update, [group] = ours(step), optimizer.param_groups
        found = [(update.learning_rate, group["lr"])]
        if update.betas is not None and theirs is not None:
            found += zip(update.betas, group["betas"], strict=True)
        for mine, expected in found:
            error = abs(mine - expected) / max(abs(expected), 1e-6 * base, 1e-30)
            if not error <= worst.error:
                worst = Finding("schedule", step, error, worst.tolerance, f"({mine:.6g} in place of {expected:.6g})", 0)
        if not worst.passed:
            return worst
        if theirs is not None:
            theirs.step()
    return worst
