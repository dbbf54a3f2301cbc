"""`resolve`: "auto" values, batch sizes, mesh sizes."""

from __future__ import annotations

import json
import re
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.messages import raises, shows, shows_each
from trainer.config import Config, RuntimeFacts, load, mesh_sizes, origin_table, resolve
from trainer.config.read import leaves
from trainer.errors import ConfigError

FACTS = RuntimeFacts(world_size=2, hidden_size=64, total_steps=200, bf16=True, device="cuda")
BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
quick = settings(max_examples=60, deadline=None)


def config_of(content: dict[str, Any]) -> Config:
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(content, file)
        file.flush()
        return load(Path(file.name))


def resolved(content: dict[str, Any], facts: RuntimeFacts = FACTS) -> dict[str, Any]:
    return dict(leaves(resolve(config_of(content), facts).settings))


def failure(content: dict[str, Any], facts: RuntimeFacts = FACTS) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve(config_of(content), facts)
    return str(caught.value)


AUTOS = {
    "zero_optimization.reduce_bucket_size": 4096,
    "zero_optimization.stage3_prefetch_bucket_size": 3686,
    "zero_optimization.stage3_param_persistence_threshold": 640,
    "optimizer.params.lr": 5e-5,
    "optimizer.params.betas": [0.9, 0.999],
    "optimizer.params.eps": 1e-8,
    "optimizer.params.weight_decay": 0.0,
    "scheduler.params.warmup_min_lr": 0.0,
    "scheduler.params.warmup_max_lr": 5e-5,
    "scheduler.params.warmup_num_steps": 1,
    "scheduler.params.total_num_steps": 200,
    "gradient_clipping": 1.0,
    "fp16.enabled": False,
    "bf16.enabled": True,
    "pipeline.stages": 1,
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 8,
    "gradient_accumulation_steps": 1,
}
DROPPED = (
    "zero_optimization.overlap_comm",
    "zero_optimization.offload_param.device",
    "fp16.loss_scale",
)


def with_autos(paths: Any) -> dict[str, Any]:
    content: dict[str, Any] = {
        "zero_optimization": {"stage": 3, "offload_param": {}},
        "optimizer": {"type": "AdamW", "params": {"lr": 5e-5}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 200}},
    }
    for path in paths:
        section = content
        *sections, name = path.split(".")
        for part in sections:
            section = section.setdefault(part, {})
        section[name] = "auto"
    return content


@quick
@given(st.sets(st.sampled_from([*AUTOS, *DROPPED])))
def test_every_subset_of_autos_is_resolved_in_one_call_or_two(paths: set[str]) -> None:
    config = config_of(with_autos(paths))
    once = resolve(config, FACTS)
    values = dict(leaves(once.settings))
    assert "auto" not in [value for value in values.values() if isinstance(value, str)]
    wanted = {path: value for path, value in AUTOS.items() if path in paths}
    assert {path: values[path] for path in wanted} == wanted
    assert not set(DROPPED) & set(values)
    assert all(once.origins[path].startswith("auto: ") for path in paths)
    assert paths <= {key for key, _, _ in origin_table(once)}
    early = resolve(config, replace(FACTS, hidden_size=None, total_steps=None))
    assert resolve(early, FACTS) == once


def test_values_wait_for_their_facts() -> None:
    content = with_autos(
        ["zero_optimization.reduce_bucket_size", "scheduler.params.total_num_steps"]
    )
    early = resolve(config_of(content), replace(FACTS, hidden_size=None, total_steps=None))
    assert early.settings["zero_optimization"]["reduce_bucket_size"] == "auto"
    assert early.scheduler is not None and early.scheduler.params["total_num_steps"] == "auto"
    waiting = {"zero_optimization.reduce_bucket_size", "scheduler.params.total_num_steps"}
    assert not waiting & {key for key, _, _ in origin_table(early)}


OWN = "default: Hugging Face's; DeepSpeed has none"


def test_the_origin_table() -> None:
    config = config_of(
        {"bf16": {"enabled": "auto"}, "train_batch_size": 8, "fp16": {"loss_scale": "auto"}}
    )
    facts = replace(FACTS, device="cpu")
    table = origin_table(resolve(config, facts))
    assert [row[:2] for row in table] == [
        ("bf16.enabled", "false"),
        ("fp16.loss_scale", "-"),
        ("gradient_accumulation_steps", "1"),
        ("gradient_clipping", "1.0"),
        ("optimizer.params.betas", "[0.9, 0.999]"),
        ("optimizer.params.eps", "1e-08"),
        ("optimizer.params.lr", "5e-05"),
        ("optimizer.params.weight_decay", "0.0"),
        ("optimizer.type", '"AdamW"'),
        ("train_micro_batch_size_per_gpu", "4"),
    ]
    shows_each(
        [row[2] for row in table],
        ("auto", "device cpu", "float32"),
        ("auto", "DeepSpeed's default"),
        ("auto: 1", "no other batch size"),
        "default",
        *[OWN] * 5,
        ("auto", "train_batch_size", "2 data ranks"),
    )


