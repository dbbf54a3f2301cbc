"""The loop with a fake engine: what is called when, and that a position is one number."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from tests.support.messages import shows
from trainer.distributed.balance import least_loaded
from trainer.engines.engine import Metrics
from trainer.optim.lr_schedules import Update
from trainer.run import run as whole_run
from trainer.run.loop import Hooks, LoopPlan, due, train
from trainer.run.observers.notices import Patience
from trainer.state import RunState


class FakeEngine:
    """Every step has a loss of its number and 10 targets."""

    def __init__(self) -> None:
        self.rates: list[float] = []

    def step(self, step: int, batches: Any, update: Update, observe: Any = None) -> Metrics:
        self.rates.append(update.learning_rate)
        return Metrics(torch.tensor(10.0 * step), torch.tensor(10), torch.tensor(1.0))


def run(
    first: int,
    last: int,
    stop: Any = lambda: lambda: False,
    evaluate: Any = lambda state: False,
    **plan: int | None,
) -> tuple[RunState, list[tuple[Any, ...]]]:
    calls: list[tuple[Any, ...]] = []

    class Calls(Hooks):
        def log(self, state: RunState, metrics: Metrics, update: Update) -> None:
            calls.append(("log", state.step, state.tokens, float(metrics.loss())))

        def evaluate(self, state: RunState) -> bool:
            calls.append(("evaluate", state.step))
            return evaluate(state)

        def save(self, state: RunState) -> None:
            calls.append(("save", state.step, state.samples))

        def stop(self, step: int) -> Any:
            return stop()

    loader: Any = [
        SimpleNamespace(step=step, micro_batches=[], ids=[]) for step in range(first, last)
    ]
    every: dict[str, Any] = {"log_every": 2, "save_every": None, "evaluate_every": None} | plan
    engine: Any = FakeEngine()
    state = train(
        engine,
        loader,
        lambda step: Update(step / 100),
        LoopPlan(last, 8, **every),
        Calls(),
        RunState(first, first * 8),
    )
    assert engine.rates == [step / 100 for step in range(first, min(last, state.step))]
    return state, calls


def test_an_evaluation_between_log_lines_is_of_its_own_step():
    _, calls = run(0, 5, evaluate_every=3)
    assert [call for call in calls if call[0] == "evaluate"] == [("evaluate", 3), ("evaluate", 5)]


def test_an_evaluation_may_end_it():
    _, calls = run(0, 9, evaluate_every=3, evaluate=lambda state: state.step == 6)
    assert calls[-2:] == [("evaluate", 6), ("save", 6, 48)]
    patience = Patience(2)
    ends = [patience.ends(step, loss) for step, loss in enumerate([3.0, 2.0, 2.5, 1.9, 1.9])]
    assert ends == [False] * 5 and patience.ends(5, float("nan"))
    shows(patience.line, "held-out", "fallen", "2 evaluations", "was 1.9", "step 3")
    assert not any(Patience(None).ends(step, 1.0) for step in range(9))


def test_what_is_called_when():
    state, calls = run(0, 5, save_every=3, evaluate_every=4)
    assert calls == [
        ("log", 2, 20, 1.0),
        ("save", 3, 24),
        ("log", 4, 40, 3.0),
        ("evaluate", 4),
        ("log", 5, 50, 4.0),
        ("evaluate", 5),
        ("save", 5, 40),
    ]
    assert state == RunState(step=5, samples=40, tokens=50)


def test_a_resumed_loop_goes_on_counting():
    state, calls = run(3, 5)
    assert calls == [("log", 4, 10, 3.0), ("log", 5, 20, 4.0), ("evaluate", 5), ("save", 5, 40)]
    assert state.samples == 40


def test_a_loop_that_is_stopped_saves_where_it_stands():
    for asked_at, expected in (0, [("save", 1, 8)]), (1, [("log", 2, 20, 1.0), ("save", 2, 16)]):
        answers = iter([False] * asked_at + [True])
        state, calls = run(0, 50, stop=lambda answers=answers: answers.__next__)
        assert calls == expected
        assert (state.step, state.tokens) == (asked_at + 1, 10 * (asked_at + 1))


def test_nothing_is_left_to_do():
    assert run(5, 5) == (RunState(5, 40), [])


def test_due():
    assert [step for step in range(1, 8) if due(step, 7, 3)] == [3, 6, 7]
    assert [step for step in range(1, 8) if due(step, 7, None)] == [7]


def test_tensors_are_shared_out_by_size():
    assert least_loaded([8, 1, 1, 1, 5], [range(2)] * 5) == [0, 1, 1, 1, 1]
    assert least_loaded([3, 1], [range(2, 4), range(2)]) == [2, 0]


def test_a_failure_before_the_first_step_closes_the_loader(monkeypatch):
    """Its workers ignore signals: the end of the process would wait for them."""
    loader = MagicMock()
    monkeypatch.setattr(whole_run, "_loader", lambda *_: loader)
    monkeypatch.setattr(whole_run, "measure_precursor", lambda *_: None)
    monkeypatch.setattr(whole_run, "_built", lambda *_: (MagicMock(), RunState()))
    monkeypatch.setattr(whole_run, "_write_down", lambda *_: None)
    monkeypatch.setattr(whole_run, "RunHooks", MagicMock(side_effect=OSError("no log")))
    with pytest.raises(OSError, match="no log"):
        whole_run.train(MagicMock(), MagicMock())
    loader.__exit__.assert_called_once()
