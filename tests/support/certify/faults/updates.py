"""Faults of optimizers, schedules, clipping and overflows."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any
from unittest import mock

from tests.support.certify.faults.planting import around, in_groups, with_optimizer, with_step


def wrong_rate(engine: str) -> Any:
    return with_step(
        engine,
        lambda self, batches, update: (
            batches,
            replace(update, learning_rate=update.learning_rate * 0.9),
        ),
    )


def no_update(engine: str) -> Any:
    return with_step(
        engine, lambda self, batches, update: (batches, replace(update, learning_rate=0.0))
    )


def no_decay(engine: str) -> Any:
    return in_groups(engine, weight_decay=0.0)


def decayed_norms(engine: str) -> Any:
    return in_groups(engine, weight_decay=0.1)


def wrong_second_beta(engine: str) -> Any:
    return in_groups(engine, betas=(0.9, 0.99))


def no_bias_correction(engine: str) -> Any:
    def late(optimizer):
        for state in optimizer.state.values():
            state["step"].fill_(1e6)

    return with_optimizer(engine, late)


def schedule_a_step_early(engine: str) -> Any:
    from trainer.certify import recording

    early = lambda real, *args: lambda step: real(*args)(step + 1)  # noqa: E731
    return around(recording, "schedule_of", early)


def clipped_by_one_rank(engine: str) -> Any:
    """Each rank clips by the norm of its own shards, and reports that of all."""
    from trainer.parallel.gradients import GradientNorm

    def alone(real, self, limit):
        norm = real(self, 0.0)
        with mock.patch.object(type(self._mesh), "sum", lambda mesh, tensor, reduction: tensor):
            real(self, limit)
        return norm

    return around(GradientNorm, "clip", alone)


def masters_in_bfloat16(engine: str) -> Any:
    """Updates are lost in the rounding of the weights that they change."""
    from trainer.distributed.dtensor import local

    def rounded(self, batches, update):
        for module in self.modules:
            for parameter in module.parameters():
                own = local(parameter.detach())
                own.copy_(own.bfloat16())
        return batches, update

    return with_step(engine, rounded)


def schedule_wrong_after_step_10(engine: str) -> Any:
    from trainer.optim import lr_schedules

    def slower(*args, **params):
        real = lr_schedules.warmup(*args, **params)
        return lambda step: replace(
            real(step), learning_rate=real(step).learning_rate * (1 if step <= 10 else 0.99)
        )

    return mock.patch.dict(lr_schedules.SCHEDULES, WarmupLR=slower)


def never_clipped(engine: str) -> Any:
    from trainer.parallel.gradients import GradientNorm

    return around(GradientNorm, "clip", lambda real, self, limit: real(self, 0.0))


def scaled_up_to_the_limit(engine: str) -> Any:
    from trainer.parallel.gradients import GradientNorm

    def clip(real, self, limit):
        norm = real(self, 0.0)
        for parameter, _ in self._parameters:
            parameter.grad *= limit / norm
        return norm

    return around(GradientNorm, "clip", clip)


def overflow_applied(engine: str) -> Any:
    from trainer.engines.torch import engine as torch_engine

    return mock.patch.object(
        torch_engine, "step_if_finite", lambda optimizer, norm: optimizer.step()
    )


def overflow_applied_by_deepspeed(engine: str) -> Any:
    """Both of its checks are off: with either it leaves the step out by itself."""
    from deepspeed.runtime.zero import stage_1_and_2

    def change(self, batches, update):
        self._engine.optimizer.check_grad_overflow = False
        return batches, update

    stack = contextlib.ExitStack()
    stack.enter_context(
        mock.patch.object(stage_1_and_2, "is_invalid_grad_norm", lambda norm: False)
    )
    stack.enter_context(with_step(engine, change))
    return stack


def shards_orthogonalised(engine: str) -> Any:
    """Each rank orthogonalises its own rows, in place of the whole matrix."""
    from trainer.optim.muon import LOW, Muon

    def updates(self, parameters, directions):
        return [self._orthogonal(d.to(LOW)) if d.numel() else d for d in directions]

    return mock.patch.object(Muon, "_updates", updates)
