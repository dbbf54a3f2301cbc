"""`Tracker`: what a person watches, and what it is told."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Record:
    """One logged step. Rates and shares are over the steps since the record before."""

    step: int
    total_steps: int
    samples: int
    tokens: int
    """Target tokens since the start of the run."""
    loss: float
    """Nats per target token."""
    learning_rate: float
    gradient_norm: float | None
    tokens_per_second: float
    step_seconds: float
    mfu: float | None
    """Share of the device's peak FLOP/s, 0 to 1; None where the peak is not known."""
    memory_gib: float
    """Peak, on this rank's device."""
    data_wait: float
    """Share of the time spent waiting for data, 0 to 1."""
    eta_seconds: float
    loss_scale: float | None = None
    skipped: int | None = None
    """Steps skipped since the start of the run, for a gradient that was not finite."""
    by_source: dict[str, float] | None = None
    """The loss on each source's targets since the last record, where it is asked for."""


@dataclass(frozen=True)
class Evaluation:
    """The held-out loss after `step` steps, in nats per target."""

    step: int
    loss: float
    targets: int
    accuracy: float | None = None
    """The share of the targets, classes or tokens, that have the highest score."""
    accuracy_top5: float | None = None
    """The same, of those among the five highest; None with five classes or less."""
    perplexity: float | None = None
    """Of a language model: exp(loss)."""
    by_source: dict[str, float] | None = None
    """The loss on each of several named sources, `loss` being that on all of their targets together."""


class Tracker(Protocol):
    def record(self, record: Record, /) -> None: ...

    def evaluation(self, evaluation: Evaluation, /) -> None: ...

    def close(self) -> None: ...


def fields(item: Record | Evaluation) -> dict[str, Any]:
    """What is known of a record, by the names under which it is logged."""
    prefix = "evaluation_" if isinstance(item, Evaluation) else ""
    known = {key: value for key, value in asdict(item).items() if value is not None and key != "step"}
    named = {f"{prefix}loss/{name}": loss for name, loss in (known.pop("by_source", None) or {}).items()}
    return {"step": item.step} | {prefix + key: value for key, value in known.items()} | named


def numbers(item: Record | Evaluation) -> dict[str, float]:
    return {key: float(value) for key, value in fields(item).items() if key not in ("step", "total_steps")}
