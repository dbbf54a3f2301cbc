"""A script's optimizer: as in one process over shards, certified, and refused where it is not used."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import trainer
from tests.support.command.own_module import OWN, config
from tests.support.commands import write_job
from tests.support.messages import raises
from trainer.errors import ConfigError, MeshloomError

MOMENTUM: Any = partial(torch.optim.SGD, momentum=0.9)


def losses(tmp_path: Path, processes: int, **section: Any) -> list[float]:
    job = config(tmp_path, 4, log={"every": 1}, **section)
    job["zero_optimization"] = {"stage": 2}
    given = OWN | {"optimizer": MOMENTUM, "processes": processes}
    result = trainer.train(job, **given, fresh=True)
    assert (
        '"type": "script:optimizer"'
        in next(result.folder.glob("checkpoints/*/trainer.json")).read_text()
    )
    return result.losses


@pytest.mark.parametrize("engine", ["mesh", pytest.param("accelerate", marks=pytest.mark.more)])
def test_over_shards_as_in_one_process(tmp_path: Path, engine: str) -> None:
    one = losses(tmp_path, 1)
    adamw = trainer.train(config(tmp_path, 4, log={"every": 1}), **OWN, fresh=True).losses
    assert one != pytest.approx(adamw, rel=1e-6)
    assert losses(tmp_path, 2, engine=engine) == pytest.approx(one, rel=1e-6)


@pytest.mark.more
def test_its_certificate_passes_and_that_of_a_wrong_one_fails(tmp_path: Path) -> None:
    job = config(tmp_path) | {"zero_optimization": {"stage": 3}}
    own = {name: OWN[name] for name in ("model", "data", "loss")} | {"processes": 2}
    assert trainer.verify(job, **own, optimizer=MOMENTUM).passed

    class ByShard(torch.optim.SGD):
        """Divides each update by the norm of what this rank holds: over shards, another number."""

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for parameter in group["params"]:
                    local = (
                        parameter.grad.to_local()
                        if hasattr(parameter.grad, "to_local")
                        else parameter.grad
                    )
                    local.div_(local.norm() + 1e-12)
            super().step()

    assert not trainer.verify(job, **own, optimizer=ByShard).passed


def test_what_is_no_optimizer_of_the_parameters_is_one_sentence(tmp_path: Path) -> None:
    def some(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return torch.optim.SGD(groups[0]["params"][:1], lr=0.1)

    class Alike:
        def __init__(self, groups: list[dict[str, Any]]) -> None:
            self.param_groups, self.state = groups, dict[Any, Any]()

        def step(self) -> None: ...

    wrong: Any = {
        "SGD": some,
        "Alike": Alike,
        "AttributeError: 'NoneType' object": lambda groups: None,
        "ValueError: Invalid momentum value: -1": partial(torch.optim.SGD, momentum=-1),
        "TypeError: missing a required argument: 'closure'": torch.optim.LBFGS,
    }
    flat = config(tmp_path, weight_decay_excludes="nothing")  # LBFGS takes one group
    for actual, optimizer in wrong.items():
        with pytest.raises(
            ConfigError, match=f"^optimizer script:optimizer: {actual}.*; expected a"
        ):
            trainer.train(flat, **OWN, optimizer=optimizer)
    with raises(ConfigError, "engine deepspeed", "script:optimizer"):
        trainer.train(config(tmp_path, engine="deepspeed"), **OWN, optimizer=MOMENTUM)


@pytest.mark.more
def test_a_run_does_not_go_on_with_an_edited_one(tmp_path: Path) -> None:
    trainer.train(config(tmp_path, 2), **OWN, optimizer=MOMENTUM)
    more = config(tmp_path, 4)
    with pytest.raises(MeshloomError, match="optimizer's arguments"):
        trainer.train(more, **OWN, optimizer=partial(MOMENTUM, nesterov=True), resume="auto")
    assert trainer.train(more, **OWN, optimizer=MOMENTUM, resume="auto").records[-1].step == 4


def test_nor_does_that_of_a_language_model(tmp_path: Path) -> None:
    job, folder = write_job(tmp_path), f"trainer.run.folder={tmp_path / 'runs'}"
    given: Any = {"quiet": True, "resume": "auto"}
    trainer.train(job, overrides=[folder], optimizer=MOMENTUM, **given)
    edited, more = partial(MOMENTUM, nesterov=True), [folder, "trainer.steps=9"]
    with pytest.raises(MeshloomError, match="optimizer's arguments"):
        trainer.train(job, overrides=more, optimizer=edited, **given)
