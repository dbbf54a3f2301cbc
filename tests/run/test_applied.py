"""The lines on what is applied to a model while it is wrapped."""

from __future__ import annotations

import re
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from tests.support.commands import train, write_job
from tests.support.probing import layout
from tests.support.training import LLAMA, spec_of, task_of
from trainer.layout import Recompute
from trainer.parallel.apply import sharding_of, wrap_blocks
from trainer.supervise.output import Signs


def test_each_step_of_wrapping_that_is_taken_has_a_line() -> None:
    spec = spec_of(LLAMA)
    lines: list[str] = []
    plain = layout()
    wrap_blocks(spec, task_of(spec), plain, say=lines.append)
    assert lines == []
    recomputed = layout(recompute=Recompute(mode="full", tile=8))
    wrap_blocks(spec, task_of(spec), recomputed, say=lines.append)
    blocks = str(len(spec.blocks))
    assert ["tiles" in line or blocks in line for line in lines] == [True, True]
    assert sharding_of("FSDP", layout(shard=2)) == "FSDP over shard=2"
    assert sharding_of("FSDP", layout(shard=2, replicate=2)) == "FSDP over shard=2, replicate=2"


def test_a_line_is_printed_once_though_several_stages_are_wrapped() -> None:
    text = StringIO()
    signs = Signs(Console(file=text))
    for _ in range(2):
        signs.applied("FSDP over shard=2")
    signs.close()
    assert text.getvalue().splitlines() == ["applied FSDP over shard=2"]


@pytest.mark.parametrize(
    ("engine", "stage", "expected"),
    [
        ("mesh", 2, ["activation checkpointing (full) to 2 blocks", "FSDP over shard=2"]),
        pytest.param("mesh", 0, ["DDP over replicate=2"], marks=pytest.mark.more),
        pytest.param("accelerate", 2, ["FSDP over shard=2"], marks=pytest.mark.more),
        pytest.param("deepspeed", 2, ["ZeRO-2 over shard=2"], marks=pytest.mark.more),
    ],
)
def test_the_first_rank_says_what_an_engine_applies(
    tmp_path: Path, engine: str, stage: int, expected: list[str]
) -> None:
    options = {"engine": engine, "steps": 1, "device": "cpu"}
    if len(expected) > 1:
        options["activation_checkpointing"] = "full"
    job = write_job(tmp_path, **options)
    result = train("--config", job, "--processes", "2", f"zero_optimization.stage={stage}")
    assert result.code == 0, result.output
    applied = re.findall(r"^applied (.*)$", result.output, re.MULTILINE)
    assert len(applied) == len(expected)
    assert all(line.endswith(end) for line, end in zip(applied, expected, strict=True)), applied
