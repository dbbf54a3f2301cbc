"""Is the model causal: does no token, and no padding in its place, change an earlier logit?"""

from __future__ import annotations

import torch
from torch import nn

from trainer.models.spec import ModelSpec
from trainer.probes.inputs import LENGTH, logits_of, sequence_of
from trainer.probes.probe import TOLERANCE, Finding
from trainer.probes.question import Probed, Question
from trainer.probes.questions.can_run import LANGUAGE


def _ask(about: Probed) -> Finding | None:
    small, model = about.tiny
    finding = _compare(model.eval(), small)
    if finding is None and not about.findings.draws.any:  # else the draws change the logits
        finding = _compare(model.train(), small)
    return finding


def _compare(model: nn.Module, spec: ModelSpec) -> Finding | None:
    """Change each token, and cut the sequence before each; compare the logits of those before."""
    ids = sequence_of(spec)
    changed = ids.repeat(2 * LENGTH, 1)
    for position in range(LENGTH):
        changed[position, position] = 1 + ids[position] % (spec.language.vocabulary - 1)
        changed[LENGTH + position, position:] = 0  # as collation pads
    logits = logits_of(model, torch.cat([ids[None], changed]))
    moved = (logits[1:] - logits[0]).abs().amax(-1)  # [2 x changed position, position]
    moved *= (torch.arange(LENGTH)[None] < torch.arange(LENGTH)[:, None]).repeat(2, 1)
    spread = float(logits[0].std(0).max())  # of one token's logit over the positions
    worst = float(moved.max())
    if worst <= TOLERANCE * spread:
        return None
    later, earlier = divmod(int(moved.nan_to_num(torch.inf).argmax()), LENGTH)
    tokens = f"token {later % LENGTH} moves the logits of token {earlier}"
    actual = f"not causal: {tokens} by {worst:.1e}; their spread is {spread:.1e}"
    hint = 'Set "is_decoder": true where the family has it, or take a decoder.'
    return Finding(actual, "a causal model", hint)


QUESTION = Question(
    name="whether it is causal",
    key="trainer.model",
    need=LANGUAGE,
    ask=_ask,
    holds=(
        "Changing a token, or ending the sequence before it, changes no earlier logit, at any "
        "position of sequences longer than the attention window"
    ),
    otherwise=(
        "error: BERT, RoBERTa, XLNet, CPM-Ant, and any model whose config lets attention look ahead"
    ),
    cost="0.01 s",
)
