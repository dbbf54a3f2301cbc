"""The key table and the compiled JSON against DeepSpeed itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer.config import Facts, load, mesh_sizes, resolve
from trainer.config.keys import KEYS, SCHEDULERS

HERE = Path(__file__).parent
CONFIGS = [*(HERE / "foreign_configs").glob("*.json"), *(HERE.parent / "ds_configs").glob("*.json")]


class DataRanks:
    """The part of Megatron's `mpu` that DeepSpeed's config asks."""

    def __init__(self, size: int) -> None:
        self.size = size

    def get_data_parallel_world_size(self) -> int:
        return self.size


@pytest.mark.parametrize("path", sorted(CONFIGS), ids=lambda path: path.stem)
def test_deepspeed_takes_what_is_compiled_and_reads_the_same(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    monkeypatch.setattr("deepspeed.comm.get_rank", lambda: 0)
    config = resolve(load(path), Facts(world_size=4, hidden_size=64, total_steps=100, bf16=False, device="cpu"))
    theirs = DeepSpeedConfig(config.deepspeed, mpu=DataRanks(mesh_sizes(config, 4).data_ranks))
    assert theirs.train_micro_batch_size_per_gpu == config.settings["train_micro_batch_size_per_gpu"]
    assert theirs.gradient_accumulation_steps == config.settings["gradient_accumulation_steps"]
    assert theirs.zero_optimization_stage == config.settings.get("zero_optimization", {}).get("stage", 0)
    assert theirs.gradient_clipping == config.settings["gradient_clipping"]
    assert theirs.optimizer_params == config.optimizer.params
    assert theirs.scheduler_name is None


def test_the_table_has_every_key_of_deepspeeds_models() -> None:
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.compile.config import CompileConfig
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
    }
    missing = []
    for section, model in models.items():
        for name, field in model.model_fields.items():
            missing += [f"{section}.{key}" for key in (name, field.alias) if key and f"{section}.{key}" not in KEYS]
    assert not missing


def test_the_table_has_every_key_that_deepspeed_removed() -> None:
    from deepspeed.runtime.config import _REMOVED_TOP_LEVEL_CONFIG_KEYS, _REMOVED_ZERO_CONFIG_KEYS

    assert {name for name in _REMOVED_TOP_LEVEL_CONFIG_KEYS if not KEYS[name].refused} == set()
    removed = {name for name in _REMOVED_ZERO_CONFIG_KEYS if not KEYS[f"zero_optimization.{name}"].refused}
    assert removed == {"mics_shard_size"}, "it means trainer.mesh.shard here"


def test_the_table_has_every_parameter_of_deepspeeds_schedulers() -> None:
    import inspect

    from deepspeed.runtime import lr_schedules

    assert list(SCHEDULERS) == sorted(lr_schedules.VALID_LR_SCHEDULES, key=list(SCHEDULERS).index)
    for name, table in SCHEDULERS.items():
        parameters = inspect.signature(getattr(lr_schedules, name).__init__).parameters
        assert set(table) == set(parameters) - {"self", "optimizer"}