@pytest.mark.parametrize(
    ("facts", "fp16", "bf16"),
    [
        (FACTS, "auto", True),
        (replace(FACTS, bf16=False), "auto", False),
        (replace(FACTS, device="cpu"), "auto", False),
        (FACTS, True, False),
    ],
)
def test_precision(facts: RuntimeFacts, fp16: Any, bf16: bool) -> None:
    values = resolved({"bf16": {"enabled": "auto"}, "fp16": {"enabled": fp16}}, facts)
    assert (values["fp16.enabled"], values["bf16.enabled"]) == (fp16 is True, bf16)


def test_warm_up_follows_the_written_learning_rate_and_is_one_step() -> None:
    content = {
        "optimizer": {"type": "Adam", "params": {"lr": 0.25}},
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_max_lr": "auto", "warmup_num_steps": "auto"},
        },
    }
    values = resolved(content, replace(FACTS, total_steps=4))
    assert (
        values["scheduler.params.warmup_max_lr"],
        values["scheduler.params.warmup_num_steps"],
    ) == (0.25, 1)


def fill(
    train: int | None, micro: int | None, accumulation: int | None, ranks: int
) -> tuple[int, ...]:
    given_ = dict(zip(BATCH, (train, micro, accumulation), strict=True))
    content = {name: value for name, value in given_.items() if value is not None}
    values = resolved(content, replace(FACTS, world_size=ranks))
    return tuple(values[name] for name in BATCH)


sizes = st.integers(1, 12)


@quick
@given(sizes, sizes, sizes, st.sets(st.sampled_from(range(3)), max_size=1))
def test_any_two_batch_sizes_give_the_third(
    micro: int, accumulation: int, ranks: int, hidden: set[int]
) -> None:
    whole = (micro * accumulation * ranks, micro, accumulation)
    part = [None if at in hidden else value for at, value in enumerate(whole)]
    assert fill(part[0], part[1], part[2], ranks) == whole


@quick
@given(sizes, sizes, sizes, st.integers(1, 300))
def test_three_batch_sizes_that_do_not_fit_are_an_error(
    micro: int, accumulation: int, ranks: int, train: int
) -> None:
    product = micro * accumulation * ranks
    if train == product:
        return
    content = dict(zip(BATCH, (train, micro, accumulation), strict=True))
    text = failure(content, replace(FACTS, world_size=ranks))
    assert text.startswith(f"train_batch_size: saw {train}")
    assert f"{micro} (micro-batch)" in text and f"{accumulation} (accumulation)" in text
    assert f"{ranks} (data ranks) = {product}" in text
    # what is said to mend it does
    named = text.partition(" Set ")[2].partition(" to ")[0].split(" or ")
    for name in named:
        resolved(content | {name: "auto"}, replace(FACTS, world_size=ranks))
    if nearest := re.search(r"such as (\d+) or (\d+)\.", text):
        assert named == [BATCH[0]]
        assert all(abs(int(batch) - train) <= 2 * micro * ranks for batch in nearest.groups())
        for batch in nearest.groups():
            resolved(
                content | {BATCH[0]: int(batch), BATCH[2]: "auto"}, replace(FACTS, world_size=ranks)
            )


def test_one_batch_size_or_none() -> None:
    assert fill(12, None, None, 2) == (12, 6, 1)
    assert fill(None, 3, None, 2) == (6, 3, 1)
    assert fill(None, None, 3, 2) == (6, 1, 3)
    assert fill(None, None, None, 2) == (2, 1, 1)


@pytest.mark.parametrize(
    ("content", "keys"),
    [
        ({BATCH[0]: 7}, ("saw 7", "multiple of 2", "6 or 8")),
        (
            {BATCH[0]: 16, BATCH[1]: 3},
            ("saw 16", "multiple of 3", "x 2", "12 or 18"),
        ),
        (
            {BATCH[0]: 2, BATCH[2]: 4},
            ("saw 2", "multiple of 4", "x 2", "8 or 16"),
        ),
    ],
)
def test_batches_that_can_not_be_divided(content: dict[str, int], keys: tuple[str, ...]) -> None:
    shows(failure(content), f"train_batch_size: {keys[0]}", *keys[1:])


def mesh_content(pipeline: int, tensor: int, stage: int, **mesh: int) -> dict[str, Any]:
    return {
        "pipeline": {"stages": pipeline},
        "tensor_parallel": {"autotp_size": tensor},
        "zero_optimization": {"stage": stage},
        "trainer": {"mesh": mesh},
    }


