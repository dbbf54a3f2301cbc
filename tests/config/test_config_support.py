"""Which keys each engine honours: the table against what the engines read, and what a person is
told of the others.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.messages import shows, shows_each
from tests.support.pool import Pools
from trainer.config import Config, RuntimeFacts, load, resolve, support
from trainer.config.keys import KEYS, RENAMED
from trainer.config.keys.key import Key
from trainer.config.read import leaves
from trainer.errors import ConfigError


def compile_(folder: Path, content: dict[str, Any], *overrides: str) -> Config:
    path = folder / "c.json"
    path.write_text(json.dumps(content))
    return load(path, overrides)


ENGINES = ("deepspeed", "accelerate", "mesh")


def test_what_is_only_deepspeeds_own_is_noted_where_the_user_wrote_it(tmp_path: Path) -> None:
    zero = {
        "stage": 3,
        "overlap_comm": False,
        "reduce_bucket_size": "auto",
        "prefetch_bucket_size": 5,
        "contiguous_gradients": True,
        "offload_optimizer": {"device": "none", "ratio": 0.5},
        "offload_param": {"device": "cpu", "pin_memory": False},
    }
    content = {
        "zero_optimization": zero,
        "fp16": {"enabled": False, "initial_scale_power": 20},
        "flops_profiler": {"enabled": False, "profile_step": 3},
        "wall_clock_breakdown": True,
        "memory_breakdown": False,
        "communication_data_type": "fp32",
    }
    config = compile_(tmp_path, content, "zero_optimization.sub_group_size=7")
    config = resolve(config, RuntimeFacts(2, 64, 10, False, "cpu"))
    assert support.refusals(config) == {} and support.notes(config, "deepspeed") == []
    for engine in ("accelerate", "mesh"):
        shows_each(
            support.notes(config, engine),
            (engine, "zero_optimization.overlap_comm", "always overlaps"),
            (engine, "zero_optimization.offload_param.pin_memory", "pins"),
            (engine, "zero_optimization.sub_group_size", "buckets"),
            (engine, "zero_optimization.stage3_prefetch_bucket_size", "a block ahead"),
            (engine, "wall_clock_breakdown", "metrics.jsonl"),
        )


@pytest.mark.first("section0")
@pytest.mark.parametrize(
    "section",
    [
        {"data_types": {"grad_accum_dtype": "bf16"}},
        {"data_types": {"buffer_dtype": "bf16"}},
        {"zero_optimization": {"stage": 3, "zero_quantized_weights": True}},
        {"zero_optimization": {"stage": 3, "zero_quantized_gradients": True}},
        {"zero_optimization": {"stage": 2, "zenflow": {"topk_ratio": 0.1}}},
    ],
)
def test_other_numbers_are_refused_and_auto_goes_to_deepspeed(
    tmp_path: Path, section: dict[str, Any]
) -> None:
    from trainer.engines import select
    from trainer.layout import layout_of

    config = resolve(compile_(tmp_path, section), RuntimeFacts(2, None, None, False, "cpu"))
    layout = layout_of(config, 2)
    assert set(support.refusals(config)) == {"accelerate", "mesh"}
    assert select("auto", layout, config, "cpu")[0] == "deepspeed"
    ((place, value),) = [(k, v) for k, v in leaves(section) if KEYS[k].changes_numbers]
    with pytest.raises(ConfigError) as caught:
        select("mesh", layout, config, "cpu")
    shows(caught.value, f"honour {place} {json.dumps(value)}: {KEYS[place].instead}.")


@pytest.mark.parametrize("name", ["fp32", "float32", "torch.float32", "Float"])
def test_a_dtype_under_each_of_its_names_is_the_same(tmp_path: Path, name: str) -> None:
    content = {"data_types": {"grad_accum_dtype": name, "buffer_dtype": name}}
    config = resolve(compile_(tmp_path, content), RuntimeFacts(2, None, None, False, "cpu"))
    assert config.settings["data_types"]["grad_accum_dtype"] == "fp32"
    assert "mesh" not in support.refusals(config)


LOW = {"enabled": True, "bf16_master_weights_and_grads": True}
STATES = LOW | {"bf16_optimizer_states": True}
IN_LOW_PRECISION: dict[str, tuple[dict[str, Any], str | None]] = {
    "sums without ZeRO": ({"communication_data_type": "bf16"}, None),
    "sums without ZeRO in a pipeline": (
        {"communication_data_type": "bf16", "pipeline": {"stages": 2}},
        None,
    ),
    "sums in float16": ({"communication_data_type": "fp16"}, "need a loss scale"),
    "sums of ZeRO-2 in a pipeline": (
        {
            "communication_data_type": "bf16",
            "zero_optimization": {"stage": 2},
            "pipeline": {"stages": 2},
        },
        "add gradients up",
    ),
    "sums of ZeRO-2 in float16": (
        {"communication_data_type": "fp16", "zero_optimization": {"stage": 2}},
        "need a loss scale",
    ),
    "sums of ZeRO-2": (
        {"communication_data_type": "bf16", "zero_optimization": {"stage": 2}},
        None,
    ),
    "sums in float32": ({"communication_data_type": "fp32"}, None),
    "weights": ({"zero_optimization": {"stage": 2}, "bf16": LOW}, "no float32 state"),
    "weights and states, sums in float32": (
        {
            "zero_optimization": {"stage": 2},
            "bf16": STATES,
            "data_types": {"grad_accum_dtype": "fp32"},
        },
        "adds gradients up",
    ),
    "weights, states and sums": (
        {
            "zero_optimization": {"stage": 2},
            "bf16": STATES,
            "data_types": {"grad_accum_dtype": "bf16"},
        },
        None,
    ),
    "nothing": ({"zero_optimization": {"stage": 2}, "bf16": STATES | {"enabled": False}}, None),
}
"""A config, and why two engines can't run it: they would compute in low precision."""


