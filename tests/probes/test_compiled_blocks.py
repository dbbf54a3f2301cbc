"""Whether blocks compile as a whole: where a graph breaks, the note names the line."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.support.messages import shows
from tests.support.parallel.compiled import Linear, Watched, machine_of, own
from tests.support.training import LLAMA, Case, layout_of, spec_of, task_of
from trainer.engines.deepspeed import engine
from trainer.engines.engine import Job
from trainer.layout import Recompute
from trainer.parallel import compilation
from trainer.parallel.probes import compiled_blocks
from trainer.tasks import mixers


class Sleeps(nn.Module):
    """A block that does what no graph can hold."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        time.sleep(0)
        return self.inner(hidden)


@pytest.mark.more
def test_a_model_that_breaks_the_graph_runs_uncompiled_and_the_note_names_the_line():
    layout = replace(layout_of(Case(world_size=1)), compile="blocks")
    result, [note] = compiled_blocks.decided(layout, own(Sleeps), machine_of(Watched()))
    assert result.compile == "none"
    shows(note, "run uncompiled")
    assert "test_compiled_blocks.py:" in note
    result, [note] = compiled_blocks.decided(layout, own(Linear), machine_of(Watched()))
    assert result.compile == "blocks" and "TORCHINDUCTOR_CACHE_DIR" in note


def test_auto_compiles_nothing_on_a_cpu():
    layout = replace(layout_of(Case(world_size=1)), compile="auto")
    result = compiled_blocks.decided(layout, spec_of(LLAMA), machine_of(Watched()))
    assert result == (replace(layout, compile="none"), ())


AUTO = replace(layout_of(Case(world_size=1, zero_stage=3)), compile="auto")


@pytest.mark.parametrize(
    ("layout", "lacks", "expected", "noted"),
    [
        (AUTO, None, "loss", "hooks of DeepSpeed's ZeRO-3"),
        (AUTO, "no compiler", "none", "no compiler"),
        (replace(AUTO, recompute=Recompute("offload")), None, "loss", "moved to the host"),
        (replace(AUTO, compile="none"), None, "none", ""),
        (replace(AUTO, zero_stage=2), None, "blocks", ""),
    ],
    ids=["zero3", "no compiler", "offload", "none", "zero2"],
)
def test_on_a_gpu_the_loss_is_compiled_where_blocks_can_not_be(
    monkeypatch, layout, lacks, expected, noted
):
    """Under DeepSpeed; as a machine with a GPU says it."""
    monkeypatch.setattr(compilation, "lacking", lambda device: lacks)
    monkeypatch.setattr(compiled_blocks, "broken", lambda *_: None)
    machine = replace(machine_of(Watched()), device=torch.device("cuda"))
    spec = spec_of(LLAMA)
    result, notes = engine._compiling(Job(layout, spec, task_of(spec), {}, 0, machine))
    assert result.layout.compile == expected
    assert noted in "".join(notes)


@pytest.mark.more
def test_offload_is_the_mode_that_the_compiler_can_not_trace():
    assert "offload.py" in (compiled_blocks.broken(spec_of(LLAMA), Recompute("offload")) or "")


class Untraced:
    """A context variable as the compiler of PyTorch before 2.15 has it: it can't be read."""

    def get(self) -> None:
        torch._dynamo.graph_break()


@pytest.mark.more
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_compiled_blocks_that_are_computed_again_read_no_context_variable(monkeypatch, mode):
    monkeypatch.setattr(mixers, "DOCUMENTS", Untraced())
    assert compiled_blocks.broken(spec_of(LLAMA), Recompute(mode)) is None
