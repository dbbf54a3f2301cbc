"""GPUs that are not there: an engine is built for CUDA devices of fake tensors, over a group of
fake processes.

Nothing is computed. What shows is where each tensor would live, and that no operation mixes
devices. Autograd asks the driver for streams, so that a backward pass can't be run so.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.testing._internal.distributed.fake_pg import FakeStore

import trainer.engines.deepspeed.pipeline  # noqa: F401  (so that all engines can be patched)
from tests.support.training import Case, build
from trainer.distributed.ranks import Ranks
from trainer.parallel.parallel_mesh import parallel_mesh_of


class _Idle:
    """A stream or an event on which nothing happens."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


def _mesh(*args: Any) -> Any:
    with unset_fake_temporarily():  # the ranks of a mesh are real numbers
        return parallel_mesh_of(*args)


def _gathered(into: list[Any], value: Any, group: Any = None) -> None:
    into[:] = [value] * len(into)


def _read(real: Any) -> Any:
    """Return 0 for a value that is not there."""
    kind = {"__float__": float, "__bool__": bool, "__int__": int}[real.__name__]
    return lambda tensor: kind(0) if isinstance(tensor, FakeTensor) else real(tensor)


@contextmanager
def gpus(count: int) -> Iterator[None]:
    """Make this process the first of `count` that have a GPU each."""
    answers: dict[str, Any] = {
        "current_device": lambda: 0,
        "is_available": lambda: True,
        "device_count": lambda: count,
        "is_initialized": lambda: False,
        "set_device": lambda *_: None,
        "current_stream": _Idle,
        "Stream": _Idle,
        "Event": _Idle,
    }
    dist.init_process_group("fake", rank=0, world_size=count, store=FakeStore())
    try:
        with ExitStack() as stack:
            for name, answer in answers.items():
                stack.enter_context(patch(f"torch.cuda.{name}", answer))
            stack.enter_context(patch("trainer.engines.engine.parallel_mesh_of", _mesh))
            for name in ("__float__", "__bool__", "__int__"):
                stack.enter_context(
                    patch.object(torch.Tensor, name, _read(getattr(torch.Tensor, name)))
                )
            stack.enter_context(patch.object(torch.Tensor, "copy_", lambda tensor, *_: tensor))
            stack.enter_context(patch("torch.distributed.all_gather_object", _gathered))
            stack.enter_context(patch("torch.distributed.broadcast_object_list"))
            stack.enter_context(patch.object(Ranks, "send", lambda ranks, source, value: value))
            stack.enter_context(patch.object(Ranks, "_least", lambda ranks, number: number))
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            yield
    finally:
        dist.destroy_process_group()


def built(case: Case) -> Any:
    """Build the engine of a case on the first of its GPUs."""
    return build(case, 0, device=torch.device("cuda", 0))
