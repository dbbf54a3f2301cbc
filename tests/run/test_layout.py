"""`Layout` can't exist wrong, and says what it is."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.messages import raises, shows
from tests.support.run.layout import layout
from trainer.config import RuntimeFacts, load, resolve
from trainer.errors import ConfigError
from trainer.layout import PIPELINE_SCHEDULES, Layout, Recompute, layout_of

size = st.integers(1, 5)
SIZES = (
    "pipeline",
    "replicate",
    "shard",
    "tensor",
    "micro_batch",
    "accumulation",
)


@settings(max_examples=60, deadline=None)
@given(size, size, size, size, size, size, st.sampled_from(SIZES), st.integers(-1, 700))
def test_a_layout_passes_only_with_sizes_that_fit(
    p: int, r: int, s: int, t: int, m: int, a: int, name: str, value: int
) -> None:
    right = layout(p, r, s, t, m, a * p)
    assert right.data_ranks == r * s
    totals = {"world_size": p * r * s * t, "train_batch": m * a * p * r * s}
    right.check(**totals)
    for total, number in totals.items():
        if number != value:
            with pytest.raises(ConfigError):
                right.check(**totals | {total: value})
    if getattr(right, name) == value:
        return
    # one size alone is changed: its product can't fit any more
    with pytest.raises(ConfigError):
        replace(right, **{name: value}).check(**totals)


def test_the_arithmetic_is_shown() -> None:
    with pytest.raises(ConfigError) as caught:
        layout(1, 2, 3, 1, 2, 2).check(world_size=8, train_batch=25)
    shows(
        caught.value,
        "1 (pipeline)",
        "2 (replicate)",
        "3 (shard)",
        "1 (tensor) = 6",
        "8 processes",
        "sizes",
        "least 1",
        "train_batch_size: 2 (micro-batch)",
        "2 (accumulation)",
        "6 (data ranks)",
        "= 24",
        "25 samples",
    )


def test_sizes_below_one_are_refused_even_where_the_product_fits() -> None:
    with pytest.raises(ConfigError):
        replace(layout(1, 1, 1, 1, 1, 1), pipeline=-1, tensor=-1)


def laid_out(folder: Path, content: dict[str, Any], world_size: int) -> Layout:
    path = folder / "c.json"
    path.write_text(json.dumps(content))
    facts = RuntimeFacts(
        world_size=world_size, hidden_size=None, total_steps=None, bf16=True, device="cuda"
    )
    return layout_of(resolve(load(path), facts), world_size)


def test_a_full_config(tmp_path: Path) -> None:
    offload = {"device": "cpu"}
    content = {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": 2,
        "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage": 3, "offload_optimizer": offload, "offload_param": offload},
        "pipeline": {"stages": 2},
        "tensor_parallel": {"autotp_size": 2},
        "trainer": {"mesh": {"shard": 2}, "activation_checkpointing": "every:2"},
    }
    result = laid_out(tmp_path, content, 16)
    expected = Layout(2, 2, 2, 2, 3, 2, 3, "cpu", "cpu", "bfloat16", Recompute("every", 2))
    schedule = replace(PIPELINE_SCHEDULES["1F1B"], row=512)
    assert result == replace(expected, compile="auto", schedule=schedule)
    assert result.stages == 2
    shows(
        result.describe(),
        "pipeline 2 x replicate 2 x shard 2 x tensor 2",
        "ZeRO-3",
        "bfloat16",
        "= 3 x 2 x 4",
        "1F1B, recompute every:2",
    )


@pytest.mark.parametrize(
    ("content", "world_size", "parts"),
    [
        (
            {
                "pipeline": {"stages": 2, "activation_checkpoint_interval": 1},
                "gradient_accumulation_steps": 2,
            },
            2,
            ("pipeline 2", "ZeRO-0", "float32", "batch 2 = 1 x 2 x 1", "1F1B", "recompute full"),
        ),
        ({}, 1, ("one process", "ZeRO-0", "float32", "batch 1 = 1 x 1 x 1")),
        (
            {"fp16": {"enabled": True}},
            4,
            ("replicate 4", "ZeRO-0", "float16", "batch 4 = 1 x 1 x 4"),
        ),
        (
            {
                "activation_checkpointing": {"profile": True},
                "zero_optimization": {"stage": 1, "offload_param": None},
            },
            2,
            ("shard 2", "ZeRO-1", "float32", "batch 2 = 1 x 1 x 2", "recompute full"),
        ),
    ],
)
def test_describe(
    tmp_path: Path, content: dict[str, Any], world_size: int, parts: tuple[str, ...]
) -> None:
    assert laid_out(tmp_path, content, world_size).describe() == ", ".join(parts)


@pytest.mark.parametrize(
    ("schedule", "micro_batches", "keys"),
    [
        ("1F1B", 3, ("4 pipeline stages", "at least 4")),
        ("GPipe", 1, ("4 pipeline stages", "at least 4")),
        ("DualPipeV", 7, ("8 pipeline stages", "at least 8")),
        ("Interleaved1F1B", 9, ("8 pipeline stages", "a multiple of 2")),
    ],
)
def test_micro_batches_that_do_not_fill_a_schedule(
    schedule: str, micro_batches: int, keys: tuple[str, ...]
) -> None:
    with raises(ConfigError, f"under {schedule}", *keys) as caught:
        replace(
            layout(4, 1, 1, 1, 1, 8),
            schedule=PIPELINE_SCHEDULES[schedule],
            accumulation=micro_batches,
        )
    place = f"gradient_accumulation_steps: {micro_batches} micro-batches"
    assert str(caught.value).startswith(place)
    shows(caught.value, "gradient_accumulation_steps", "pipeline's micro-batches")


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(PIPELINE_SCHEDULES)), st.integers(1, 4), st.integers(1, 20))
def test_pytorch_takes_what_a_schedule_takes(name: str, ranks: int, micro_batches: int) -> None:
    """And where it raises, a layout did so before."""
    from types import SimpleNamespace

    from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

    schedule, kind = PIPELINE_SCHEDULES[name], get_schedule_class(name)
    stages = [
        SimpleNamespace(
            stage_index=index,
            num_stages=ranks * schedule.stages_per_rank,
            group_size=ranks,
            group_rank=0,
            is_first=index == 0,
            is_last=False,
            submod=None,
            stage_index_to_group_rank={},
        )
        for index in range(schedule.stages_per_rank)
    ]
    wants_list = issubclass(kind, PipelineScheduleMulti)
    if ranks > 1 and schedule.problem(micro_batches, ranks) is None:
        kind(
            stages if wants_list else stages[0],
            n_microbatches=micro_batches,
            loss_fn=lambda *_: None,
        )


@pytest.mark.parametrize(
    ("engine", "mesh", "sizes", "says"),
    [
        ("accelerate", {}, (2, 4), True),
        ("mesh", {"shard": -1}, (1, 8), False),
        ("mesh", {"replicate": 4}, (4, 2), False),
        ("auto", {}, (1, 8), False),
    ],
)
def test_fsdp_shards_within_a_machine_unless_told_otherwise(
    tmp_path: Path, engine: str, mesh: dict[str, int], sizes: tuple[int, int], says: bool
) -> None:
    path = tmp_path / "c.json"
    path.write_text(
        json.dumps({"zero_optimization": {"stage": 3}, "trainer": {"engine": engine, "mesh": mesh}})
    )
    config = resolve(load(path), RuntimeFacts(8, None, None, False, "cpu", local_world_size=4))
    result = layout_of(config, 8)
    assert (result.replicate, result.shard) == sizes
    note = (
        "shards within each machine (4 ranks) and replicates across 2; trainer.mesh.shard=-1 "
        "shards over all"
    )
    assert (note in config.notes) is says
    assert resolve(config, RuntimeFacts(8, 64, 10, False, "cpu", 4)).notes == config.notes
