"""A script's callbacks: on every rank, in one order; one rank ends or fails the run of all."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

import trainer
from tests.support.command.own_module import OWN, config
from tests.support.commands import write_job
from tests.support.messages import raises
from trainer.errors import ConfigError
from trainer.trackers import Evaluation, Record


class Diary(trainer.Callback):
    """Writes each event to a file of its rank; one rank does more at one event."""

    def __init__(self, folder: Path, rank: int = 0, event: str = "", fails: bool = False) -> None:
        self.folder, self.rank, self.event, self.fails = folder, rank, event, fails

    def note(self, event: str) -> bool:
        rank = dist.get_rank()
        with (self.folder / f"rank-{rank}.txt").open("a") as file:
            print(event, file=file)
        if rank == self.rank and event == self.event and self.fails:
            raise ValueError("no more of it")
        return rank == self.rank and event == self.event

    def on_train_begin(self, folder: Path, modules: Sequence[nn.Module]) -> None:
        self.note(f"begin {folder.name} {sum(p.numel() for p in modules[0].parameters())}")

    def on_step_end(self, step: int) -> bool:
        return self.note(f"step {step}")

    def on_log(self, record: Record) -> bool:
        return self.note(f"log {record.step}")

    def on_evaluate(self, evaluation: Evaluation) -> bool:
        return self.note(f"evaluate {evaluation.step} {evaluation.loss:.9f}")

    def on_save(self, step: int) -> None:
        self.note(f"save {step}")

    def on_train_end(self, folder: Path) -> None:
        self.note(f"end {(folder / 'final').is_dir()}")


EVERY: Any = {
    "log": {"every": 2},
    "evaluation": {"every": 3, "samples": 8},
    "checkpoint": {"every": 2},
}


def train(tmp_path: Path, *callbacks: Any) -> tuple[trainer.Result, list[str], list[str]]:
    job = config(tmp_path, 5, **EVERY)
    given = OWN | {"evaluation_data": OWN["data"][:8], "callbacks": callbacks}
    result = trainer.train(job, **given, processes=2)
    first, second = ((tmp_path / f"rank-{rank}.txt").read_text().splitlines() for rank in (0, 1))
    return result, first, second


@pytest.mark.parametrize(
    ("event", "last"),
    [
        ("step 3", 3),
        *(pytest.param(*two, marks=pytest.mark.more) for two in (("", 5), ("log 2", 2))),
    ],
)
def test_the_ranks_call_in_one_order_and_one_of_them_ends_the_run(
    tmp_path: Path, event: str, last: int
) -> None:
    result, first, second = train(tmp_path, Diary(tmp_path, 1, event))
    assert first == second
    losses = {one.step: f"evaluate {one.step} {one.loss:.9f}" for one in result.evaluations}
    expected = ["begin own 58"]
    for step in range(1, last + 1):
        expected.append(f"step {step}")
        expected += [f"log {step}"] * (step in (2, 4, 5))
        expected += [losses[step]] if step in (3, 5) else []
        expected += [f"save {step}"] * (step in (2, 4, last))
    assert first == [*expected, "end True"]


def test_an_error_on_one_rank_ends_all(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"ValueError.*no more of it"):
        train(tmp_path, Diary(tmp_path, 1, "step 3", fails=True))
    for rank in (0, 1):
        assert (tmp_path / f"rank-{rank}.txt").read_text().splitlines()[-1] == "step 3"


def test_the_result_of_a_save_ends_nothing(tmp_path: Path) -> None:
    class Copies(trainer.Callback):
        def on_save(self, step: int) -> str:  # type: ignore[override]
            return f"copied {step}"

    job = config(tmp_path, 4, checkpoint={"every": 1}, log={"every": 1})
    assert trainer.train(job, **OWN, callbacks=[Copies()]).records[-1].step == 4


def test_an_error_that_no_pickle_holds_says_itself(tmp_path: Path) -> None:
    class Odd(Exception):  # of a function: its class has no name to find it by
        def __str__(self) -> str:
            time.sleep(5)  # holds up the report of its own rank: the other's is the first heard
            return "only here"

    class Fails(trainer.Callback):
        def on_step_end(self, step: int) -> bool:
            if dist.get_rank() == 1:
                raise Odd("only here")
            return False

    with raises(RuntimeError, "rank 1 failed", "Odd('only here')"):
        trainer.train(config(tmp_path), **OWN, callbacks=[Fails()], processes=2)


def test_what_is_no_callback_is_refused_at_once(tmp_path: Path) -> None:
    class Misspelt(trainer.Callback):
        def on_evaluation(self) -> None: ...

    for several, actual in ((Diary(tmp_path), "Diary"), (iter([]), "list_iterator")):
        with raises(ConfigError, f"callbacks: {actual}", "expected a list"):
            trainer.train(config(tmp_path), **OWN, callbacks=several)  # type: ignore[arg-type]
    for wrong, actual in ((Misspelt(), "Misspelt with on_evaluation"), (Diary, "type")):
        with raises(ConfigError, f"callbacks: {actual}", "expected an object"):
            trainer.train(config(tmp_path), **OWN, callbacks=[wrong])  # type: ignore[list-item]
    assert not (tmp_path / "runs").exists()


@pytest.mark.more
def test_a_language_model_that_the_config_names_has_callbacks_and_no_metrics(
    tmp_path: Path,
) -> None:
    job = write_job(tmp_path)
    folder = f"trainer.run.folder={tmp_path / 'runs'}"
    given: Any = {"overrides": [folder], "quiet": True}
    result = trainer.train(job, callbacks=[Diary(tmp_path, 0, "step 2")], **given)
    assert result.records[-1].step == 2 and (result.folder / "final").is_dir()
    with raises(ConfigError, "train: not all", "a model"):
        trainer.train(job, metrics={"zero": lambda output, target: (output.sum() * 0, 1)}, **given)
