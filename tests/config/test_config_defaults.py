"""Each key that is left out, against what DeepSpeed's own classes make of it: those of the version
that is installed.

Another version is tried by `PYTHONPATH=FOLDER pytest tests/config/test_config_defaults.py`, with
its source in FOLDER.
"""

from __future__ import annotations

import contextlib
import inspect
import json
from collections.abc import Iterator, Mapping
from copy import deepcopy
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from packaging.version import Version

from tests.support.messages import raises
from trainer.config import Config, RuntimeFacts, load, mesh_sizes, origin_table, resolve, support
from trainer.config.keys import DIFFERS, KEYS, LOW_PRECISION, RENAMED, SCHEDULERS
from trainer.config.keys.hints import useless
from trainer.config.keys.key import coerce
from trainer.config.read import leaves
from trainer.errors import ConfigError
from trainer.layout import layout_of
from trainer.optim.builders import in_deepspeed, in_torch
from trainer.optim.lr_schedules import SCHEDULES

HERE = Path(__file__).parent
PUBLIC = sorted((HERE / "foreign_configs").glob("*.json"))
FACTS = RuntimeFacts(world_size=4, hidden_size=64, total_steps=100, bf16=True, device="cuda")
EARLIER = {"gradient_clipping": ("0.19.3", 0.0)}
"""Defaults that DeepSpeed changed: in which version, and what it was before. Ours is that of the
latest.
"""


def parsed(content: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch, ranks: int = 1) -> Any:
    from deepspeed.runtime.config import DeepSpeedConfig

    monkeypatch.setattr("deepspeed.comm.get_rank", lambda: 0)
    mpu = SimpleNamespace(get_data_parallel_world_size=lambda: ranks)
    return DeepSpeedConfig({"train_micro_batch_size_per_gpu": 1, **content}, mpu=mpu)


SECTIONS = {
    "zero_optimization": "zero_config",
    "fp16": "float16_config",
    "bf16": "bfloat16_config",
    "flops_profiler": "flops_profiler_config",
    "activation_checkpointing": "activation_checkpointing_config",
    "tensor_parallel": "tensor_parallel_config",
    "compile": "compile_config",
    "timers.throughput": "timers_config",
    "aio": "aio_config",
    "pipeline": "pipeline",
    "hybrid_engine": "hybrid_engine",
    "data_efficiency": "data_efficiency_config",
    "autotuning": "autotuning_config",
    "checkpoint": "checkpoint_config",
    **{name: f"monitor_config.{name}" for name in ("tensorboard", "csv_monitor", "wandb", "comet")},
    "data_types": "",
}
"""What DeepSpeed calls a section once it is parsed."""
NAMES = {
    "stage3_": "",
    "torch_autocast.": "torch_autocast_",
    "optimizer.legacy": "optimizer_legacy",
}


def classes(config: Any) -> dict[str, Any]:
    """Sections that DeepSpeed makes only where they are asked for."""
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.runtime.zenflow.zenflow_config import ZenFlowConfig
    from deepspeed.runtime.zero.offload_config import (
        DeepSpeedZeroOffloadOptimizerConfig,
        DeepSpeedZeroOffloadParamConfig,
    )

    zero = config.zero_config
    return {
        "comms_logger": getattr(config.comms_config, "comms_logger", None) or CommsLoggerConfig(),
        "zero_optimization.zenflow": getattr(zero, "zenflow", None) or ZenFlowConfig(),
        "zero_optimization.offload_optimizer": zero.offload_optimizer
        or DeepSpeedZeroOffloadOptimizerConfig(),
        "zero_optimization.offload_param": zero.offload_param or DeepSpeedZeroOffloadParamConfig(),
    }


MISSING = object()


def at(root: Any, path: str) -> Any:
    for name in filter(None, path.split(".")):
        known = (
            root
            if isinstance(root, dict)
            else {key: getattr(root, key) for key in dir(root) if key == name}
        )
        if name not in known:
            return MISSING
        root = known[name]
    return root


