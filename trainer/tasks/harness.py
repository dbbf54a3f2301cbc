"""The tasks of lm-eval, the evaluation harness, on a trained model."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import torch

from trainer.config import TrainerSection
from trainer.errors import refused
from trainer.models.door import limited
from trainer.models.opened import opened_language_model
from trainer.storage import Json, required


def check_tasks(names: Sequence[str]) -> None:
    """Raise ConfigError without lm-eval, and for a task that can't be loaded with its data."""
    tasks = required("lm_eval.tasks", "tasks", "meshloom[evaluate]")
    with _refusals(names):
        tasks.TaskManager().load([*names])


def results(folder: Path, trust: bool, names: Sequence[str], **options: object) -> Json:
    """Return lm-eval's results of a folder's model on tasks, by name or path of a YAML file.

    `trust`: the model's own code may run. Raises ConfigError where lm-eval's `options` do not fit.
    """
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    class LimitedModel(HFLM):  # type: ignore[misc]
        """The model, whose chat template has the limits that it has in training."""

        def apply_chat_template(self, chat: object, *given: object, **options: object) -> str:
            render = partial(super().apply_chat_template, chat, *given, **options)
            return limited(render, chat, str(folder))

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    model = opened_language_model(folder, trust)
    with _refusals(names):
        judged = LimitedModel(model, tokenizer=str(folder), trust_remote_code=trust, batch_size=8)
        return simple_evaluate(judged, tasks=[*names], log_samples=False, **options)  # type: ignore[return-value]


def table(folder: Path, trust: bool, names: Sequence[str], **options: object) -> str:
    """Return lm-eval's table of its results; raises as `check_tasks` and `results` do."""
    check_tasks(names)
    from lm_eval.utils import make_table

    return str(make_table(results(folder, trust, names, **options)))


def scores(folder: Path, section: TrainerSection) -> dict[str, float]:
    """Return the scores of a folder's model on the config's tasks, by task and metric.

    Leaves random states as they are.
    """
    trust = section.model.trust_remote_code
    wanted = section.evaluation
    options = dict.fromkeys(("random_seed", "numpy_random_seed", "torch_random_seed"))
    options |= {"limit": wanted.samples, "bootstrap_iters": 0}  # no standard errors
    with torch.random.fork_rng():
        by_task = results(folder, trust, wanted.tasks, **options)
    return {
        f"{task}/{metric.removesuffix(',none')}": value
        for task, metrics in by_task["results"].items()
        for metric, value in metrics.items()
        if "," in metric and isinstance(value, float | int)
    }


def _refusals(names: Sequence[str]) -> AbstractContextManager[None]:
    """Refuse what tasks raise, which run code of their own, and fetch data."""
    expected = "tasks with their data, for this model"
    return refused(f"tasks {', '.join(names)}", expected, named=True)
