"""From the command to the first step: what it does is shown, and mistakes are named early."""

from __future__ import annotations

import contextlib
import inspect
import io
import os
import pty
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from rich.console import Console as Terminal

from tests.support.commands import ROOT, TRAIN, run, write_job
from tests.support.messages import raises, shows, shows_each
from trainer.data.progress import Progress
from trainer.distributed.ranks import Ranks
from trainer.engines import Machine
from trainer.engines.deepspeed.engine import KIND
from trainer.engines.deepspeed.machine import OF_OPTIMIZERS, announce, check_compiler
from trainer.errors import ConfigError
from trainer.run.describe import device_notes
from trainer.supervise import output
from trainer.supervise.output import Signs
from trainer.supervise.process import place_for_operators
from trainer.trackers import Console


def until(told: io.StringIO, lines: int) -> list[str]:
    deadline = time.monotonic() + 20
    while told.getvalue().count("\n") < lines and time.monotonic() < deadline:
        time.sleep(0.01)
    return told.getvalue().splitlines()


def test_in_a_pipe_what_takes_a_while_has_a_line_and_then_another() -> None:
    message = io.StringIO()
    with patch.multiple(output, _MOMENT=0.2, _BETWEEN=0.2):
        shown = Signs(Terminal(file=message))
        shown.at("a moment")
        shown.at("long")
        lines = until(message, 2)
        shown.hide()
        shown.at("after [that]")
        lines = until(message, len(message.getvalue().splitlines()) + 1)
        shown.close()
        shown.at("nothing")
        time.sleep(0.5)
    assert {re.sub(r"start +(.*) \(\d+ s\)", r"\1", line) for line in lines} == {
        "long",
        "after [that]",
    }
    assert len(lines) >= 3 and "nothing" not in message.getvalue()


def test_in_a_pipe_a_line_comes_again_after_ten_minutes_and_not_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    message = io.StringIO()
    later = 0.0
    looks: list[float] = []

    def clock() -> float:
        looks.append(later)
        return time.monotonic() + later

    monkeypatch.setattr(output, "time", SimpleNamespace(monotonic=clock))
    monkeypatch.setattr(output, "_MOMENT", 0.05)
    shown = Signs(Terminal(file=message))
    shown.at("long")
    assert len(until(message, 1)) == 1
    later = 500.0
    while looks.count(later) < 3:  # the thread has looked
        time.sleep(0.01)
    assert message.getvalue().count("\n") == 1
    later = 700.0
    assert len(until(message, 2)) == 2
    shown.close()


def test_a_quiet_rank_says_nothing() -> None:
    message = io.StringIO()
    with patch.multiple(output, _MOMENT=0.05, _BETWEEN=0.05):
        shown = Signs(Terminal(file=message, quiet=True))
        shown.at("long")
        time.sleep(0.3)
        shown.close()
    assert message.getvalue() == ""


def test_on_a_terminal_one_display_follows_another() -> None:
    message = io.StringIO()
    terminal = Terminal(file=message, force_terminal=True, width=80)
    shown = Signs(terminal)
    shown.at("import" + "ing" * 60)
    time.sleep(0.4)
    with patch.multiple("trainer.data.progress", _MOMENT=0):
        progress = Progress(terminal, signs=shown)
        progress.begin("data.jsonl")
        progress.at(0.5, 4, 10)
        assert shown._live is None and terminal._live_stack == [progress._bar.live]  # type: ignore[union-attr]
        progress.close()
    shown.at("making the first step")
    assert len(terminal._live_stack) == 1
    shown.close()
    assert terminal._live_stack == []
    written = message.getvalue()
    assert "start   importing" in written and "\u2026" in written  # cut at the edge
    assert "4 documents, 10 tokens" in written and not re.search(r"start +\(", written)
    assert "first step (0 s)" in written
    assert Console(terminal) is not None


# The command


def test_data_that_is_not_there_is_named_before_torch_is_imported(tmp_path: Path) -> None:
    job = write_job(tmp_path)
    script = (
        "import sys; from trainer.command.train import main; code = main(sys.argv[1:], 'train'); "
        "print(sorted({'torch', 'transformers', 'deepspeed', 'datasets'} & sys.modules.keys())); "
        "sys.exit(code)"
    )
    command = (sys.executable, "-c", script, "--config", job)
    wrong = {
        "trainer.data.path=/nowhere/x.jsonl": "/nowhere/x.jsonl: no such file or folder",
        "trainer.data.evaluation_path=/nowhere/*.jsonl": "/nowhere/*.jsonl: matches no file",
        'trainer.data={"sources": [{"path": "/nowhere/y.txt"}]}': (
            "/nowhere/y.txt: no such file or folder"
        ),
    }
    for override, actual in wrong.items():
        for processes in ("1", "2"):
            result = run(*command, "--processes", processes, override)
            assert result.code == 65
            shows(result.output, f"{actual}", "glob")
            assert result.output.endswith("\n[]\n")


