"""Are the logits the head's product alone, and does each word have its own row of table and head?

`trainer/models/language/head.py` runs the model's own code for both when the model is opened, since
its task is made by the answers.
"""

from __future__ import annotations

from trainer.probes.probe import Finding
from trainer.probes.question import Need, Probed, Question
from trainer.probes.questions.can_run import LANGUAGE


def _ask_plain(about: Probed) -> Finding | None:
    if about.spec.language.head.plain:
        return None
    return Finding("its logits are more than its head's product, as with a soft cap or a scale")


def _ask_words(about: Probed) -> Finding | None:
    if about.spec.language.head.word_by_word:
        return None
    return Finding("its table or head does more than look rows up and multiply by them")


PLAIN = Question(
    name="whether its head is plain",
    key="trainer.model",
    need=LANGUAGE,
    ask=_ask_plain,
    holds="The logits are the product of the head and the last hidden state, and nothing else",
    otherwise="the model's own code computes all logits of a micro-batch at once: more memory",
    cost="0.01 s",
    elsewhere=True,
)
WORD_BY_WORD = Question(
    name="whether its vocabulary can be split",
    key="tensor_parallel.autotp_size",
    need=Need(
        "`tensor_parallel.autotp_size`",
        lambda about: about.layout.tensor > 1 and about.is_language,
        lambda about: about.under(tensor=2) if about.is_language else None,
    ),
    ask=_ask_words,
    holds="Each word's vector and logits come from its own row of table and head",
    otherwise="each tensor rank has the whole table and head, and computes the whole loss",
    cost="0.01 s",
    elsewhere=True,
)
