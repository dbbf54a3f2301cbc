"""The key table and the compiled JSON against DeepSpeed itself."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainer.config import RuntimeFacts, load, mesh_sizes, resolve
from trainer.config.keys import KEYS, SCHEDULERS
from trainer.config.read import leaves

HERE = Path(__file__).parent
CONFIGS = [
    *(HERE / "foreign_configs").glob("*.json"),
    *(HERE.parent.parent / "ds_configs").glob("*.json"),
]


class DataRanks:
    """The part of Megatron's `mpu` that DeepSpeed's config asks."""

    def __init__(self, size: int) -> None:
        self.size = size

    def get_data_parallel_world_size(self) -> int:
        return self.size


@pytest.mark.parametrize("path", sorted(CONFIGS), ids=lambda path: path.stem)
def test_deepspeed_takes_what_is_compiled_and_reads_the_same(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    monkeypatch.setattr("deepspeed.comm.get_rank", lambda: 0)
    config = resolve(
        load(path),
        RuntimeFacts(world_size=4, hidden_size=64, total_steps=100, bf16=False, device="cpu"),
    )
    theirs = DeepSpeedConfig(config.deepspeed, mpu=DataRanks(mesh_sizes(config, 4).data_ranks))
    assert (
        theirs.train_micro_batch_size_per_gpu == config.settings["train_micro_batch_size_per_gpu"]
    )
    assert theirs.gradient_accumulation_steps == config.settings["gradient_accumulation_steps"]
    assert theirs.zero_optimization_stage == config.settings.get("zero_optimization", {}).get(
        "stage", 0
    )
    assert theirs.gradient_clipping == config.settings["gradient_clipping"]
    assert theirs.optimizer_params == config.optimizer.params
    assert theirs.scheduler_name is None


HUGGING_FACES_AUTOS = {
    "zero_optimization": [
        "reduce_bucket_size",
        "stage3_prefetch_bucket_size",
        "stage3_param_persistence_threshold",
        "overlap_comm",
    ],
    "optimizer.params": ["lr", "betas", "eps", "weight_decay"],
    "scheduler.params": ["warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"],
    "": [
        "gradient_clipping",
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
    ],
    "fp16": ["enabled", "loss_scale"],
    "bf16": ["enabled"],
}


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize(
    "written", [{}, {"train_micro_batch_size_per_gpu": 3}, {"gradient_accumulation_steps": 5}]
)
def test_auto_is_what_hugging_face_makes_of_it(
    tmp_path: Path, stage: int, written: dict[str, int]
) -> None:
    from transformers import TrainingArguments
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    content: dict[str, Any] = {
        "optimizer": {"type": "AdamW", "params": {}},
        "scheduler": {"type": "WarmupDecayLR", "params": {}},
        "zero_optimization": {"stage": stage},
    }
    for section, names in HUGGING_FACES_AUTOS.items():
        inner = content
        for name in filter(None, section.split(".")):
            inner = inner.setdefault(name, {})
        inner |= dict.fromkeys(names, "auto")
    content |= written
    path = tmp_path / "c.json"
    path.write_text(json.dumps(content))
    ours = resolve(
        load(path),
        RuntimeFacts(world_size=2, hidden_size=48, total_steps=77, bf16=False, device="cpu"),
    ).settings

    theirs = HfTrainerDeepSpeedConfig(json.loads(path.read_text()))
    defaults = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    sizes = {
        "per_device_train_batch_size": written.get("train_micro_batch_size_per_gpu", 8),
        "gradient_accumulation_steps": written.get("gradient_accumulation_steps", 1),
    }
    assert (defaults.per_device_train_batch_size, defaults.gradient_accumulation_steps) == (8, 1)
    arguments = SimpleNamespace(**{**vars(defaults), **sizes, "world_size": 2})
    arguments.get_warmup_steps = defaults.get_warmup_steps
    theirs.trainer_config_process(arguments)
    model = SimpleNamespace(config=SimpleNamespace(hidden_size=48))
    theirs.trainer_config_finalize(arguments, model, 77)
    # what is "auto" still, DeepSpeed's own models drop
    expected = {key: value for key, value in leaves(theirs.config) if value != "auto"}
    assert dict(leaves(ours)) == expected


def test_the_table_has_every_key_of_deepspeeds_models() -> None:
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.compile.config import CompileConfig
    from deepspeed.inference.config import WeightQuantConfig
    from deepspeed.monitor.config import CometConfig, CSVConfig, TensorBoardConfig, WandbConfig
    from deepspeed.runtime.config import HybridEngineConfig
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig
    from deepspeed.runtime.zenflow.zenflow_config import ZenFlowConfig
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.runtime.zero.leaf_module_config import DeepSpeedZeroLeafModuleConfig
    from deepspeed.runtime.zero.offload_config import (
        DeepSpeedZeroOffloadOptimizerConfig,
        DeepSpeedZeroOffloadParamConfig,
    )
    from deepspeed.utils.config import DeepSpeedThroughputTimerConfig

    models = {
        "comms_logger": CommsLoggerConfig,
        "compile": CompileConfig,
        "comet": CometConfig,
        "csv_monitor": CSVConfig,
        "tensorboard": TensorBoardConfig,
        "wandb": WandbConfig,
        "hybrid_engine": HybridEngineConfig,
        "bf16": DeepSpeedBF16Config,
        "fp16": DeepSpeedFP16Config,
        "tensor_parallel": TPTrainingConfig,
        "zero_optimization": DeepSpeedZeroConfig,
        "zero_optimization.zenflow": ZenFlowConfig,
        "zero_optimization.leaf_module": DeepSpeedZeroLeafModuleConfig,
        "zero_optimization.offload_param": DeepSpeedZeroOffloadParamConfig,
        "zero_optimization.offload_optimizer": DeepSpeedZeroOffloadOptimizerConfig,
        "timers.throughput": DeepSpeedThroughputTimerConfig,
        "weight_quantization": WeightQuantConfig,
    }
    missing = []
    for section, model in models.items():
        for name, field in model.model_fields.items():
            missing += [
                f"{section}.{key}"
                for key in (name, field.alias)
                if key and f"{section}.{key}" not in KEYS
            ]
    assert not missing


class Recording(dict[str, Any]):
    """A section that notes the path of every key that is looked for; missing sections are there
    when asked for.
    """

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

    def __contains__(self, key: object) -> bool:
        self.seen.add(f"{self.path}{key}")
        return super().__contains__(key)

    def __copy__(self) -> Recording:
        return self

    def pop(self, key: str, *default: Any) -> Any:
        self.seen.add(self.path + key)
        return super().pop(key, *default)


def test_the_table_has_every_key_that_deepspeed_reads_by_hand(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    monkeypatch.setattr("deepspeed.comm.get_rank", lambda: 0)
    monkeypatch.setattr("deepspeed.comm.get_world_size", lambda: 1)
    curriculum = {"enabled": True, "curriculum_metrics": {}}
    content = {
        "train_batch_size": 1,
        "activation_checkpointing": {"profile": True},
        "aio": {"block_size": 1},
        "autotuning": {"model_info": {"profile": True}},
        "checkpoint": {"writer": {"type": "mock"}, "parallel_write": {"pipeline_stage": True}},
        "data_efficiency": {
            "data_sampling": {
                "curriculum_learning": curriculum,
                "dynamic_batching": {"enabled": True, "max_tokens": 3},
            },
            "data_routing": {"random_ltd": {"enabled": True}},
        },
        "data_types": {"grad_accum_dtype": "fp32"},
        "flops_profiler": {"enabled": True},
        "optimizer": {"type": "Adam", "params": {}},
        "pipeline": {"stages": 1},
        "scheduler": {"type": "WarmupLR", "params": {}},
        "timers": {"throughput": {}},
        "torch_autocast": {"enabled": True, "dtype": "bf16", "lower_precision_safe_modules": []},
    }
    actual: set[str] = set()
    DeepSpeedConfig(Recording(content, actual))
    assert len(actual) > 120
    assert {path for path in actual if path not in KEYS} == set()


def test_the_table_has_every_key_that_deepspeed_removed() -> None:
    from deepspeed.runtime.config import _REMOVED_TOP_LEVEL_CONFIG_KEYS, _REMOVED_ZERO_CONFIG_KEYS

    assert {name for name in _REMOVED_TOP_LEVEL_CONFIG_KEYS if not KEYS[name].refused} == set()
    removed = {
        name for name in _REMOVED_ZERO_CONFIG_KEYS if not KEYS[f"zero_optimization.{name}"].refused
    }
    assert removed == {"mics_shard_size"}, "it means trainer.mesh.shard here"


def test_the_table_has_every_parameter_of_deepspeeds_schedulers() -> None:
    import inspect

    from deepspeed.runtime import lr_schedules

    theirs = {name: table for name, table in SCHEDULERS.items() if not name.islower()}
    assert list(theirs) == sorted(lr_schedules.VALID_LR_SCHEDULES, key=list(theirs).index)
    for name, table in theirs.items():
        parameters = inspect.signature(getattr(lr_schedules, name).__init__).parameters
        assert set(table) == set(parameters) - {"self", "optimizer"}


@pytest.mark.parametrize("written", [{}, {"gradient_clipping": 0}, {"gradient_clipping": 0.5}])
def test_clipping_is_deepspeeds_own_where_the_key_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: dict[str, Any]
) -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    monkeypatch.setattr("deepspeed.comm.get_rank", lambda: 0)
    content = {"train_batch_size": 1, **written}
    path = tmp_path / "c.json"
    path.write_text(json.dumps(content))
    ours = load(path).settings["gradient_clipping"]
    assert (
        ours == DeepSpeedConfig(content).gradient_clipping == written.get("gradient_clipping", 1.0)
    )
