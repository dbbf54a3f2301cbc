"""Small tensors with the values that a model's constructor gives them, for a model built on the meta device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

SMALL = 65_536


def built_tensor(build: Callable[[], nn.Module], name: str) -> torch.Tensor | None:
    """Return a tensor as `build` makes it; None if it, or one it is computed from, has over SMALL values."""
    return _all(build).get(name)


@cache
def _all(build: Callable[[], nn.Module]) -> Mapping[str, torch.Tensor]:
    with torch.random.fork_rng(devices=[]), _BuiltOnHost():
        torch.default_generator.manual_seed(0)
        try:
            model = build()
        except Exception:  # small and large tensors may not go together
            return {}
    return {name: t.detach() for name, t in (*model.named_parameters(), *model.named_buffers()) if not t.is_meta}


class _BuiltOnHost(TorchFunctionMode):
    """A mode in which small tensors for the meta device are made on the CPU instead."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        asked = kwargs.get("device")
        small = torch.is_tensor(result) and result.numel() <= SMALL
        on_meta = asked is not None and torch.device(asked).type == "meta"
        return func(*args, **{**kwargs, "device": "cpu"}) if on_meta and small else result
