"""What a layout takes in memory and says to others: as it is planned, and as it is."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import torch

from tests.training import Case, allow_float16, layout_of, spec_in, task_of
from tests.warm import PRELOADED

LENGTH = 32


def subject(case: Case) -> Any:
    from trainer.engines import ENGINES
    from trainer.models.spec import NoWeights
    from trainer.optim.decay import spared
    from trainer.optim.lr_schedules import Update
    from trainer.planner.simulate import Subject

    def batch(count: int) -> dict[str, torch.Tensor]:
        ids = torch.zeros(count, LENGTH, dtype=torch.int64)
        return {"input_ids": ids, "targets": torch.ones_like(ids)}

    allow_float16(case)
    # a base of made-up values would be held beside the model's own
    spec, layout = replace(spec_in(case), weights=NoWeights()), layout_of(case)
    return Subject(
        layout=layout,
        engine_name=case.engine,
        engine=ENGINES[case.engine],
        spec=spec,
        task=task_of(spec, case),
        deepspeed=case.deepspeed(),
        undecayed=spared(case.weight_decay_excludes, spec),
        schedule=lambda step: Update(1e-2),
        batch=batch,
    )


@dataclass(frozen=True)
class Told:
    """Of one rank."""

    peaks: dict[str, Any]
    """By phase."""
    messages: list[Any]
    copied: int
    """Bytes that a save in the background copies."""


def measured(case: Case) -> Told:
    """What this rank takes and says. Runs on each rank of a pool."""
    import torch.distributed as dist

    from trainer.distributed.ranks import Ranks
    from trainer.engines import Machine
    from trainer.planner.messages import Messages
    from trainer.planner.simulate import recorded

    rank = dist.get_rank()
    machine = Machine(torch.device("cpu"), Ranks(rank, case.world_size), case.world_size)
    messages = Messages(rank)
    with messages:
        ledger, copied = recorded(subject(case), machine, lambda phase: setattr(messages, "phase", phase))
    return Told({peak.phase: peak for peak in ledger.peaks()}, messages.found, copied)


def planned(case: Case, *ranks: int) -> list[Told]:
    """The same of each of these ranks, as it is planned."""
    from trainer.planner.simulate import simulate_all

    for name in PRELOADED:  # once, and not in each process that pretends to be a rank
        import_module(name)
    traces = simulate_all([(subject(case), rank) for rank in ranks], case.world_size)
    return [Told({peak.phase: peak for peak in t.peaks}, list(t.messages), t.copied) for t in traces]
