"""The subject of your own module: the module, its loss, and a data set of pairs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from trainer.data.dataset import Pairs, pairs_of
from trainer.errors import ConfigError, Problem
from trainer.models.own import module
from trainer.plugins import NAMED
from trainer.probes.dispatch_modes import Alone
from trainer.recipe import RunContext, Subject
from trainer.tasks.supervised import Supervised


@dataclass(frozen=True)
class ModuleSubject(Subject):
    """Your own module on pairs, with its own loss."""

    data: Pairs
    unit: ClassVar[str] = "tok"
    units: ClassVar[str] = "tokens"

    def lines(self, workers: int) -> Iterator[str]:
        yield from (f"note    data: {note}" for note in self.data.notes)


def open_module(context: RunContext) -> ModuleSubject:
    """Open your own module on your own data. Raises ConfigError. Collective."""
    section = context.section
    handed_in = context.handed_in
    ranks = context.ranks
    if handed_in.model is None or handed_in.data is None or handed_in.loss is None:
        expected = 'a model, data and a loss, or metrics of the task "image_classification" alone'
        raise ConfigError(Problem("train", "not all of what is trained", expected))
    named = {
        "trainer.model.name_or_path": section.model.name_or_path,
        "trainer.model.config": section.model.config,
        "trainer.data.path": section.data.path,
        "trainer.evaluation.tasks": section.evaluation.tasks or None,
    }
    for key, value in named.items():
        if value is not None and section.task not in NAMED["task"]:
            expected = "nothing: the model and the data are handed in"
            raise ConfigError(Problem(key, str(value), expected))
    fraction = section.data.evaluation_fraction
    data = pairs_of(handed_in.data, handed_in.evaluation_data, fraction)
    spec = module.spec_of(handed_in.model, handed_in.blocks, section.seed)
    task = Supervised(handed_in.loss, spec.build, spec.blocks)
    first = context.first_samples(data.train)
    # an error in them is reported once
    ranks.try_on_first(Alone()(lambda: task.measuring(handed_in.metrics, first)))
    task = task.measuring(handed_in.metrics, first)
    return ModuleSubject(spec.tried_on(task.trial(first)), task, data)
