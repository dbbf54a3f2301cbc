"""Table, head and loss split over the vocabulary: no tensor rank has all logits (Megatron-LM, arXiv
1909.08053, section 3).

Each rank's shard has the same size, the last a smaller one if they do not divide. Only this rank's
rows are looked up, and the ranks' vectors summed; `tasks/losses/cross_entropy.py` has the loss.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from trainer.distributed.dtensor import local, part_of
from trainer.distributed.exchange import vocabulary_shard_of
from trainer.models.spec import ModelSpec
from trainer.parallel.patches import has_rows, replace_forward


def apply(model: nn.Module, mesh: DeviceMesh) -> None:
    """Split table and head over `mesh`, on the meta device and in place; what is tied stays so."""
    split: dict[nn.Parameter, nn.Parameter] = {}
    for module in _ends(model):
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter not in split:
                split[parameter] = part_of(mesh, parameter, 0)
            module.register_parameter(name, split[parameter])
        if isinstance(module, nn.Embedding):
            replace_forward(module, partial(_looked_up, module, module.forward))
        elif type(module) is nn.Linear:  # a head that gives the loss knows its shard
            replace_forward(module, partial(_logits, module))


def whole_because(model: nn.Module, spec: ModelSpec, ranks: int) -> str | None:
    """Return the reason why each tensor rank has the whole vocabulary of `model`, or None."""
    if spec.language.own_loss:
        return "the model adds a loss of its own to that of the tokens"
    if not spec.language.head.word_by_word:
        return "its table or head does more than look rows up and multiply by them"
    ends = _ends(model)
    shared = {id(parameter) for module in ends for parameter in module.parameters()}
    holders = [m for m in model.modules() if shared & {id(p) for p in m._parameters.values()}]
    if len(holders) != len(ends):
        return "another module shares its table or head"
    for size in {len(parameter) for module in ends for parameter in module.parameters()}:
        if -(-size // ranks) * (ranks - 1) >= size:
            return f"a vocabulary of {size} leaves one of {ranks} ranks without a part"
    return None


def note_of(spec: ModelSpec, ranks: int) -> str:
    """Say who has the vocabulary."""
    reason = whole_because(spec.build(), spec, ranks)
    if reason is None:
        return f"table, head and loss are split over the vocabulary, on {ranks} tensor ranks"
    return f"each tensor rank has the whole table and head, and computes the whole loss: {reason}"


def _ends(model: nn.Module) -> list[nn.Module]:
    """List the input embeddings and the heads, with those that an adapter wraps."""
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]  # type: ignore[operator]
    inner = [module for end in ends for module in end.modules()]
    return [module for module in inner if isinstance(module, nn.Embedding | nn.Linear)]


def _logits(head: nn.Linear, hidden: torch.Tensor) -> torch.Tensor:
    """Return the logits of this rank's shard."""
    shard = vocabulary_shard_of(head.weight)
    bias = head.bias
    assert shard is not None
    own = None if bias is None else local(bias)
    return F.linear(shard.ranks.copy_to(hidden), local(head.weight), own)


def looks_up(module: nn.Module) -> bool:
    """Return True for a plain table, or one that is split: its backward pass needs no weight."""
    forward: Any = module.forward
    split = isinstance(forward, partial) and forward.func is _looked_up
    plain = forward.args[1] if split else forward
    return getattr(plain, "__func__", None) is nn.Embedding.forward


def _looked_up(
    table: nn.Embedding, look_up: Callable[[torch.Tensor], torch.Tensor], ids: torch.Tensor
) -> torch.Tensor:
    """Return the vectors [..., h] of tokens [...]: the sum over ranks, one of which has each."""
    shard = vocabulary_shard_of(table.weight)
    assert shard is not None
    index, own = shard.find(ids)
    padding = table.padding_idx
    if padding is not None:
        padding = padding - shard.start if shard.start <= padding < shard.stop else None
    with has_rows(table, local(table.weight), padding):
        vectors = look_up(index)
    return shard.ranks.reduce_from(vectors.where(own.unsqueeze(-1), 0))
