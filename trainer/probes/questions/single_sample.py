"""Can batch norm take its statistics of a single sample?"""

from __future__ import annotations

from trainer.probes.probe import Finding, tiny
from trainer.probes.question import Need, Probed, Question


def _ask(about: Probed) -> Finding | None:
    """Train on one sample: it needs several positions to average over."""
    small, model = tiny(about.trained)
    assert small.tiny.input is not None
    try:
        about.task.loss_sum(model.train(), small.tiny.input.batches[1])
    except ValueError as error:
        single = "a micro-batch of 1 sample, of which batch norm"
        name = about.findings.normalises
        return Finding(f"{single} ({name}, ...) can take no statistics: {error}")
    return None


QUESTION = Question(
    name="whether batch norm takes one sample",
    key="train_micro_batch_size_per_gpu",
    expected="at least 2 samples",
    need=Need(
        "`train_micro_batch_size_per_gpu` of 1, with batch norm",
        lambda about: bool(about.findings.normalises) and about.layout.micro_batch == 1,
        lambda about: about.under(micro_batch=1) if about.findings.normalises else None,
    ),
    ask=_ask,
    holds="Batch norm can take its statistics of one sample",
    otherwise="error: one position of one sample has no variance",
    cost="a step",
)
