"""Do a word's vector and logits come from its own row of table and head?

`trainer/models/language/head.py` runs both with small matrices, whole and in parts, when the model
is opened.
"""

from __future__ import annotations

from trainer.probes.probe import Finding
from trainer.probes.question import Need, Probed, Question


def _ask(about: Probed) -> Finding | None:
    if about.spec.language.head.word_by_word:
        return None
    return Finding("its table or head does more than look rows up and multiply by them")


QUESTION = Question(
    name="whether its vocabulary can be split",
    key="tensor_parallel.autotp_size",
    need=Need(
        "`tensor_parallel.autotp_size`",
        lambda about: about.layout.tensor > 1 and about.is_language,
        lambda about: about.under(tensor=2) if about.is_language else None,
    ),
    ask=_ask,
    holds="Each word's vector and logits come from its own row of table and head",
    otherwise="each tensor rank has the whole table and head, and computes the whole loss",
    cost="0.01 s",
    elsewhere=True,
)
