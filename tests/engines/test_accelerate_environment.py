"""Training options of `accelerate launch` have no effect on the run, and a note says so."""

from __future__ import annotations

import pytest

from tests.support.commands import losses, train, write_job

SAID = {
    "ACCELERATE_MIXED_PRECISION": "bf16",
    "ACCELERATE_DYNAMO_BACKEND": "EAGER",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4",
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_ACTIVATION_CHECKPOINTING": "true",
    "FSDP_OFFLOAD_PARAMS": "true",
}


@pytest.mark.more
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "engine",
    [
        "accelerate",
        pytest.param("mesh", marks=pytest.mark.whole),
        pytest.param("deepspeed", marks=pytest.mark.whole),
    ],
)
def test_training_is_the_same_without_it(tmp_path, engine):
    job = write_job(tmp_path, engine=engine)
    for name, environment in (("with", SAID), ("without", {})):
        result = train(
            "--config",
            job,
            f"trainer.run.name={name}",
            "--processes",
            "2",
            timeout=400,
            **environment,
        )
        assert result.code == 0, result.output
        assert ("ACCELERATE_DYN" in result.output) == (name == "with")
    assert losses(tmp_path / "runs" / "with") == losses(tmp_path / "runs" / "without")
