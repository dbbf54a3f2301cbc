"""Is the loss that of the model's own `forward(labels=...)`, and does padding move no score?"""

from __future__ import annotations

import torch
from torch import nn

from trainer.models.spec import ModelSpec
from trainer.probes.probe import TOLERANCE, Finding, observe, own_loss_difference, probe
from trainer.recipes.labels.kinds import LabelKind
from trainer.recipes.labels.model import LENGTHS, made_up, task_of

EXPECTED = "a model whose own head is trained as transformers does"


def check_own_loss(spec: ModelSpec, kind: LabelKind) -> None:
    """Raise ConfigError, with the numbers, if either does not hold on a tiny copy.

    Rewards have no loss in transformers.
    """

    def compare(own: nn.Module, ours: nn.Module, small: ModelSpec) -> Finding | None:
        finding = _padding(own.eval(), small, kind)
        if finding is not None or kind.name == "reward":
            return finding
        task = task_of(small, kind)
        batch = task.collate(made_up(kind, LENGTHS, small.language.vocabulary))
        names = ("input_ids", "attention_mask", "labels")
        return own_loss_difference(
            own.train(),
            ours.train(),
            lambda: own(**{name: batch[name] for name in names}).loss * batch["count"],
            lambda: task.loss_sum(ours, batch),
        )

    finding = observe(lambda: probe(spec, lambda model, small: model, compare))
    if finding is not None:
        place = f"trainer.model: {spec.name}"
        raise finding.error(place, EXPECTED, start="a tiny copy of it does not run: ")


def _padding(model: nn.Module, small: ModelSpec, kind: LabelKind) -> Finding | None:
    """Compare the scores of sequences in a padded micro-batch with those of each alone."""
    task = task_of(small, kind)
    samples = made_up(kind, LENGTHS, small.language.vocabulary)
    with torch.no_grad():
        together = task.logits(model, task.collate(samples)).float()
        spread = float(together.std())
        for number, sample in enumerate(samples):
            alone = task.logits(model, task.collate([sample])).float()
            rows = len(alone)
            own = together[number * rows : (number + 1) * rows]
            if kind.name == "tokens":
                own = own[:, : alone.shape[1]]
            elif rows > 1:
                continue  # of two answers, one may be padded alone, too
            moved = float((own - alone).abs().max())
            if not moved <= 10 * TOLERANCE * spread:
                length = len(task.kind.sequences(sample)[0])
                actual = f"padding moves the score of {length} tokens by {moved:.1e}"
                return Finding(f"{actual}; the spread of scores is {spread:.1e}")
    return None
