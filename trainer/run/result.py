"""The result of a run for a script: its folder, and its logged steps."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trainer.trackers import Epoch, Evaluation, Record


@dataclass(frozen=True)
class Result:
    """The result of a run on this rank; it is not sent between ranks."""

    folder: Path
    """The run's folder: checkpoints, `metrics.jsonl`, and `final/` with the model."""
    records: tuple[Record, ...]
    """Records of the logged steps (`trainer.log.every`) since this start."""
    evaluations: tuple[Evaluation, ...]
    epochs: tuple[Epoch, ...] = ()
    """The mean losses of the epochs that ended since this start, unless the run is in steps."""

    @property
    def losses(self) -> list[float]:
        """The mean losses of the logged steps, over the targets of each global batch."""
        return [record.loss for record in self.records]


class History:
    """A tracker that keeps records, epochs and evaluations in memory."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.epochs: list[Epoch] = []
        self.evaluations: list[Evaluation] = []

    def record(self, record: Record) -> None:
        self.records.append(record)

    def epoch(self, epoch: Epoch) -> None:
        self.epochs.append(epoch)

    def evaluation(self, evaluation: Evaluation) -> None:
        self.evaluations.append(evaluation)

    def close(self) -> None: ...

    def result(self, folder: Path) -> Result:
        return Result(folder, tuple(self.records), tuple(self.evaluations), tuple(self.epochs))
