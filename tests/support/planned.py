"""The memory and the messages of a layout, planned and real."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from tests.support.training import Case, allow_float16, layout_of, spec_in, task_of
from tests.support.warm import PRELOADED

LENGTH = 32


def subject(case: Case) -> Any:
    """Return the subject of a tiny language model."""
    from trainer.models.spec import NoWeights

    def batch(count: int) -> dict[str, torch.Tensor]:
        ids = torch.zeros(count, LENGTH, dtype=torch.int64)
        return {"input_ids": ids, "targets": torch.ones_like(ids)}

    allow_float16(case)
    # a base of made-up values would be held beside the model's own
    spec = spec_in(case).with_weights(NoWeights())
    return subject_of(case, layout_of(case), spec, task_of(spec, case), batch)


def subject_of(
    case: Case, layout: Any, spec: Any, task: Any, batch: Callable[[int], dict[str, torch.Tensor]]
) -> Any:
    from trainer.engines import ENGINES
    from trainer.optim.decay import spared
    from trainer.optim.lr_schedules import Update
    from trainer.tools.planner.simulate import SampleCost, Workload

    return Workload(
        layout=layout,
        engine_name=case.engine,
        engine=ENGINES[case.engine],
        spec=spec,
        task=task,
        deepspeed=case.deepspeed(),
        undecayed=spared(case.weight_decay_excludes, spec),
        schedule=lambda step: Update(1e-2),
        sample=SampleCost("samples", 1, "", 0.0, 0),
        batch=batch,
    )


@dataclass(frozen=True)
class Usage:
    """The memory and messages of one rank."""

    peaks: dict[str, Any]
    """Bytes by phase."""
    messages: list[Any]
    copied: int
    """Bytes that a save in the background copies."""


def measured(case: Case, of: Callable[[Case], Any] = subject) -> Usage:
    """Measure memory and messages of this rank. Runs on each rank of a pool."""
    import torch.distributed as dist

    from trainer.distributed.ranks import Ranks
    from trainer.engines import Machine
    from trainer.tools.planner.fakes.messages import Messages
    from trainer.tools.planner.simulate import recorded

    class Unrecorded(Ranks):
        """Ranks whose trials on tiny copies, which keep made-up values, are not recorded."""

        def on_first(self, work: Callable[[], Any]) -> Any:
            def unrecorded() -> Any:
                with _disable_current_modes():
                    return work()

            return super().on_first(unrecorded)

    rank = dist.get_rank()
    machine = Machine(torch.device("cpu"), Unrecorded(rank, case.world_size), case.world_size)
    messages = Messages(rank)
    with messages:
        ledger, copied = recorded(of(case), machine, messages.begin)
    return Usage({peak.phase: peak for peak in ledger.peaks()}, messages.found, copied)


def planned(case: Case, *ranks: int, of: Callable[[Case], Any] = subject) -> list[Usage]:
    """Plan the same for each of these ranks."""
    from trainer.tools.planner.simulate import simulate_all

    for name in PRELOADED:  # once, and not in each process that pretends to be a rank
        import_module(name)
    traces = simulate_all([(of(case), rank) for rank in ranks], case.world_size)
    return [
        Usage({peak.phase: peak for peak in t.peaks}, list(t.messages), t.copied) for t in traces
    ]


def assert_as_planned(pools: Any, case: Case, of: Callable[[Case], Any] = subject) -> None:
    """Assert that first and last rank take and send in each phase what was planned."""
    ranks = sorted({0, case.world_size - 1})
    plans = planned(case, *ranks, of=of)
    for _ in range(3):  # the least is meant: gloo may hold on to what it has sent a moment longer
        real = pools[case.world_size].run(measured, case=case, of=of)
        off = [
            (rank, phase, ours, theirs)
            for rank, plan in zip(ranks, plans, strict=True)
            for phase, (least, most) in bounds(case).items()
            if not least
            <= (ours := plan.peaks[phase]).size / (theirs := real[rank].peaks[phase]).size - 1
            <= most
        ]
        if not off:
            break
    assert not off, off[0]
    for rank, plan in zip(ranks, plans, strict=True):
        # of what two stages both have, either one may keep the copy
        assert plan.copied == real[rank].copied or case.pipeline > 1
        messages, sent = (
            [
                (message.name, message.group, message.size, message.dtype)
                for message in reported.messages
                if message.phase == "step 2" and message.dtype.is_floating_point
            ]
            for reported in (plan, real[rank])
        )
        assert messages == sent


def bounds(case: Case) -> dict[str, tuple[float, float]]:
    """By phase, how far a plan may be below and above what is measured."""
    # hidden states that a pretended pipeline's sends hold on to, in a model this small
    most = 0.05 if case.pipeline > 1 else 0.03
    # what a step leaves behind goes soon after; an evaluation, which takes far less, may see it or
    # not
    results = {"step 1": (-0.001, most), "step 2": (-0.001, most), "evaluation": (-0.1, most)}
    # the list of what there is to save goes from stage to stage as a pickle, which is no tensor of
    # the planner's
    return results if case.pipeline > 1 else results | {"save": (-0.03, 0.03)}


LLAMA = dict(model_type="llama", tie_word_embeddings=False)


LLAMA_8B = LLAMA | dict(
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    vocab_size=128256,
    max_position_embeddings=8192,
    rope_theta=500000.0,
)