@pytest.mark.more
@pytest.mark.parametrize("name", IN_LOW_PRECISION)
def test_what_is_in_low_precision_is_kept_so_or_refused(tmp_path: Path, name: str) -> None:
    content, reason = IN_LOW_PRECISION[name]
    config = resolve(compile_(tmp_path, content), RuntimeFacts(2, None, None, False, "cpu"))
    refused = support.refusals(config)
    assert set(refused) == ({"accelerate", "mesh"} if reason else set())
    for text in refused.values():
        shows(text, str(reason))


class Recording(dict[str, Any]):
    """A section that notes the path of every leaf that is read."""

    def __init__(self, values: dict[str, Any], seen: set[str], path: str = "") -> None:
        super().__init__(
            {
                k: Recording(v, seen, f"{path}{k}.") if isinstance(v, dict) else v
                for k, v in values.items()
            }
        )
        self.seen, self.path = seen, path

    def __getitem__(self, key: str) -> Any:
        self.seen.add(self.path + key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.seen.add(self.path + key)
        return super().get(key, default)

    def __iter__(self) -> Iterator[str]:
        self.seen.update(self.path + key for key in super().__iter__())
        return super().__iter__()

    def keys(self) -> Any:
        return list(self)

    def items(self) -> Any:
        return [(key, self[key]) for key in self]


def step_by(content: dict[str, Any], engine: str, folder: str, seen: set[str]) -> None:
    """Two steps of a tiny model by an engine, from the JSON; what is read of it goes to `seen`.
    Runs on each rank.
    """
    from dataclasses import replace

    import torch
    import torch.distributed as dist

    from tests.support.training import LLAMA, VOCABULARY, spec_of, task_of
    from trainer.distributed.ranks import Ranks
    from trainer.engines import ENGINES, Job, Machine
    from trainer.layout import layout_of
    from trainer.optim.lr_schedules import Update

    path = Path(folder) / f"{dist.get_rank()}.json"
    path.write_text(json.dumps(content))
    size = dist.get_world_size()
    config = resolve(load(path), RuntimeFacts(size, 32, 10, False, "cpu"))
    layout = layout_of(replace(config, settings=Recording(config.settings, seen)), size)
    spec = spec_of({**LLAMA, "num_hidden_layers": 2, "attention_dropout": 0.0})
    ranks = Ranks(dist.get_rank(), size)
    machine = Machine(torch.device("cpu"), ranks)
    task = task_of(spec)
    job = Job(layout, spec, task, Recording(config.deepspeed, seen), 5, machine)
    built = ENGINES[engine].build(job)
    import numpy as np

    ids = np.arange(9) % VOCABULARY
    batch = [
        {"input_ids": ids[:-1].astype(np.int32), "targets": ids[1:].astype(np.int64)}
    ] * layout.micro_batch
    for step in range(3):
        built.step(step, [task.collate(batch)] * layout.accumulation, Update(1e-3))
    built.close()


def read_by_torch(engine: str, contents: list[dict[str, Any]], folder: str) -> set[str]:
    actual: set[str] = set()
    for content in contents:
        step_by(content, engine, folder, actual)
    return actual


def read_by_deepspeed(contents: list[dict[str, Any]], folder: str) -> set[str]:
    """The paths of what DeepSpeed reads of its config outside of the files that parse it. Runs on
    each rank.
    """
    from tests.support.training import Case, allow_float16

    allow_float16(Case(precision="float16"))
    actual: set[str] = set()
    with watching(actual):
        for content in contents:
            step_by(content, "deepspeed", folder, set())
    return actual


PARSERS = (
    "pydantic",
    "/runtime/config.py",
    "config_utils.py",
    "/zero/config.py",
    "precision_config.py",
    "copy.py",
)


@contextmanager
def watching(seen: set[str]) -> Iterator[None]:
    """Notes each attribute of DeepSpeed's config objects that is read elsewhere than where they are
    made.
    """
    from deepspeed.profiling.config import DeepSpeedFlopsProfilerConfig
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.runtime.config_utils import DeepSpeedConfigModel

    kinds = (DeepSpeedConfig, DeepSpeedConfigModel, DeepSpeedFlopsProfilerConfig)

    def watch(kind: type) -> Any:
        def getattribute(self: Any, name: str) -> Any:
            file = sys._getframe(1).f_code.co_filename
            if not name.startswith("_") and not any(part in file for part in PARSERS):
                seen.add(f"{type(self).__name__}.{name}")
            return object.__getattribute__(self, name)

        return getattribute

    for kind in kinds:
        kind.__getattribute__ = watch(kind)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for kind in kinds:
            del kind.__getattribute__


def content_of(stage: int, **more: Any) -> dict[str, Any]:
    zero = {"stage": stage, **more.pop("zero_optimization", {})}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "zero_optimization": zero,
        **more,
    }


