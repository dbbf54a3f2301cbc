"""Faults of dropout and its seeds."""

from __future__ import annotations

from typing import Any
from unittest import mock

from tests.support.certify.faults.planting import around


def seeded(**fixed: int) -> Any:
    from trainer.engines import normalise

    def same(real, seed, step, data_rank):
        return real(seed, fixed.get("step", step), fixed.get("data_rank", data_rank))

    return around(normalise, "step_seed", same)


def same_dropout_on_all_ranks(engine: str) -> Any:
    return seeded(data_rank=0)


def same_dropout_in_each_step(engine: str) -> Any:
    return seeded(step=0)


def same_dropout_in_each_micro_batch(engine: str) -> Any:
    from trainer.parallel.forward_backward import Dropout

    return around(Dropout, "start", lambda real, self, seed, micro_batch: real(self, seed, 0))


def dropout_while_evaluating(engine: str) -> Any:
    import torch

    from trainer.parallel.forward_backward import GradientAccumulation

    evaluating = torch.nn.Module.eval

    def eval_but_dropout(module):
        for inner in evaluating(module).modules():
            inner.training = isinstance(inner, torch.nn.Dropout)
        return module

    def training(real, self, batches):
        with mock.patch.object(torch.nn.Module, "eval", eval_but_dropout):
            return real(self, batches)

    return around(GradientAccumulation, "evaluate", training)