def test_in_a_pipe_the_first_line_comes_before_the_libraries(tmp_path: Path) -> None:
    result = run(
        sys.executable, TRAIN, "--config", write_job(tmp_path), "--processes", "1", cold=True
    )
    lines = [re.sub(r"\d+", "N", line) for line in result.output.splitlines()]
    assert result.code == 0, result.output
    shows(lines[0], "importing PyTorch")
    first = next(at for at, line in enumerate(lines) if line.startswith("step N/N"))
    assert not any(line.startswith("start") for line in lines[first:])


@pytest.mark.more
def test_on_a_terminal_of_80_columns_nothing_is_wider(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, TRAIN, "--config", str(write_job(tmp_path)), "--processes", "1"]
    environment = {**os.environ, "COLUMNS": "80", "TERM": "xterm", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, cwd=ROOT, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    written = b""
    try:
        while part := os.read(ours, 1 << 16):
            written += part
    except OSError:  # the other end is closed
        pass
    os.close(ours)
    assert process.wait() == 0, written
    text = re.sub(r"\x1b\[[0-9?;]*[A-Za-z]", "", written.decode())
    shown = [line.strip() for line in re.split(r"[\r\n]+", text) if line.strip()]
    shows(shown[0], "importing PyTorch")
    at = next(
        at
        for at, line in enumerate(shown)
        if line.startswith("step 3/3 | loss ") and " | ETA " in line
    )
    assert re.search(r"\| data \d+\.\d%", " ".join(shown[at : at + 2])), shown  # wrapped, not cut
    assert [line[:8] for line in shown if " | loss " in line] == [
        "step 1/3",
        "step 2/3",
        "step 3/3",
    ]
    live = [
        line for line in shown if line.startswith(("start", "step")) and "evaluation" not in line
    ]
    assert max(map(len, live)) <= 80
    assert "Traceback" not in text


# Operators that DeepSpeed compiles


class Noted:
    def __init__(self) -> None:
        self.phases: list[str] = []

    def at(self, phase: str, stays: bool = False) -> None:
        self.phases.append(phase)


CPU = torch.device("cpu")


def layout_of(offload: str = "none") -> Any:
    return SimpleNamespace(offload_optimizer=offload, offload_param="none")


@contextlib.contextmanager
def operators_in(built: Path) -> Iterator[None]:
    compatible = {"async_io": True, "pin_memory": True}
    folder = patch(
        "torch.utils.cpp_extension._get_build_directory", lambda name, verbose: str(built / name)
    )
    with folder, patch("deepspeed.ops.__compatible_ops__", compatible):
        yield


def announced(
    built: Path, offload: str = "none", optimizer: str = "", device: torch.device = CPU
) -> list[str]:
    noted: Any = Noted()
    with operators_in(built):
        announce(layout_of(offload), Machine(device, Ranks(), signs=noted), optimizer)
    return noted.phases


@pytest.mark.more
def test_a_compiler_that_is_not_there_is_named_before_the_data_is_prepared(tmp_path: Path) -> None:
    (tmp_path / "python3").symlink_to(sys.executable)
    environment = {
        "PATH": str(tmp_path),
        "TORCH_EXTENSIONS_DIR": str(tmp_path),
        "XDG_CACHE_HOME": str(tmp_path),
    }
    job = write_job(tmp_path, engine="deepspeed")
    offload = ("zero_optimization.stage=2", "zero_optimization.offload_optimizer.device=cpu")
    words = ("--config", job, *offload)
    result = run(sys.executable, TRAIN, *words, "--processes", "1", **environment)
    assert result.code == 64, result.output
    shows(result.output, "engine deepspeed", "PATH")
    assert not (tmp_path / "meshloom").exists()  # no data
    looked = run(sys.executable, TRAIN, *words, "--processes", "1", "--dry-run", **environment)
    assert looked.code == 0, looked.output
    plan = ("meshloom", "plan", *words, "--gpus", "2")
    planned = run(*plan, **environment)
    assert planned.code == 0, planned.output


def test_an_operator_that_is_not_compiled_yet_is_announced(tmp_path: Path) -> None:
    line = "compiling DeepSpeed's operator {}, once for this environment: it may take minutes"
    assert announced(tmp_path) == []
    both = line.replace("operator ", "operators ").format("pin_memory and async_io")
    assert announced(tmp_path, "nvme") == [both]
    (tmp_path / "pin_memory").mkdir()
    (tmp_path / "pin_memory" / "pin_memory.so").write_text("")
    assert announced(tmp_path, "nvme") == [line.format("async_io")]
    for (
        library,
        operator,
    ) in OF_OPTIMIZERS.items():  # of the host, wherever the model is; and of a GPU
        for device in (CPU, torch.device("cuda")):
            assert announced(tmp_path, "cpu", library, device) == [line.format(operator)]
    assert announced(tmp_path, "none", "torch.optim.AdamW") == []


def test_the_operators_of_optimizers_are_the_ones_that_deepspeed_compiles() -> None:
    import deepspeed

    for library, operator in OF_OPTIMIZERS.items():
        source = inspect.getsource(attrgetter(library.removeprefix("deepspeed."))(deepspeed))
        builder = re.findall(r"(\w+Builder)\(\)\.load\(", source)
        assert {name.removesuffix("Builder").lower() for name in builder} == {
            operator.replace("_", "")
        }


def test_of_a_gpu_the_compiler_is_named_before_it_is_needed(tmp_path: Path) -> None:
    there = patch(
        "shutil.which", lambda name: None if name.endswith("nvcc") else f"/usr/bin/{name}"
    )
    with there, operators_in(tmp_path):
        check_compiler(
            layout_of("cpu"), torch.device("cuda"), "deepspeed.ops.adam.DeepSpeedCPUAdam"
        )
        with raises(ConfigError, "nvcc", "PATH", "DeepSpeed", "fused_adam"):
            check_compiler(layout_of(), torch.device("cuda"), "deepspeed.ops.adam.FusedAdam")


def test_what_an_offloaded_config_compiles_is_checked_before_its_data(tmp_path: Path) -> None:
    """DeepSpeed's Adam is compiled on the host, PyTorch's is not, as `EngineKind.ready` knows."""
    settings = {"optimizer": {"type": "AdamW", "params": {}}, "zero_optimization": {"stage": 2}}
    offload = {"offload_optimizer": "cpu", "offload_param": "none", "zero_stage": 2}
    layout: Any = SimpleNamespace(
        **offload, precision="float32", pipeline=1, expert=1, compile="none"
    )
    with patch("shutil.which", lambda name: None), operators_in(tmp_path):
        with pytest.raises(ConfigError, match="compiles its operator cpu_adam"):
            KIND.ready(layout, torch.device("cuda"), settings)
        settings["optimizer"]["params"] = {"torch_adam": True}
        KIND.ready(layout, torch.device("cuda"), settings)


def test_environments_compile_their_operators_apart(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folders = []
    for prefix in (sys.prefix, "/another/environment", sys.prefix):
        monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
        monkeypatch.setattr(sys, "prefix", prefix)
        place_for_operators()
        folders.append(Path(os.environ["TORCH_EXTENSIONS_DIR"]))
    assert folders[0] == folders[2] != folders[1] and all(
        folder.parent.parent == tmp_path for folder in folders
    )
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", "/chosen")
    place_for_operators()
    assert os.environ["TORCH_EXTENSIONS_DIR"] == "/chosen"


@pytest.mark.parametrize(
    ("given", "kept"), [("8.0;9.0+PTX", True), ("9.0 10.0a", False), ("Hopper", False)]
)
def test_a_list_of_architectures_that_deepspeed_cannot_read_is_dropped(
    monkeypatch: pytest.MonkeyPatch, given: str, kept: bool
) -> None:
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", given)
    place_for_operators()
    assert ("TORCH_CUDA_ARCH_LIST" in os.environ) == kept


def test_a_line_that_stays_is_printed_at_once_where_there_is_no_terminal() -> None:
    written = io.StringIO()
    shown = Signs(Terminal(file=written))
    shown.at("compiling", stays=True)
    shown.close()
    assert written.getvalue() == "start   compiling\n"


def test_on_several_gpus_it_is_said_that_no_straggler_is_told() -> None:
    def lines(device: str, ranks: int) -> list[str]:
        return list(device_notes("bfloat16", Machine(torch.device(device), Ranks(0, ranks))))

    assert ["a slow rank" in line for line in lines("cuda", 2)] == [True]
    assert lines("cpu", 2) == lines("cuda", 1) == []


@pytest.mark.parametrize(("tool", "package"), [("c++", "g++"), ("ninja", "ninja-build")])
def test_a_compiler_that_is_not_there_is_named_before_it_is_needed(
    tmp_path: Path, tool: str, package: str
) -> None:
    compiler = patch("torch.utils.cpp_extension.get_cxx_compiler", lambda: "c++")
    there = patch("shutil.which", lambda name: None if name == tool else f"/usr/bin/{name}")
    with compiler, there, operators_in(tmp_path):
        with pytest.raises(ConfigError) as caught:
            check_compiler(layout_of("nvme"), CPU)
        announce(layout_of("nvme"), Machine(CPU, Ranks()))  # what only plans, compiles nothing
    shows(
        caught.value,
        f"{tool}",
        "PATH",
        "DeepSpeed",
        "pin_memory",
        "ninja",
        f"{package}",
        "trainer.engine",
    )


def test_a_wide_line_is_broken_between_words_on_a_terminal():
    from trainer.trackers import say

    line = "data    3 documents, 4,811 tokens; /a/path/that/is/long\nsample  one\n        two"
    shown = {}
    for terminal in (True, False):
        output = io.StringIO()
        say(Terminal(file=output, highlight=False, force_terminal=terminal, width=30), line)
        shown[terminal] = output.getvalue()
    shows_each(
        shown[True].splitlines(),
        ("data", "3 documents, 4,811"),
        "tokens",
        "/a/path/that/is/long",
        "sample  one",
        "two",
    )
    assert shown[False] == f"{line}\n"  # a file's lines are whole