def read_by_deepspeed(
    content: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch, ranks: int = 1
) -> dict[str, Any]:
    """What DeepSpeed makes of each key of the table, whether it is in `content` or left out."""
    config, result = parsed(content, monkeypatch, ranks), {}
    own = classes(config)
    for path, key in KEYS.items():
        if key.kind == "section" or path in RENAMED or path in NOT_VALUES:
            continue
        section = max(
            (name for name in {**SECTIONS, **own} if path.startswith(f"{name}.")),
            key=len,
            default="",
        )
        name = path.removeprefix(f"{section}.")
        for old, new in NAMES.items():
            name = name.replace(old, new)
        root, place = (own[section], "") if section in own else (config, SECTIONS.get(section, ""))
        value = at(root, f"{place}.{name}")
        if value is not MISSING and not callable(value):
            result[path] = getattr(value, "value", value)
    return result


NOT_VALUES = ("comms_config", "monitor_config")
"""What DeepSpeed names so is made of other keys."""


@pytest.fixture(scope="module")
def theirs() -> Iterator[dict[str, Any]]:
    """The default of every key of the table that DeepSpeed has one for."""
    with pytest.MonkeyPatch.context() as patch:
        result = read_by_deepspeed({}, patch)
    yield result | dict.fromkeys(BATCH)


BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
FREE = useless(KEYS)
"""Keys that have no effect here, each with its reason."""
VERSION = Version(version("deepspeed"))
CHANGED = {path for path, (since, _) in EARLIER.items() if Version(since) > VERSION}


def compiled(content: dict[str, Any]) -> Config:
    return resolve(load(deepcopy(content)), FACTS)


def written(tree: Any, place: str = "") -> Any:
    """A user's file without "auto" and without what has no effect here."""
    if not isinstance(tree, dict):
        return tree
    kept = {
        name: it
        for name, it in tree.items()
        if it != "auto" and f"{place}{name}" not in {*FREE, *NOT_THEIRS}
    }
    return {name: written(it, f"{place}{name}.") for name, it in kept.items()}


NOT_THEIRS = ("trainer", "zero_optimization.mics_shard_size")


def test_every_key_that_has_an_effect_has_a_default_of_deepspeeds(theirs: dict[str, Any]) -> None:
    requests = {
        path
        for path, key in KEYS.items()
        if key.kind != "section" and path not in {**FREE, **RENAMED}
    }
    requests = {path for path in requests if not path.startswith("bfloat16.")}
    without, removed = {"optimizer.type", "scheduler.type"}, {"zero_optimization.mics_shard_size"}
    without |= {"tensor_parallel.sequence_parallel"}  # DeepSpeed has no such key
    without |= {"sequence_parallel_size"}  # which it reads where it makes its mesh
    without |= {"expert_parallel.enabled", "expert_parallel.autoep_size"}  # parsed by AutoEP
    new = {path for path in LATER if Version(LATER[path]) > VERSION}
    assert without <= requests - theirs.keys() <= without | removed | new


LATER = {
    **dict.fromkeys(
        ("data_types.buffer_dtype", "data_types.param_dtype", "gradient_allreduce_op"), "0.19.7"
    ),
    **dict.fromkeys(("log_level", "zero_optimization.parameter_alignment"), "0.19.7"),
    **dict.fromkeys(("data_types.keep_in_fp32_modules", "disable_python_gc"), "0.19.8"),
}
"""Keys that DeepSpeed 0.18.9 has not, and a version that has them."""


