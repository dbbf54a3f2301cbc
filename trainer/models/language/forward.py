"""The arguments of a transformers model's forward, which differ by family."""

from __future__ import annotations

import inspect

from torch import nn

CACHE = "use_cache"


def without_cache(model: nn.Module) -> dict[str, bool]:
    """Return the arguments that keep a model from caching keys and values; empty if it takes none.

    If the model passes unknown arguments on to its body, those of the body count, too.
    """
    body = getattr(model, "base_model", model)
    own = inspect.signature(model.forward).parameters
    passes_on = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in own.values())
    known = CACHE in own or (passes_on and CACHE in inspect.signature(body.forward).parameters)
    return {CACHE: False} if known else {}