axis = st.integers(1, 4)


@quick
@given(axis, axis, axis, axis, st.sampled_from(["replicate", "shard", ""]), st.booleans())
def test_mesh_sizes_multiply_to_the_world(
    p: int, r: int, s: int, t: int, free: str, written: bool
) -> None:
    mesh = {"replicate": r, "shard": s}
    if free:
        mesh = (
            mesh | {free: -1}
            if written
            else {name: size for name, size in mesh.items() if name != free}
        )
    result = mesh_sizes(config_of(mesh_content(p, t, 2, **mesh)), p * r * s * t)
    assert (result.pipeline, result.replicate, result.shard, result.tensor) == (p, r, s, t)
    assert result.data_ranks == r * s


@quick
@given(axis, axis, axis, st.integers(0, 3))
def test_without_a_mesh_the_stage_decides(p: int, t: int, ranks: int, stage: int) -> None:
    result = mesh_sizes(config_of(mesh_content(p, t, stage)), p * t * ranks)
    assert (result.replicate, result.shard) == ((1, ranks) if stage else (ranks, 1))


def test_batch_sizes_count_data_ranks_not_processes() -> None:
    content = mesh_content(2, 2, 1) | {"train_batch_size": 12, "gradient_accumulation_steps": 2}
    assert resolved(content, replace(FACTS, world_size=8))["train_micro_batch_size_per_gpu"] == 3


@pytest.mark.parametrize(
    ("content", "keys"),
    [
        (
            mesh_content(3, 2, 0),
            (
                "world size: 8",
                "divisible by 3",
                "x 2 (tensor)",
                "multiple of 6",
                "6 or 12",
                "pipeline.stages",
            ),
        ),
        (
            mesh_content(1, 1, 3, replicate=2, shard=3),
            ("trainer.mesh: saw 2 (replicate) x 3 (shard)", "product of 8", "-1"),
        ),
        (
            mesh_content(1, 1, 0, shard=4),
            (
                "trainer.mesh.shard: saw 4 with ZeRO stage 0",
                "expected 1",
                "zero_optimization.stage",
            ),
        ),
    ],
)
def test_meshes_that_do_not_fit(content: dict[str, Any], keys: tuple[str, ...]) -> None:
    shows(failure(content, replace(FACTS, world_size=8)), *keys)


WARM = {
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_num_steps": "auto", "warmup_max_lr": "auto"},
    }
}


@pytest.mark.parametrize(
    ("ratio", "steps", "warm"), [(0.03, 200, 6), (0.031, 200, 7), (0.0, 200, 1), (1 / 3, 99, 33)]
)
def test_a_warm_up_may_be_a_share_of_the_steps(ratio, steps, warm):
    """Rounded up, as by `TrainingArguments.get_warmup_steps`; not known before the steps are."""
    config = config_of({**WARM, "trainer": {"warmup_ratio": ratio}})
    waiting = resolve(config, replace(FACTS, total_steps=None))
    assert waiting.settings["scheduler"]["params"]["warmup_num_steps"] == "auto"
    result = resolve(waiting, replace(FACTS, total_steps=steps))
    assert result.settings["scheduler"]["params"]["warmup_num_steps"] == warm
    assert (
        f"of {steps} steps (trainer.warmup_ratio)"
        in result.origins["scheduler.params.warmup_num_steps"]
    )
    again = config_of(
        {**result.settings, "trainer": result.trainer.model_dump()}
    )  # what a run writes as its config
    assert resolve(again, FACTS).settings["scheduler"] == result.settings["scheduler"]


@pytest.mark.parametrize(
    "scheduler", [{}, {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 20}}}]
)
def test_a_share_of_the_steps_that_decides_nothing_is_an_error(scheduler):
    with pytest.raises(ConfigError, match="trainer.warmup_ratio: saw 0.1"):
        config_of({**scheduler, "trainer": {"warmup_ratio": 0.1}})


def test_intervals_may_be_shares_of_the_steps():
    every = {"checkpoint": {"every": 0.5, "keep_best": True}, "evaluation": {"every": 0.5}}
    config = config_of({"trainer": every})
    assert resolve(config, replace(FACTS, total_steps=None)).trainer.checkpoint.every == 0.5
    result = resolve(config, replace(FACTS, total_steps=101)).trainer
    assert (result.checkpoint.every, result.evaluation.every) == (51, 51)
    with raises(ConfigError, "evaluation at each"):
        config_of({"trainer": {**every, "evaluation": {"every": 0.25}}})
    with pytest.raises(ConfigError, match="trainer.checkpoint.every"):
        config_of({"trainer": {"checkpoint": {"every": 1.5}}})
