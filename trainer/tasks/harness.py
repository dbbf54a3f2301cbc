"""The tasks of lm-eval, the evaluation harness, on a trained model."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from trainer.errors import ConfigError, Problem, named_line
from trainer.models.opened import opened_language_model


def harness_tasks(names: Sequence[str]) -> list[Any]:
    """Load tasks by name or by the path of their YAML file, with their data.

    Raises ConfigError without lm-eval, and for a task that can't be loaded.
    """
    place = f"tasks {', '.join(names)}"
    if find_spec("lm_eval") is None:
        hint = "pip install 'meshloom[evaluate]'"
        raise ConfigError(Problem(place, "lm-eval is not installed", "it", hint))
    from lm_eval.tasks import TaskManager

    try:
        found: Any = TaskManager().load([*names])
    except Exception as error:  # tasks run code of their own, and fetch data
        expected = "tasks of lm-eval or paths of their YAML files, with their data"
        raise ConfigError(Problem(place, named_line(error), expected)) from error
    inner = {child for children in found["group_map"].values() for child in children}
    loaded = found["groups"] | found["tasks"]
    return [task for name, task in loaded.items() if name not in inner]


def results(model: Any, tokenizer: Any, tasks: list[Any], **options: Any) -> dict[str, Any]:
    """Return lm-eval's results for loaded tasks, with its options.

    Raises ConfigError where they do not fit the model.
    """
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    options |= {"task_manager": TaskManager(include_defaults=False), "log_samples": False}
    try:
        judged = HFLM(model, tokenizer=tokenizer, batch_size=8)
        return simple_evaluate(judged, tasks=tasks, **options)  # type: ignore[return-value]
    except Exception as error:
        raise ConfigError(Problem("lm-eval", named_line(error), "tasks for this model")) from error


def scores(
    folder: Path, tokenizer: Any, names: Sequence[str], limit: int, trust: bool
) -> dict[str, float]:
    """Return the scores of the model in `folder` by task and metric, from `limit` questions each.

    Leaves random states as they are. `trust`: the model's own code may run.
    """
    model = opened_language_model(folder, trust=trust)
    unseeded = dict.fromkeys(("random_seed", "numpy_random_seed", "torch_random_seed"))
    with torch.random.fork_rng():
        found = results(model, tokenizer, harness_tasks(names), limit=limit, **unseeded)
    return {
        f"{task}/{metric.removesuffix(',none')}": value
        for task, metrics in found["results"].items()
        for metric, value in metrics.items()
        if "," in metric and "_stderr," not in metric and isinstance(value, float | int)
    }
