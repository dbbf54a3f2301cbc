"""Problems with and without an expectation, and the end of a run by a signal."""

from __future__ import annotations

import pickle
import signal

import pytest

from trainer.errors import ConfigError, MeshloomError, Problem, Stopped
from trainer.supervise.signals import stopped_at, stopped_early


@pytest.mark.parametrize(
    ("problem", "text"),
    [
        (Problem("seed", "-1", "0 or more", "Leave it out"), "seed: -1; expected 0 or more. "),
        (Problem("seed", "-1", "0 or more"), "seed: -1; expected 0 or more"),
        (Problem("rank 1", "a lost connection", hint="Look there"), "rank 1: a lost connection. L"),
        (Problem("rank 1", "a lost connection"), "rank 1: a lost connection"),
    ],
)
def test_a_problem_has_an_expectation_if_it_is_about_a_value(problem: Problem, text: str) -> None:
    assert str(problem).startswith(text)
    assert ("expected" in str(problem)) == (problem.expected is not None)
    error = ConfigError(problem)
    error.reword_for_python()
    assert error.problems == (problem,)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, 0])
def test_a_run_that_a_signal_ends_says_which_and_what_is_saved(number: int) -> None:
    name = signal.Signals(number).name if number else "a signal"
    for error in (stopped_at(120, number), stopped_early(number)):
        assert error.exit_code == 75 and error.shared
        assert error.render() == str(error)
        assert f"stopped by {name} " in str(error)
    assert "step 120; checkpoint saved" in str(stopped_at(120, number))
    assert "saved" not in str(stopped_early(number))


def test_errors_come_whole_through_a_pipe_and_speak_of_a_call_in_python() -> None:
    for error in (stopped_at(3, signal.SIGTERM), ConfigError(Problem("a", "b", hint="c"))):
        copy: MeshloomError = pickle.loads(pickle.dumps(error))
        assert (type(copy), str(copy), copy.problems) == (type(error), str(error), error.problems)
        assert copy.shared == error.shared
    stopped: Stopped = pickle.loads(pickle.dumps(stopped_at(3, signal.SIGTERM)))
    stopped.reword_for_python()
    assert "Make the same call" in str(stopped) and "command" not in str(stopped)
