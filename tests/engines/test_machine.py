"""The GPU of each rank, the environment of launchers, and machines that are not alike."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.messages import raises, shows
from tests.support.together import together
from trainer.config import RuntimeFacts, load, resolve
from trainer.distributed.ranks import Ranks
from trainer.engines import Machine
from trainer.errors import ConfigError
from trainer.layout import layout_of
from trainer.run.describe import device_notes
from trainer.run.observers.metrics import Meter, Pace
from trainer.supervise import process, world
from trainer.supervise.world import World, drop_accelerate, gpu_count


@pytest.fixture
def joined(monkeypatch):
    """Return the device of `_join` with so many GPUs."""
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.delenv("TORCHINDUCTOR_COMPILE_THREADS", raising=False)

    def join(world: World, gpus: int, fails: str = "") -> Any:
        def start(*args: Any, **kwargs: Any) -> None:
            if fails:
                raise dist.DistBackendError(fails)

        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
        monkeypatch.setattr(dist, "init_process_group", start)
        monkeypatch.setattr(process, "_store", lambda world, say: None)
        monkeypatch.setattr(Ranks, "on_host", lambda ranks: ranks)
        monkeypatch.setattr(process, "check_even", lambda size, ranks: None)
        config = SimpleNamespace(trainer=SimpleNamespace(device="auto"))
        return process.join(config, world)  # type: ignore[arg-type]

    return join


EIGHT = World(rank=11, local_rank=3, world_size=16, local_world_size=8)


def test_each_process_takes_the_gpu_of_its_number(joined):
    assert joined(EIGHT, gpus=8).device == torch.device("cuda", 3)
    assert os.environ["LOCAL_RANK"] == "3"
    assert joined(EIGHT, gpus=0).device == torch.device("cpu")


def test_ranks_of_a_machine_share_its_cores_to_compile(joined, monkeypatch):
    monkeypatch.setattr(process, "cores", lambda: 96)
    joined(EIGHT, gpus=8)
    assert os.environ["TORCHINDUCTOR_COMPILE_THREADS"] == "12"
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "3")
    joined(EIGHT, gpus=8)
    assert os.environ["TORCHINDUCTOR_COMPILE_THREADS"] == "3"


def test_a_process_that_sees_one_gpu_takes_it(joined):
    """As with Slurm's --gpus-per-task=1; libraries take the local rank for the GPU's number."""
    assert joined(EIGHT, gpus=1).device == torch.device("cuda", 0)
    assert os.environ["LOCAL_RANK"] == "0"


def test_more_processes_than_gpus(joined):
    with raises(ConfigError, "8 for 4 GPUs", "most"):
        joined(EIGHT, gpus=4)
    with raises(ConfigError, "several processes", "GPU"):
        joined(
            EIGHT,
            gpus=1,
            fails="ncclInvalidUsage. Last error: Duplicate GPU detected : rank 3 and rank 2",
        )
    with pytest.raises(dist.DistBackendError):
        joined(EIGHT, gpus=1, fails="ncclSystemError")


def test_machines_with_unequally_many_processes():
    text = "8 on that of rank 0, 4 on that of rank 8; expected equally many on all"
    result = together(16, lambda ranks: process.check_even(8 if ranks.rank < 8 else 4, ranks))
    assert all(text in str(error) and error.shared for error in result)  # rank 0 alone says it


@pytest.mark.parametrize(
    ("visible", "count"),
    [
        ("", 0),
        ("0", 1),
        ("0,2,3", 3),
        ("GPU-8932f937-d72c,GPU-1", 2),
        ("MIG-GPU-8932f937/1/0,MIG-2", 1),
        ("-1", 0),
        ("1,-1,2", 1),
        ("NoDevFiles", 0),
        ("0,1,2,3,4,5,6,7,8,9,10,11", 8),
    ],
)
def test_gpus_that_are_visible(monkeypatch, tmp_path, visible, count):
    for number in range(8):
        (tmp_path / f"nvidia{number}").touch()
    monkeypatch.setattr(world, "Path", lambda path: tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpu_count() == count


def test_what_accelerate_launch_says_of_training_is_left_aside():
    environment = {
        "ACCELERATE_MIXED_PRECISION": "bf16",
        "ACCELERATE_DYNAMO_BACKEND": "INDUCTOR",
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_ACTIVATION_CHECKPOINTING": "true",
        "FSDP_OFFLOAD_PARAMS": "true",
        "ACCELERATE_DYNAMO_MODE": "default",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "1",
        "RANK": "1",
        "MASTER_ADDR": "here",
    }
    note = drop_accelerate(environment)
    assert environment == {"RANK": "1", "MASTER_ADDR": "here"}
    assert note is not None and "ACCELERATE_MIXED_PRECISION=bf16" in note and "and 1 more" in note
    assert (
        drop_accelerate({"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_DYNAMO_BACKEND": "NO"})
        is None
    )


def resolved(tmp_path, *overrides: str, world: int, local: int | None) -> Any:
    path = tmp_path / "config.json"
    path.write_text('{"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}}')
    config = load(str(path), ["trainer.engine=mesh", *overrides])
    once = resolve(config, RuntimeFacts(world, None, None, False, "cpu", local))
    return resolve(once, RuntimeFacts(world, 64, 10, False, "cpu", local))


def test_tensor_groups_larger_than_a_machine(tmp_path):
    config = resolved(tmp_path, "tensor_parallel.autotp_size=8", world=16, local=4)
    layout = layout_of(config, 16)
    assert (layout.replicate, layout.shard, layout.tensor) == (1, 2, 8)
    notes = [note for note in config.notes if "cross machines" in note]
    assert len(notes) == 1
    shows(notes[0], "tensor parallel", "8 cross machines", "4 processes")


@pytest.mark.parametrize(
    ("tensor", "local", "expected"), [(2, 4, (4, 2)), (4, 4, (1, 4)), (1, 1, (1, 16))]
)
def test_sharding_stays_within_machines_that_leave_room_for_it(tmp_path, tensor, local, expected):
    config = resolved(tmp_path, f"tensor_parallel.autotp_size={tensor}", world=16, local=local)
    layout = layout_of(config, 16)
    assert (layout.replicate, layout.shard) == expected


def test_machines_of_other_sizes_are_no_error_before_all_are_asked(tmp_path):
    for local in (4, 3):
        assert layout_of(resolved(tmp_path, world=7, local=local), 7).shard == 7


# MFU and float32


def test_a_slow_float32_is_said():
    def notes(precision: str, device: str) -> list[str]:
        return list(device_notes(precision, Machine(torch.device(device), Ranks())))

    assert "bf16.enabled=true" in notes("float32", "cuda")[0]
    assert notes("float32", "cpu") == notes("bfloat16", "cuda") == []


def test_mfu_counts_all_positions_on_the_devices_that_share_them():
    """Ten positions, two of them targets, 6 FLOPs each, in 1 s, on two devices of 100 FLOP/s."""
    from trainer.data.loader import StepBatches
    from trainer.engines.engine import Metrics
    from trainer.optim.lr_schedules import Update
    from trainer.state import RunState

    meter = Meter(4, torch.device("cpu"), 2, 6.0, 100.0, RunState())
    metrics = Metrics(torch.tensor(1.0), torch.tensor(2), torch.tensor(1.0))
    meter.started -= 1.0
    meter.note(StepBatches(0, [], [], positions=10))
    record = meter.record(RunState(1, 4, 2), metrics, Update(0.1), 0)
    assert record.speed.mfu == pytest.approx(10 * 6 / (100 * 2), rel=0.2)
    assert record.speed.tokens_per_second == pytest.approx(2, rel=0.2)
    meter.started -= 1.0
    meter.note(StepBatches(1, [], [], positions=20))
    record = meter.record(RunState(2, 8, 4), metrics, Update(0.1), 0)
    assert record.speed.mfu == pytest.approx(20 * 6 / (100 * 2), rel=0.2)


def test_the_time_left_is_by_all_steps_but_the_first_that_were_recorded():
    pace = Pace()
    assert pace.take(10, 50.0) == 5.0
    assert pace.take(10, 10.0) == 1.0
    assert pace.take(10, 40.0) == 2.5


def test_a_rank_without_an_address_is_named(monkeypatch):
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with raises(ConfigError, "RANK=11", "MASTER_ADDR=None", "MASTER_PORT=", "port"):
        process._store(EIGHT, print)
