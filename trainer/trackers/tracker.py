"""`Tracker`: the protocol of progress displays, and the values that they are given."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import ClassVar, Protocol


@dataclass(frozen=True)
class Logged:
    """The values that are logged after a step."""

    prefix: ClassVar[str] = ""
    """The beginning of the names under which they are logged."""
    step: int
    loss: float
    """Nats per label token, or per target."""
    by_source: dict[str, float] | None = field(default=None, kw_only=True)
    """The loss on each of several sources' targets, if requested; `loss` is that on all."""


@dataclass(frozen=True)
class Speed:
    """How fast a run is, over the steps since the last record."""

    tokens_per_second: float
    step_seconds: float
    mfu: float | None
    """The share of the device's peak FLOP/s, 0 to 1; None if the peak is not known."""
    data_wait: float
    """The share of the time spent waiting for data, 0 to 1."""
    eta_seconds: float


@dataclass(frozen=True)
class Record(Logged):
    """The values of one logged step."""

    total_steps: int
    samples: int
    tokens: int
    """Label tokens since the start of the run."""
    learning_rate: float
    gradient_norm: float | None
    speed: Speed
    memory_gib: float
    """Peak memory on this rank's device, in GiB."""
    loss_scale: float | None = None
    skipped: int | None = None
    """Steps skipped since the start of the run because a gradient was not finite."""
    metrics: dict[str, float] = field(default_factory=dict, kw_only=True)
    """A recipe's figures of the steps since the last record, by name."""


@dataclass(frozen=True)
class Evaluation(Logged):
    """The held-out loss after `step` steps."""

    prefix: ClassVar[str] = "evaluation_"
    targets: int
    accuracy: float | None = None
    """The share of the targets, classes or tokens, that have the highest score."""
    accuracy_top5: float | None = None
    """The share of the targets among the five highest scores; None with five classes or less."""
    perplexity: float | None = None
    """exp(loss), of a language model."""
    metrics: dict[str, float] = field(default_factory=dict, kw_only=True)
    """A script's metrics, a recipe's other measures, and scores on tasks of lm-eval, by name."""


MEASURES = ("accuracy", "accuracy_top5", "perplexity")
"""The measures that are fields of an evaluation; all others are metrics."""


@dataclass(frozen=True)
class Epoch(Logged):
    """The mean training loss of an epoch, which ended with step `step`."""

    prefix: ClassVar[str] = "epoch_"
    number: int
    """The epoch's number, from 1."""
    total: float
    """The epochs of the run."""


class Tracker(Protocol):
    def record(self, record: Record, /) -> None: ...

    def epoch(self, epoch: Epoch, /) -> None: ...

    def evaluation(self, evaluation: Evaluation, /) -> None: ...

    def close(self) -> None: ...


def fields(item: Logged) -> dict[str, float]:
    """Return the known values by the names under which they are logged."""
    values: dict[str, float | None] = {}
    for name, value in asdict(item).items():
        if name in ("metrics", "speed"):
            values |= value
        elif name not in ("step", "by_source"):
            values[name] = value
    values |= {f"loss/{name}": loss for name, loss in (item.by_source or {}).items()}
    known = {name: value for name, value in values.items() if value is not None}
    return {"step": item.step} | {item.prefix + name: value for name, value in known.items()}


_NO_NUMBERS = ("step", "total_steps", "epoch_total")


def numbers(item: Logged) -> dict[str, float]:
    """Return those values without the steps, for which services have an axis, and the total."""
    values = fields(item).items()
    return {name: float(value) for name, value in values if name not in _NO_NUMBERS}
