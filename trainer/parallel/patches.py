"""Patches of PyTorch's modules, in place: each says its reason and when it can go.

`tests/parallel/test_parallel_patches.py` fails once one of them is no longer needed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase


def replace_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Replace the forward of a module within its hooks; no parameter changes its name.

    PyTorch 2.15: `checkpoint_wrapper` and `SyncBatchNorm.convert_sync_batchnorm` replace modules;
    the first renames parameters, and both come too late for FSDP, which refers to modules. Can go
    when PyTorch wraps a forward in place.
    """
    module.forward = forward  # type: ignore[method-assign,assignment]


def prepare_compiler() -> None:
    """Set `torch.compile` up for blocks that are compiled one by one; for the whole process.

    PyTorch 2.15: random numbers are others than uncompiled ones; DDP splits each graph, and can't
    where a block is recomputed; a number of a layer makes a graph for each; and 8 variants of a
    block (kinds, shapes, modes) are the most. Can go when `torch.compile` takes these as arguments.
    """
    import torch._dynamo.config
    import torch._inductor.config

    torch._inductor.config.fallback_random = True
    dynamo: Any = torch._dynamo.config
    dynamo.optimize_ddp = False
    dynamo.allow_unspec_int_on_nn_module = True
    dynamo.recompile_limit = max(dynamo.recompile_limit, 64)


def keep_last_statistics(module: _NormBase) -> None:
    """Make the running statistics of a norm those of its last forward pass alone.

    PyTorch 2.15: a norm returns its batch's statistics in no other way. Can go when it does.
    """
    module.momentum = 1.0
