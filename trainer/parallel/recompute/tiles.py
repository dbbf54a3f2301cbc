"""MLPs of blocks that compute a tile of tokens at a time, and again in the backward pass.

So what an MLP computes inside, [tokens, several times the width], is there for one tile at a time
(ALST, arXiv 2506.13996).
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from inspect import Parameter, signature

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from trainer.layout import Recompute
from trainer.models.spec import ModelSpec
from trainer.parallel.patches import replace_forward

Forward = Callable[[torch.Tensor], torch.Tensor]
TRIED = 7
"""The tokens of a tile on a tiny copy, whose rows have more."""
COMPUTES: ContextVar[bool] = ContextVar("COMPUTES", default=False)
"""True while a tile is computed, of which only the input is kept."""
_SINGLE = 2 * [Parameter.POSITIONAL_OR_KEYWORD]


def mlps(model: nn.Module, spec: ModelSpec) -> list[str]:
    """List the modules of blocks that are called with one tensor and hold two matrices or more.

    They hold nothing of more dimensions (stacked experts, convolutions), and are no attention by
    their name. That they treat each token alone is left to a trial.
    """
    blocks = [(name, model.get_submodule(name)) for name in spec.blocks]
    children = [(f"{name}.{own}", m) for name, block in blocks for own, m in block.named_children()]
    return [name for name, module in children if _is_mlp(name, module)]


def _is_mlp(name: str, module: nn.Module) -> bool:
    kind = type(module)
    takes = [parameter.kind for parameter in signature(kind.forward).parameters.values()]
    dims = [parameter.dim() for parameter in module.parameters()]
    attends = "att" in f"{name.rpartition('.')[2]} {kind.__name__}".lower()
    return takes == _SINGLE and dims.count(2) > 1 and max(dims) == 2 and not attends


def tried(recompute: Recompute) -> Recompute:
    """Return the same with several tiles in a row of a tiny copy."""
    return replace(recompute, tile=min(recompute.tile, TRIED))


def apply(model: nn.Module, spec: ModelSpec, tokens: int, parts: int) -> None:
    """Let the MLPs of blocks compute at most so many tokens of each row at a time, in place.

    `parts`: the ranks between which they divide the tokens that they give (sequence parallelism).
    """
    for name in mlps(model, spec):
        module = model.get_submodule(name)
        replace_forward(module, partial(_in_tiles, module.forward, tokens, parts))


def _in_tiles(forward: Forward, tokens: int, parts: int, hidden: torch.Tensor) -> torch.Tensor:
    """Return what `forward` gives for hidden states [batch, sequence, width], in their order.

    A tile has the same share of each part, of which `forward` may give this rank's alone.
    """
    length = hidden.shape[1]
    if (count := -(-length // tokens)) < 2:
        return forward(hidden)
    run = partial(_computed, forward)
    if torch.is_grad_enabled():
        run = partial(checkpoint, run, use_reentrant=False, preserve_rng_state=False)
    rows = F.pad(hidden, (0, 0, 0, -length % parts)) if parts > 1 else hidden
    given = rows.unflatten(1, (parts, -1)).chunk(count, 2)
    outputs = [run(tile).unflatten(1, (-1, tile.shape[2])) for tile in given]
    return torch.cat(outputs, 2).flatten(1, 2)[:, :length]


def _computed(forward: Forward, tile: torch.Tensor) -> torch.Tensor:
    tokens = tile.flatten(1, 2).contiguous()  # models' code makes views of it
    if torch.compiler.is_compiling():
        return forward(tokens)
    token = COMPUTES.set(True)
    try:
        return forward(tokens)
    finally:
        COMPUTES.reset(token)
