from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from zlib import crc32

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # PyTorch's threads share few cores

import pytest
from hypothesis import settings

from tests.support.pool import Pools
from tests.support.sample import PARTS, RARELY, SAMPLE

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
        help="also what a first run leaves out (tests/support/sample.py)",
    )
    parser.addoption("--whole", action="store_true", help="every case there is: hours")
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


def part_of(name: str) -> int:
    """The part that a test or a commit belongs to: the same on every machine."""
    return crc32(name.encode()) % PARTS


def pytest_report_header(config: pytest.Config) -> str | None:
    commit = config.getoption("--part")
    return (
        f"part {part_of(commit) + 1} of {PARTS} of the slow tests, picked by {commit}"
        if commit
        else None
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.args == config.getini("testpaths"):
        stale = [
            (file, word)
            for table in (SAMPLE, RARELY)
            for file, words in table.items()
            for word in words
            if not any(word in item.name for item in items if item.path.name == file)
        ]
        if stale:
            raise pytest.UsageError(
                f"tests/support/sample.py names tests that are not there: {stale}"
            )
    for item in items:
        words = SAMPLE.get(item.path.name)
        if (
            words is not None
            and not any(word in item.name for word in words)
            and not item.get_closest_marker("whole")
        ):
            rare = any(word in item.name for word in RARELY.get(item.path.name, ()))
            item.add_marker("whole" if rare else "more")
    unwanted = {"more", "whole"}
    if config.getoption("--whole"):
        unwanted = set()
    elif config.getoption("--more"):
        unwanted = {"whole"}
    commit = config.getoption("--part")
    named = any("::" in argument for argument in config.args)  # who names a test means it
    out = [
        item
        for item in items
        if not named
        and (
            any(item.get_closest_marker(name) for name in unwanted)
            or (
                commit
                and item.get_closest_marker("more")
                and part_of(item.nodeid) != part_of(commit)
            )
        )
    ]
    config.hook.pytest_deselected(items=out)
    left = set(out)
    items[:] = [item for item in items if item not in left]
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


@pytest.fixture(scope="session")
def pools() -> Iterator[Pools]:
    """Worker pools by world size, started when used."""
    found = Pools()
    yield found
    found.close()
