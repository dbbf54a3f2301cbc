"""Does padding move the logits of the tokens before it?"""

from __future__ import annotations

from trainer.probes.inputs import LENGTH, WIDER, logits_of, sequence_of
from trainer.probes.probe import TOLERANCE
from trainer.probes.question import Probed, Question
from trainer.probes.questions.can_run import LANGUAGE


def _ask(about: Probed) -> None:
    """Note it if the beginning of a sequence has other logits alone than in it.

    Models that select by rank do this: how a tie is broken depends on the width. Repeated tokens
    make ties.
    """
    small, model = about.tiny
    model.eval()
    ids = sequence_of(small)[: WIDER // 2].repeat(2)[None]
    logits = logits_of(model, ids)
    moved = {
        length: float((logits_of(model, ids[:, :length]) - logits[:, :length]).abs().max())
        for length in range(LENGTH - 4, WIDER, 4)
    }
    worst = max(moved, key=lambda length: moved[length])
    spread = float(logits[0].std(0).max())
    if not moved[worst] <= TOLERANCE * spread:
        about.learn(
            f"padding moves its logits: on a tiny copy, those of {worst} tokens in a row of "
            f"{WIDER} by {moved[worst]:.1e}; their spread is {spread:.1e}. Its loss depends on "
            "which samples share a micro-batch"
        )


QUESTION = Question(
    name="whether padding moves its logits",
    key="trainer.model",
    need=LANGUAGE,
    ask=_ask,
    holds="The beginning of a sequence has the same logits alone and with more tokens behind it",
    otherwise="a note: the loss depends on which samples share a micro-batch",
    cost="0.01 s",
)
