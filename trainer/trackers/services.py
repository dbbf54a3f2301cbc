"""Trackers of other projects, on request: Accelerate's, and MLflow.

Accelerate's MLflow is not used: its run is the global one of the process, which may be a script's.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial, partialmethod
from pathlib import Path

from trainer.errors import ConfigError, Problem, named_line, refused
from trainer.plugins import NAMED
from trainer.storage import installed
from trainer.trackers import patches
from trainer.trackers.tracker import Logged, Tracker, numbers

_PACKAGES = {"mlflow": ("mlflow", "sqlalchemy", "alembic")}
_PROJECT = "meshloom"


class Service:
    """A tracker of Accelerate's: a run, named as its folder, of a project."""

    def __init__(self, name: str, folder: Path) -> None:
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS

        path = str(folder)
        run = folder.name
        # neither the console nor the code: both may hold what the user does not want to send
        off = {"console": "off", "silent": True, "disable_git": True, "disable_code": True}
        options: dict[str, dict[str, object]] = {
            "aim": {"run_name": run, "logging_dir": path, "capture_terminal_logs": False},
            "clearml": {"task_name": run, "auto_connect_streams": False},
            "dvclive": {"dir": f"{path}/dvclive"},
            "swanlab": {"experiment_name": run, "logdir": f"{path}/swanlog"},
            "tensorboard": {"run_name": "tensorboard", "logging_dir": path},
            "trackio": {"name": run},
            "wandb": {"name": run, "dir": path, "settings": off},
        }
        kind = patches.without_state(LOGGER_TYPE_TO_CLASS[name])
        self._tracker = kind(**{"run_name": _PROJECT, **options.get(name, {})})
        self._tracker.start()

    def record(self, item: Logged, /) -> None:
        self._tracker.log(numbers(item), step=item.step)

    epoch = record
    evaluation = record

    def close(self) -> None:
        self._tracker.finish()


class MLflow:
    """Writes a run to `FOLDER/mlflow.db`, or to the server that MLflow is configured for."""

    def __init__(self, folder: Path) -> None:
        import mlflow
        from mlflow import MlflowClient
        from mlflow.entities import Metric

        for chatty in ("mlflow.store.db.utils", "alembic"):
            logging.getLogger(chatty).setLevel(logging.WARNING)
        local = f"sqlite:///{folder.absolute() / 'mlflow.db'}"
        self._metric = Metric
        self._client = MlflowClient(None if mlflow.is_tracking_uri_set() else local)
        known = self._client.get_experiment_by_name(_PROJECT)
        experiment = known.experiment_id if known else self._client.create_experiment(_PROJECT)
        self._run = self._client.create_run(experiment, run_name=folder.name).info.run_id

    def record(self, item: Logged, /) -> None:
        now = round(time.time() * 1000)
        metrics = [self._metric(key, value, now, item.step) for key, value in numbers(item).items()]
        self._client.log_batch(self._run, metrics=metrics)

    epoch = record
    evaluation = record

    def close(self) -> None:
        self._client.set_terminated(self._run)


class Opened:
    """A tracker that `trainer.log.trackers` names. Raises ConfigError if it can't be opened.

    The run continues without one that fails later, which `say` is told.
    """

    def __init__(self, name: str, folder: Path, say: Callable[[str], None]) -> None:
        self._name = name
        self._say = say
        self._works = True
        known = MLflow if name == "mlflow" else partial(Service, name)
        make = NAMED["tracker"].get(name) or known
        hint = "WANDB_MODE=offline keeps it on this disk" if name == "wandb" else ""
        # a bad key, or a server that does not answer
        with refused(name, "a login that its server accepts", hint=hint):
            self._tracker: Tracker = make(folder)

    def _call(self, method: str, *items: Logged) -> None:
        try:
            if self._works:
                getattr(self._tracker, method)(*items)
        except Exception as error:  # whatever its package raises
            self._works = False
            self._say(f"note: the run continues without {self._name}: {named_line(error)}")

    def epoch(self, item: Logged, /) -> None:
        """Hand on an epoch, if the tracker of a plug-in takes epochs."""
        if hasattr(self._tracker, "epoch"):
            self._call("epoch", item)

    record = partialmethod(_call, "record")
    evaluation = partialmethod(_call, "evaluation")
    close = partialmethod(_call, "close")


def require(names: Sequence[str]) -> None:
    """Raise ConfigError if the package of a tracker is not installed, or wandb has no login."""
    for name in names:
        packages = () if name in NAMED["tracker"] else _PACKAGES.get(name, (name,))
        for package in packages:
            if not installed(package):
                actual = f'"{name}" without the package {package}'
                raise _unusable(actual, "trackers that are installed", f"pip install {package}")
        if name == "wandb" and not _logged_in():
            hint = "Run `wandb login`, or set WANDB_MODE=offline to keep it on this disk"
            raise _unusable('"wandb" without a login', "a login, or WANDB_API_KEY", hint)


def _unusable(actual: str, expected: str, hint: str) -> ConfigError:
    return ConfigError(Problem("trainer.log.trackers", actual, expected, hint))


def _logged_in() -> bool:
    """Return True if logged in, or nothing is sent; also with an old package, or a bad key."""
    import wandb

    settings = wandb.setup().settings
    try:
        known = settings.mode in ("offline", "disabled") or bool(settings.api_key)
        return known or wandb.login(prompt=False)
    except (TypeError, wandb.Error):
        return True
