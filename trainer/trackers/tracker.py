"""`Tracker`: the protocol of progress displays, and the values that they are given."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Record:
    """The values of one logged step. Rates and shares are over the steps since the last record."""

    step: int
    total_steps: int
    samples: int
    tokens: int
    """Label tokens since the start of the run."""
    loss: float
    """Nats per label token."""
    learning_rate: float
    gradient_norm: float | None
    tokens_per_second: float
    step_seconds: float
    mfu: float | None
    """The share of the device's peak FLOP/s, 0 to 1; None if the peak is not known."""
    memory_gib: float
    """Peak memory on this rank's device, in GiB."""
    data_wait: float
    """The share of the time spent waiting for data, 0 to 1."""
    eta_seconds: float
    loss_scale: float | None = None
    skipped: int | None = None
    """Steps skipped since the start of the run because a gradient was not finite."""
    by_source: dict[str, float] | None = None
    """The loss on each source's targets since the last record, if requested."""


@dataclass(frozen=True)
class Evaluation:
    """The held-out loss after `step` steps, in nats per target."""

    step: int
    loss: float
    targets: int
    accuracy: float | None = None
    """The share of the targets, classes or tokens, that have the highest score."""
    accuracy_top5: float | None = None
    """The share of the targets among the five highest scores; None with five classes or less."""
    perplexity: float | None = None
    """exp(loss), of a language model."""
    by_source: dict[str, float] | None = None
    """The loss on each of several named sources; `loss` is that on all of their targets
    together.
    """


class Tracker(Protocol):
    def record(self, record: Record, /) -> None: ...

    def evaluation(self, evaluation: Evaluation, /) -> None: ...

    def close(self) -> None: ...


def fields(item: Record | Evaluation) -> dict[str, Any]:
    """Return the known values of a record, by the names under which they are logged."""
    prefix = "evaluation_" if isinstance(item, Evaluation) else ""
    known = {
        key: value for key, value in asdict(item).items() if value is not None and key != "step"
    }
    named = {
        f"{prefix}loss/{name}": loss for name, loss in (known.pop("by_source", None) or {}).items()
    }
    return {"step": item.step} | {prefix + key: value for key, value in known.items()} | named


def numbers(item: Record | Evaluation) -> dict[str, float]:
    return {
        key: float(value)
        for key, value in fields(item).items()
        if key not in ("step", "total_steps")
    }
