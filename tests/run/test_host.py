"""What the host does beside a step: Python's garbage, and the settings of CUDA's allocator."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from trainer.run.observers.host import Garbage
from trainer.supervise.process import grow_segments
from trainer.supervise.stall import Phase


def test_garbage_is_collected_between_steps_and_not_within_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps: list[Any] = []
    with Garbage() as garbage:
        assert not gc.isenabled() and gc.get_freeze_count() > 0
        monkeypatch.setattr(gc, "collect", lambda: steps.append(step))
        for step in range(1, 102):
            garbage.at(Phase.WAITING, step)
            garbage.at(Phase.TRAINING, step)
        assert steps == [50, 100]
        for step, phase in ((7, Phase.EVALUATING), (8, Phase.SAVING), (9, Phase.LOGGING)):
            garbage.at(phase, step)
        assert steps == [50, 100, 7, 8]
    assert gc.isenabled() and gc.get_freeze_count() == 0


def test_who_has_no_garbage_collected_by_python_has_none_after_a_run() -> None:
    gc.disable()
    try:
        with Garbage():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.parametrize("own", [None, "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_segments_grow_unless_the_environment_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, own: str | None
) -> None:
    given: list[str] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", given.append)
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    if own is not None:
        monkeypatch.setenv(own, "max_split_size_mb:512")
    grow_segments()
    assert given == ([] if own else ["expandable_segments:True"])
