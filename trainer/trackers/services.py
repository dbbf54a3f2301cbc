"""Trackers of other projects: TensorBoard, MLflow and Weights & Biases, on request.

Accelerate's are not used: its MLflow run is the global one of the process, which may be a script's.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

from trainer.errors import ConfigError, Problem, first_line
from trainer.trackers.tracker import Logged, Tracker, numbers


class TensorBoard:
    """Writes event files for `tensorboard --logdir FOLDER`."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder))

    def record(self, item: Logged, /) -> None:
        for key, value in numbers(item).items():
            self._writer.add_scalar(key, value, item.step)

    evaluation = record

    def close(self) -> None:
        self._writer.close()


class MLflow:
    """Writes a run `name` to `FOLDER/mlflow.db`, or to the server that MLflow is configured for."""

    def __init__(self, folder: Path, name: str) -> None:
        import mlflow
        from mlflow import MlflowClient
        from mlflow.entities import Metric

        for chatty in ("mlflow.store.db.utils", "alembic"):
            logging.getLogger(chatty).setLevel(logging.WARNING)
        local = f"sqlite:///{folder.absolute() / 'mlflow.db'}"
        self._metric = Metric
        self._client = MlflowClient(None if mlflow.is_tracking_uri_set() else local)
        found = self._client.get_experiment_by_name(_EXPERIMENT)
        experiment = found.experiment_id if found else self._client.create_experiment(_EXPERIMENT)
        self._run = self._client.create_run(experiment, run_name=name).info.run_id

    def record(self, item: Logged, /) -> None:
        now = round(time.time() * 1000)
        metrics = [self._metric(key, value, now, item.step) for key, value in numbers(item).items()]
        self._client.log_batch(self._run, metrics=metrics)

    evaluation = record

    def close(self) -> None:
        self._client.set_terminated(self._run)


class WeightsAndBiases:
    """Logs a run `name` where `wandb login` says; if `WANDB_MODE=offline`, in `FOLDER/wandb`."""

    def __init__(self, folder: Path, name: str) -> None:
        import wandb

        # neither the console nor the config: both may hold what the user does not want to send
        settings = wandb.Settings(console="off", silent=True, disable_git=True, disable_code=True)
        try:
            self._run = wandb.init(
                project=_EXPERIMENT, name=name, dir=str(folder), settings=settings
            )
        except wandb.Error as error:  # a bad key, or a server that does not answer
            actual, expected = first_line(error), "a login that its server takes"
            hint = "WANDB_MODE=offline keeps it on this disk"
            raise ConfigError(Problem("wandb", actual, expected, hint)) from error
        # its own counter can't go back to an earlier step
        self._run.define_metric("*", step_metric="step")

    def record(self, item: Logged, /) -> None:
        self._run.log({"step": item.step, **numbers(item)})

    evaluation = record

    def close(self) -> None:
        self._run.finish()


TRACKERS: dict[str, Callable[[Path], Tracker]] = {
    "tensorboard": lambda run_folder: TensorBoard(run_folder / "tensorboard"),
    "mlflow": lambda run_folder: MLflow(run_folder, run_folder.name),
    "wandb": lambda run_folder: WeightsAndBiases(run_folder, run_folder.name),
}
"""The trackers that `trainer.log.trackers` may name; each is also the extra that installs it."""

_PACKAGES = {
    "tensorboard": ("tensorboard",),
    "mlflow": ("mlflow", "sqlalchemy", "alembic"),
    "wandb": ("wandb",),
}
_EXPERIMENT = "meshloom"


def require(names: Sequence[str]) -> None:
    """Raise ConfigError if the package of a tracker is not installed, or wandb has no login."""
    for name in names:
        missing = [package for package in _PACKAGES[name] if find_spec(package) is None]
        if missing:
            actual = f'"{name}" without the package {missing[0]}'
            raise _unusable(actual, "trackers that are installed", f"pip install meshloom[{name}]")
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
        return (
            settings.mode in ("offline", "disabled")
            or bool(settings.api_key)
            or wandb.login(prompt=False)
        )
    except (TypeError, wandb.Error):
        return True
