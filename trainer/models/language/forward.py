"""How the forward of a transformers model is called, whose arguments differ by family."""

from __future__ import annotations

import inspect

from torch import nn

CACHE = "use_cache"


def without_cache(model: nn.Module) -> dict[str, bool]:
    """Return the arguments that keep a model from storing keys and values, if it takes any.

    A body's own argument counts where the model passes on what it does not know.
    """
    body = getattr(model, "base_model", model)
    own = inspect.signature(model.forward).parameters
    passes_on = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in own.values())
    known = CACHE in own or (passes_on and CACHE in inspect.signature(body.forward).parameters)
    return {CACHE: False} if known else {}
