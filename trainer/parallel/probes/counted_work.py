"""Can the work of attention in each block be counted, so that stages are of equal work?"""

from __future__ import annotations

from trainer.errors import Raised
from trainer.parallel.partition import counted
from trainer.probes.probe import Finding, tiny_spec
from trainer.probes.question import Need, Probed, Question


def _ask(about: Probed) -> Finding | None:
    result = counted(tiny_spec(about.trained))
    if not isinstance(result, Raised):
        return None
    return Finding(f"its forward pass does not run without values ({result.reason:.80})")


def _attends(about: Probed) -> bool:
    return about.is_language and about.spec.language.attention.width > 0


QUESTION = Question(
    name="whether its work can be counted",
    key="pipeline.partition",
    need=Need(
        "`pipeline.partition` `best`",
        lambda about: (
            about.layout.pipeline > 1
            and about.layout.schedule.partition == "best"
            and _attends(about)
        ),
        lambda about: about.under(pipeline=2) if _attends(about) else None,
    ),
    ask=_ask,
    holds="A forward pass runs on tensors without values, whose FLOPs PyTorch counts by block",
    otherwise="stages are divided by their parameters alone, as if attention took no time",
    cost="0.05 s",
    elsewhere=True,
)
