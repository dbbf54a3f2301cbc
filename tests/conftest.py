from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # PyTorch's threads share few cores

import pytest
from hypothesis import settings

from tests.support import messages
from tests.support.pool import Pools
from tests.support.selection import (
    LEAST,
    PARTS,
    durations,
    part_of_commit,
    parts_of,
    record,
    stale,
    tier,
)

# a commit is judged by the same examples everywhere; `--hypothesis-profile search` draws new ones
settings.register_profile("same", deadline=None, derandomize=True)
settings.register_profile("search", deadline=None)
settings.load_profile("same")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in a background job, and so in its children
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--more",
        action="store_true",
        help="also what a first run leaves out (tests/support/selection.py)",
    )
    parser.addoption("--whole", action="store_true", help="every case there is: hours")
    parser.addoption(
        "--record-durations",
        action="store_true",
        help="write the seconds of the tests that run to tests/durations.json",
    )
    parser.addoption(
        "--rewrite-messages",
        action="store_true",
        help="write the texts that the tests of this run record to tests/messages.txt",
    )
    parser.addoption(
        "--part",
        metavar="COMMIT",
        help=(
            f"with --more: one of {PARTS} equal parts of what a first run leaves out, the one "
            "that this commit picks"
        ),
    )


def pytest_configure(config: pytest.Config) -> None:
    """Hide the GPUs, unless `-m gpu` asks for them: all other tests are for processors."""
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Run in two processes, unless files or tests are named: those are looked at one by one."""
    return 0 if config.args_source is pytest.Config.ArgsSource.ARGS else 2


def pytest_report_header(config: pytest.Config) -> str | None:
    commit = config.getoption("--part")
    part = part_of_commit(commit) + 1 if commit else 0
    return f"part {part} of {PARTS} of the slow tests, picked by {commit}" if commit else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    named = any("::" in argument for argument in config.args)  # who names a test means it
    if not named:
        select(config, items)
    skip_without_gpu(items)


def select(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests of this run: see tests/support/selection.py."""
    if missing := stale(items):
        raise pytest.UsageError(f"`first` names cases that are not there: {missing}")
    measured = durations()
    tiers = {item.nodeid: tier(item, measured.get(item.nodeid, LEAST)) for item in items}
    wanted = {"first"}
    if config.getoption("--more"):
        wanted |= {"more"}
    if config.getoption("--whole"):
        wanted |= {"more", "whole"}
    kept = {test for test, kind in tiers.items() if kind in wanted}
    if commit := config.getoption("--part"):
        slow = [test for test, kind in tiers.items() if kind == "more"]
        parts = parts_of(slow, lambda test: measured.get(test, LEAST))
        kept -= {test for test, part in parts.items() if part != part_of_commit(commit)}
    for item in items:
        if tiers[item.nodeid] == "more":
            item.add_marker("more")  # for `-m more`
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in kept])
    items[:] = [item for item in items if item.nodeid in kept]


def skip_without_gpu(items: list[pytest.Item]) -> None:
    if any(item.get_closest_marker("gpu") for item in items):
        import torch

        if not torch.cuda.is_available():
            for item in items:
                if item.get_closest_marker("gpu"):
                    item.add_marker(
                        pytest.mark.skip(
                            reason="there is no GPU that PyTorch can use (-m gpu shows them)"
                        )
                    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Hand the texts that a test has recorded to the process that compares or writes them."""
    messages.RECORDED.clear()
    yield
    item.user_properties.append(("messages", list(messages.RECORDED)))


DURATIONS: dict[str, float] = {}
"""Seconds by node id, of the tests that have run in this process or its workers."""
MESSAGES: dict[str, list[str]] = {}
"""The texts that the tests that have passed have recorded, by node id."""


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Add up the seconds of a test's setup and call, and keep the texts that it has recorded."""
    if report.when == "call" and report.passed:
        MESSAGES.update(
            (report.nodeid, value) for name, value in report.user_properties if name == "messages"
        )
    if report.when != "teardown":
        seconds = DURATIONS.get(report.nodeid, 0.0)
        DURATIONS[report.nodeid] = seconds + report.duration


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workerinput"):
        return
    if session.config.getoption("--record-durations"):
        record(DURATIONS)
    if session.config.getoption("--rewrite-messages"):
        messages.rewrite(MESSAGES)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Name the tests whose users' texts have changed. That is no failure: a diff shows them."""
    if config.getoption("--rewrite-messages"):
        return
    if changed := messages.changed(MESSAGES):
        start = f"{len(changed)} tests see other texts than tests/messages.txt has, such as"
        terminalreporter.write_line(f"{start} {changed[0]}: python -m pytest --rewrite-messages")


@pytest.fixture(scope="session")
def pools() -> Iterator[Pools]:
    """Worker pools by world size, started when used."""
    result = Pools()
    yield result
    result.close()
