"""Faults of what a checkpoint saves and loads."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

from tests.support.certify.faults.planting import around, step_of


def of_state_tensors(function: str, change: Callable[[Any], Any]) -> Any:
    """The state tensors that are given to `save` (the third argument) or `load` (the second)."""
    from trainer import checkpoint

    index = {"save": 2, "load": 1}[function]

    def changed(real, *args, **named):
        return real(
            *args[:index], [change(entry) for entry in args[index]], *args[index + 1 :], **named
        )

    return around(checkpoint, function, changed)


def not_loaded(which: Callable[[str], bool]) -> Any:
    def idle(entry):
        return replace(entry, write=lambda value: None) if which(entry.key) else entry

    def forgetful(entry):
        keep = getattr(entry, "keep", None)
        return (
            replace(idle(entry), keep=lambda shapes: [idle(p) for p in keep(shapes)])
            if keep
            else idle(entry)
        )

    return of_state_tensors("load", forgetful)


def moments_not_loaded(engine: str) -> Any:
    return not_loaded(lambda part: part.startswith("exp_avg"))


def step_count_not_loaded(engine: str) -> Any:
    """Whether it is kept by parameter or for all together."""
    stack = contextlib.ExitStack()
    stack.enter_context(mock.patch.object(step_of(engine), "restore", lambda self, scalars: None))
    stack.enter_context(not_loaded(lambda part: part == "step"))
    return stack


def stale_weight_saved(engine: str) -> Any:
    def stale(entry):
        if entry.name != "transformer.h.1.mlp.c_fc.weight" or entry.key != "weight":
            return entry

        def parts():
            return [replace(part, value=part.value * 0.999) for part in entry.parts()]

        return replace(entry, parts=parts)

    return of_state_tensors("save", stale)


def buffers_not_saved(engine: str) -> Any:
    from trainer.engines.torch import state as torch_state

    return mock.patch.object(torch_state, "persistent_buffers", lambda root: [])