CONTENTS: list[dict[str, Any]] = [
    {},
    {"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}},
    {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
    {
        "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}},
        "fp16": {"enabled": True},
    },
    {
        "pipeline": {"stages": 1},
        "tensor_parallel": {"autotp_size": 1},
        "data_types": {},
        "aio": {"queue_depth": 4},
    },
    {
        "flops_profiler": {"enabled": True},
        "comms_logger": {"enabled": True},
        "timers": {"throughput": {}},
    },
]


@pytest.mark.parametrize(
    "content", [*CONTENTS, *PUBLIC], ids=lambda it: it.stem if isinstance(it, Path) else None
)
def test_deepspeed_makes_the_same_of_what_it_is_given_as_of_the_users_file(
    content: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deepspeed.runtime.config import DtypeEnum

    content = json.loads(content.read_text()) if isinstance(content, Path) else content
    config = compiled(content)
    ranks, sizes = (
        mesh_sizes(config, FACTS.world_size).data_ranks,
        {name: config.settings[name] for name in BATCH},
    )
    before = read_by_deepspeed({**written(content), **sizes}, monkeypatch, ranks)
    after = read_by_deepspeed(config.deepspeed, monkeypatch, ranks)
    autos = {path for path, value in leaves(content) if value == "auto"}
    noted = {
        path
        for path in before
        for note in config.notes
        if note.startswith(path.rpartition(".")[0] + " has no ")
    }
    for path in before.keys() & after.keys():
        if KEYS[path].kind == "dtype" and before[path] is not None:
            before[path] = DtypeEnum(before[path])  # DeepSpeed's own reading of a dtype's names
            after[path] = DtypeEnum(after[path])
    moved = {
        path for path in before.keys() - FREE.keys() - autos - noted if before[path] != after[path]
    }
    assert moved == CHANGED & moved - {path for path, _ in leaves(content)}, {
        path: before[path] for path in moved
    }


def test_defaults_are_those_of_the_installed_version_or_known_to_be_of_a_later_one(
    theirs: dict[str, Any],
) -> None:
    for path, (since, before) in EARLIER.items():
        assert theirs[path] == (before if Version(since) > VERSION else KEYS[path].default)


def put(content: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    content = deepcopy(content)
    *sections, name = path.split(".")
    inner = content
    for section in sections:
        inner = inner.setdefault(section, {})
    inner[name] = value
    return content


def consequences(content: dict[str, Any]) -> Any:
    config = compiled(content)
    layout = layout_of(config, FACTS.world_size)
    recipes = [
        made(config.settings, layout, "cpu", grouped)
        for made in (in_torch, in_deepspeed)
        for grouped in (0, 1)
    ]
    return (
        layout,
        recipes,
        support.refusals(config),
        config.settings["gradient_clipping"],
        config.scheduler,
    )


@pytest.mark.parametrize("content", CONTENTS)
def test_a_key_that_is_left_out_is_its_default_of_deepspeeds_on_every_engine(
    content: dict[str, Any], theirs: dict[str, Any]
) -> None:
    tried = 0
    for path, value in theirs.items():
        plain = value is None or isinstance(value, bool | int | float | str | list)
        if (
            path in FREE
            or not plain
            or "zenflow" in path
            or (value is None and not KEYS[path].null)
            or path in CHANGED
        ):
            continue
        if at(content, path) is not MISSING:
            continue
        assert consequences(put(content, path, value)) == consequences(content), path
        tried += 1
    assert tried > 80


def test_what_the_other_engines_do_in_place_of_a_key_is_its_default_where_numbers_depend_on_it(
    theirs: dict[str, Any],
) -> None:
    from deepspeed.runtime.engine import DeepSpeedEngine

    numbers = {path for path, key in KEYS.items() if key.changes_numbers and path in theirs}
    # which needs a section that is off where it is left out
    assert {path for path in numbers if KEYS[path].asks(theirs[path])} == {
        f"zero_optimization.zenflow.{name}"
        for name in ("topk_ratio", "auto_ratio", "pt_reserved_cores_perc")
    }
    off, on = (lambda: False), (lambda: True)
    low = SimpleNamespace(
        _config=SimpleNamespace(communication_data_type=None, grad_accum_dtype=None),
        fp16_enabled=off,
        bfloat16_enabled=on,
    )
    assert (
        DeepSpeedEngine.communication_data_type.fget(low)
        == DeepSpeedEngine.get_data_types(low)[1]
        == torch.bfloat16
    )
    assert {"optimizer", *LOW_PRECISION} == DIFFERS.keys()


def test_dry_run_says_where_a_default_is_not_deepspeeds() -> None:
    rows = {path: origin for path, _, origin in origin_table(compiled({"bf16": {"enabled": True}}))}
    assert {
        path
        for path, origin in rows.items()
        if origin.removeprefix("default: ") in DIFFERS.values()
    } == {
        *LOW_PRECISION,
        *(
            f"optimizer.{name}"
            for name in ("type", "params.lr", "params.betas", "params.eps", "params.weight_decay")
        ),
    }
    plain = {path for path, _, _ in origin_table(compiled({"bf16": {"enabled": False}}))}
    assert not plain & set(LOW_PRECISION)
    written = {"bf16": {"enabled": True}, "communication_data_type": "fp32"}
    assert "communication_data_type" not in {path for path, _, _ in origin_table(compiled(written))}


@pytest.mark.parametrize("name", [name for name in SCHEDULERS if not name.islower()])
def test_a_schedules_parameter_that_is_left_out_is_deepspeeds(name: str) -> None:
    from deepspeed.runtime import lr_schedules

    theirs = inspect.signature(getattr(lr_schedules, name).__init__).parameters
    ours: dict[str, inspect.Parameter] = {}
    kind: Any = SCHEDULES[name]
    for function in (SCHEDULES["WarmupLR"], kind) if name.startswith("WarmupDecay") else (kind,):
        ours |= inspect.signature(function).parameters
    assert theirs["last_batch_iteration"].default == -1
    for key in set(SCHEDULERS[name]) - {"last_batch_iteration"}:
        assert ours[key].default == theirs[key].default, key


@pytest.mark.parametrize("name", [name for name in SCHEDULERS if not name.islower()])
def test_a_schedule_that_starts_in_mid_run_is_refused(name: str) -> None:
    needed = {"total_num_steps": 9, "cycle_min_lr": 0.1, "cycle_max_lr": 1.0}
    params = {key: value for key, value in needed.items() if key in SCHEDULERS[name]}
    plain = compiled({"scheduler": {"type": name, "params": params}})
    first = compiled({"scheduler": {"type": name, "params": params | {"last_batch_iteration": -1}}})
    assert (first.settings, first.notes) == (plain.settings, plain.notes)
    for start in (0, 5):
        with raises(ConfigError, "last_batch_iteration", "run counts"):
            compiled(
                {"scheduler": {"type": name, "params": params | {"last_batch_iteration": start}}}
            )


# What has no effect is said


def test_every_value_but_the_default_asks_for_something(theirs: dict[str, Any]) -> None:
    for path, key in KEYS.items():
        if key.kind == "section" or not (key.instead or key.idle):
            continue
        for value in (*(() if key.kind == "any" else (True, False)), 0, 1, 7, "x"):
            with contextlib.suppress(ValueError):
                if coerce(value, key) not in (theirs.get(path, False), *key.usual):
                    assert key.asks(coerce(value, key)), (path, value)


def refused(path: str) -> bool:
    """Whether a key was removed; 0 is false there."""
    return bool(KEYS[path].refused)


def asks(path: str, value: Any, theirs: dict[str, Any]) -> bool:
    """Whether a value says something else than DeepSpeed's default, and than the table says is done
    here.
    """
    with contextlib.suppress(ValueError):
        value = coerce(value, KEYS[path])
    if (
        value is None
        or value in ("auto", "", [], {})
        or value in KEYS[path].usual
        or (refused(path) and not value)
    ):
        return False
    return value is not False if path not in theirs else value != (theirs[path] or False)


VALUES = st.sampled_from(
    [True, False, 0, 1, 2, 8, 0.5, "x", "0,1", "fp32", "bf16", [], ["a"], {}, None, "auto"]
)
BASES = st.sampled_from(
    [*CONTENTS, {"data_efficiency": {"enabled": False}}, {"zero_optimization": {"stage": 0}}]
)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(BASES, st.sampled_from([path for path in KEYS if KEYS[path].kind != "section"]), VALUES)
def test_any_known_key_is_used_noted_or_refused(
    theirs: dict[str, Any], base: dict[str, Any], path: str, value: Any
) -> None:
    content, now = put(base, path, value), path.replace("bfloat16", "bf16")
    try:
        config = load(content)
    except ConfigError as error:
        section = path.partition(".")[0]
        assert any(
            problem.place.startswith((section, now)) or now in str(problem)
            for problem in error.problems
        )
        return
    places = [
        place.rsplit(".", cut)[0] for place in (path, now) for cut in range(path.count(".") + 1)
    ]
    noted = any(
        f" {place} " in f" {note} ".replace(",", " ") for place in places for note in config.notes
    )
    used = at(config.settings, RENAMED.get(path, now)) is not MISSING and not unswitched(
        content, path
    )
    used |= any(origin.endswith(f"from {path}") for origin in config.origins.values())
    off = any(
        isinstance(at(content, place), dict) and at(content, place).get("enabled") is False
        for place in places
    )
    assert used or noted or off or not asks(path, value, theirs), (content, config.notes)


def unswitched(content: dict[str, Any], path: str) -> bool:
    """Whether the section of a key has a switch that is not in it."""
    section = path.rpartition(".")[0]
    switches = [
        f"{section}.{name}"
        for name in ("enabled", "device", "stage")
        if f"{section}.{name}" in KEYS
    ]
    return any(at(content, switch) is MISSING and "timers" not in switch for switch in switches)