TORCH_ADAM: dict[str, Any] = {
    "optimizer": {"type": "AdamW", "params": {"torch_adam": True, "lr": 1e-3}},
    "zero_force_ds_cpu_optimizer": False,
}
"""Nothing is compiled for it."""
CPU = {"device": "cpu", "pin_memory": False}
LOUD = {
    "wall_clock_breakdown": True,
    "memory_breakdown": True,
    "flops_profiler": {"enabled": True, "profile_step": 1},
    "comms_logger": {"enabled": True},
}


@pytest.mark.more
def test_the_table_says_what_deepspeed_reads(pools: Pools, tmp_path: Path) -> None:
    contents = [
        content_of(0, timers={"throughput": {"enabled": True}}, **LOUD),
        content_of(1, bf16={"enabled": True}, data_types={"grad_accum_dtype": "fp32"}),
        content_of(1, fp16={"enabled": True}, tensor_parallel={"autotp_size": 2}),
        content_of(
            3,
            zero_optimization={"offload_optimizer": dict(CPU), "offload_param": dict(CPU)},
            **TORCH_ADAM,
        ),
    ]
    result = pools[2].run(read_by_deepspeed, contents=contents, folder=str(tmp_path))[0]
    read = {path for name in result for path in paths_of(name)}
    requests = {path for path in HONOURED if not path.startswith(DEEPER)}
    requests -= {"tensor_parallel.sequence_parallel"}  # no key of its own: its engine refuses it
    # the table says that DeepSpeed honours it
    assert sorted(requests - read) == []
    idle = {path for path in read if path in KEYS and KEYS[path].idle}
    assert idle - {"disable_python_gc"} == LEFT_OUT  # which DeepSpeed has since 0.19.8


@pytest.mark.first("mesh")
@pytest.mark.parametrize("engine", ["accelerate", "mesh"])
def test_the_table_says_what_the_torch_engines_read(
    pools: Pools, tmp_path: Path, engine: str
) -> None:
    contents = [
        content_of(0),
        content_of(
            3, zero_optimization={"offload_optimizer": dict(CPU), "offload_param": dict(CPU)}
        ),
    ]
    if engine == "mesh":
        contents += [
            content_of(2, pipeline={"stages": 2}),
            content_of(2, tensor_parallel={"autotp_size": 2}),
        ]
    for content in contents:
        content |= {"bf16": {"enabled": False}, "fp16": {"enabled": False}}
        for path, key in KEYS.items():
            put_default(content, path, key)
    read = set.union(
        *pools[2].run(read_by_torch, engine=engine, contents=contents, folder=str(tmp_path))
    )
    requests = {path for path in HONOURED if not KEYS[path].instead}
    # the table says that it honours it
    assert sorted(requests - read) == []
    # the table says that it does not
    assert sorted(path for path in read if path in KEYS and KEYS[path].instead) == []


