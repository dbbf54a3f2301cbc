"""How a fault is planted: a patch that is in force while every rank certifies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock


def step_of(engine: str) -> Any:
    from trainer.engines.deepspeed.engine import DeepSpeedEngine
    from trainer.engines.torch.engine import TorchEngine

    return DeepSpeedEngine if engine == "deepspeed" else TorchEngine


def with_step(engine: str, change: Callable[..., Any]) -> Any:
    """`change(self, batches, update)` gives what the real step is called with."""
    kind = step_of(engine)
    real = kind.step

    def step(self, number, batches, update, observe=None):
        return real(self, number, *change(self, batches, update), observe)

    return mock.patch.object(kind, "step", step)


def with_optimizer(engine: str, change: Callable[[Any], Any]) -> Any:
    """`change(optimizer)` comes before each step; the one of PyTorch within DeepSpeed's."""

    def changed(self, batches, update):
        outer = self._engine.optimizer if engine == "deepspeed" else self._optimizer
        change(getattr(outer, "optimizer", outer))
        return batches, update

    return with_step(engine, changed)


def in_groups(engine: str, **values: Any) -> Any:
    return with_optimizer(
        engine, lambda optimizer: [group.update(values) for group in optimizer.param_groups]
    )


def around(owner: Any, name: str, change: Callable[..., Any]) -> Any:
    """`owner.name` gives what `change` makes of the real function and the arguments."""
    real = getattr(owner, name)
    return mock.patch.object(owner, name, lambda *args, **kwargs: change(real, *args, **kwargs))


def of_collation(change: Callable[..., Any]) -> Any:
    from trainer.recipes.causal_lm.task import CausalLM

    return around(
        CausalLM,
        "collate",
        lambda real, self, samples: change(lambda part: real(self, part), samples),
    )


def in_blocks_of_the_run(change: Callable[[Any, Any], None]) -> Any:
    """`change(model, spec)` comes after the model was split and wrapped; the one process knows
    nothing of it.
    """
    from trainer.parallel.forward_backward import Dropout

    def changed(real: Any, self: Any, model: Any, spec: Any) -> None:
        real(self, model, spec)
        change(model, spec)

    real = Dropout.__init__
    return mock.patch.object(
        Dropout, "__init__", lambda self, model, spec: changed(real, self, model, spec)
    )
