"""Faults of experts and their routers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

from tests.support.certify.faults.planting import around


def experts_divided_by_their_own_ranks(engine: str) -> Any:
    from torch.distributed.fsdp import FSDPModule

    return mock.patch.object(FSDPModule, "set_gradient_divide_factor", lambda self, factor: None)


def replicas_of_experts_left_out(engine: str) -> Any:
    from trainer.parallel.splits import expert_ranks

    def alone(real, module, mesh, **options):
        real(module, mesh=mesh["expert_shard"], **options)

    return around(expert_ranks, "fully_shard", alone)


def rows_of_the_next_expert(engine: str) -> Any:
    """In the run alone: a trial's parameters are no DTensors."""
    from torch.distributed.tensor import DTensor

    from trainer.parallel import patches

    def rolled(real, tensor):
        return real(tensor).roll(1, 0) if isinstance(tensor, DTensor) else real(tensor)

    return around(patches, "local", rolled)


def with_loads(change: Callable[..., Any]) -> Any:
    """`change(norm, skipped)` gives what the biases of routers are moved after."""
    from trainer.parallel.splits.expert_loads import ExpertLoads

    return around(ExpertLoads, "move", lambda real, self, *given: real(self, *change(*given)))


def loads_of_one_rank(engine: str) -> Any:
    from trainer.parallel.splits import expert_loads

    return around(expert_loads, "holders_of", lambda real, mesh: (None, real(mesh)[1]))


def padding_in_the_loads(engine: str) -> Any:
    from trainer.recipes.causal_lm.task import CausalLM

    return around(CausalLM, "real", lambda real, self, batch: real(self, batch).fill_(1))


def biases_moved_by_an_overflow(engine: str) -> Any:
    return with_loads(lambda norm, skipped: (norm.nan_to_num(1.0, 1.0), False))