RENAMES = {
    "DeepSpeedConfig": "",
    "DeepSpeedZeroConfig": "zero_optimization.",
    "DeepSpeedZeroOffloadOptimizerConfig": "zero_optimization.offload_optimizer.",
    "DeepSpeedZeroOffloadParamConfig": "zero_optimization.offload_param.",
    "DeepSpeedZeroLeafModuleConfig": "zero_optimization.leaf_module.",
    "DeepSpeedFP16Config": "fp16.",
    "DeepSpeedBF16Config": "bf16.",
    "DeepSpeedFlopsProfilerConfig": "flops_profiler.",
    "CommsLoggerConfig": "comms_logger.",
    "DeepSpeedThroughputTimerConfig": "timers.throughput.",
    "TPTrainingConfig": "tensor_parallel.",
}
"""The section of each of DeepSpeed's classes."""
COMPOUND = {
    "grad_accum_dtype": ("data_types.grad_accum_dtype",),
    "param_dtype": ("data_types.param_dtype",),
    "buffer_dtype": ("data_types.buffer_dtype",),
    "keep_in_fp32_modules": ("data_types.keep_in_fp32_modules",),
    "optimizer_name": ("optimizer.type",),
    "zero_optimization_stage": ("zero_optimization.stage",),
    "aio_config": tuple(
        path for path, key in KEYS.items() if path.startswith("aio.") and not key.idle
    ),
    "monitor_config": (),
    "comms_config": ("comms_logger.enabled",),
    "dynamic_loss_scale_args": tuple(
        path for path in KEYS if path.startswith("fp16.") and "scale" in path
    )
    + ("fp16.hysteresis", "fp16.consecutive_hysteresis"),
}
"""What its config calls otherwise, or reads many keys of at once."""


def paths_of(name: str) -> tuple[str, ...]:
    kind, attribute = name.split(".")
    if attribute in COMPOUND:
        return COMPOUND[attribute]
    path = RENAMES.get(kind, "-") + attribute
    threes = path.replace("zero_optimization.", "zero_optimization.stage3_")
    return (threes if threes in KEYS else path,)


COMPILED = {
    *RENAMED,
    *(
        f"zero_optimization.{name}"
        for name in ("cpu_offload", "cpu_offload_param", "mics_shard_size")
    ),
    *(path for path in KEYS if path.startswith(("bfloat16.", "torch_autocast.", "scheduler."))),
    *("sequence_parallel_size", "gradient_allreduce_op", "pipeline.activation_checkpoint_interval"),
    *("pipeline.stages", "pipeline.partition", "optimizer.params"),
    *("expert_parallel.enabled", "expert_parallel.autoep_size"),
}
"""What the compiler or the layout turns into something else, or takes in one value only."""
HONOURED = {
    path
    for path, key in KEYS.items()
    if key.kind != "section"
    and path not in COMPILED
    and not any(
        known.idle or known.refused
        for name, known in KEYS.items()
        if f"{path}.".startswith(f"{name}.")
    )
}
"""By DeepSpeed at the least."""
DEEPER = (
    "zero_optimization.zenflow.",
    *(
        f"zero_optimization.offload_{which}.{key}"
        for which in ("param", "optimizer")
        for key in ("nvme", "buffer")
    ),
    "zero_allow_untested_optimizer",
)
"""Read for ZenFlow, for NVMe and for an optimizer that ZeRO was not tested with."""
LEFT_OUT = {
    "comms_logger.verbose",
    "zero_optimization.compute_grad_norm",
    "hybrid_engine",
    "steps_per_print",
    "dump_state",
    "zero_optimization.elastic_checkpoint",
    "zero_optimization.round_robin_gradients",
    *(
        f"tensor_parallel.{name}"
        for name in ("keep_module_on_host", "partition_config", "preset_model")
    ),
    *(
        f"tensor_parallel.{name}"
        for name in ("tensor_parallel", "vocab_parallel_ce_backend", "vocab_parallel_lm_head")
    ),
}
"""What DeepSpeed would read, and what the table says has no effect here, each with its reason."""


NEED_OTHERS = (
    "fp16.",
    "bf16.",
    "data_types.p",
    "zero_optimization.zenflow",
    "prescale",
    "gradient_pre",
)
"""Refused without something else."""


def put_default(content: dict[str, Any], path: str, key: Key) -> None:
    """A value for each key that DeepSpeed alone honours, so that it is there to be read."""
    *sections, name = path.split(".")
    if not key.instead or key.kind == "section" or path.startswith(NEED_OTHERS):
        return
    for section in sections:
        content = content.setdefault(section, {})
    values = {
        "bool": True,
        "int": 1,
        "float": 1.0,
        "str": "x",
        "dtype": "fp32",
        "list": [],
        "any": [],
    }
    content.setdefault(name, key.choices[0] if key.choices else values[key.kind])
