"""Are the logits the product of the head and the last hidden state, and nothing else?

`trainer/models/language/head.py` runs the model's own forward on the meta device when the model is
opened, since the task is made by the answer.
"""

from __future__ import annotations

from trainer.probes.probe import Finding
from trainer.probes.question import Probed, Question
from trainer.probes.questions.can_run import LANGUAGE


def _ask(about: Probed) -> Finding | None:
    if about.spec.language.head.plain:
        return None
    more = "a soft cap, a scale, a bias of the logits"
    return Finding(f"its logits are more than the product of its head and hidden state ({more})")


QUESTION = Question(
    name="whether its head is plain",
    key="trainer.model",
    need=LANGUAGE,
    ask=_ask,
    holds="The logits are the product of the head and the last hidden state, and nothing else",
    otherwise="the model's own code computes all logits of a micro-batch at once: more memory",
    cost="0.01 s",
    elsewhere=True,
)
