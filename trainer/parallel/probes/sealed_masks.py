"""Does the model compute the same if our attention reads its masks, and nothing else does?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from trainer.probes.probe import Finding
from trainer.probes.question import Need, Probed, Question
from trainer.tasks.attention import Attention


@runtime_checkable
class Attends(Protocol):
    """A task that tries its model's attention on a tiny copy (`trainer/tasks/kernel_probes.py`)."""

    attention: Callable[[], Attention]


def _ask(about: Probed) -> Finding | None:
    assert isinstance(about.task, Attends)
    refusal = about.task.attention().refusal
    return Finding(refusal) if refusal else None


def _masked(about: Probed) -> bool:
    return about.packed or about.layout.context > 1


QUESTION = Question(
    name="whether our attention can replace its own",
    key="trainer.data.documents",
    need=Need(
        "packed or isolated documents, windows and `sequence_parallel_size`, on GPUs",
        lambda about: _masked(about) and isinstance(about.task, Attends),
        lambda about: about.under(packed=True) if isinstance(about.task, Attends) else None,
    ),
    ask=_ask,
    holds="With masks that only our attention can read, a tiny copy has the same logits",
    otherwise="a note: masks of sequence x sequence in place of fast kernels",
    cost="0.05 s",
    elsewhere=True,
)
