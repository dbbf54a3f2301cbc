"""Faults of attention: windows, heads, positions, and what ranks of a context axis share."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any
from unittest import mock

from tests.support.certify.faults.planting import around, in_blocks_of_the_run


def window_of_one_more(engine: str) -> Any:
    """In the run's own masks alone: those of the one process are made by transformers without
    ours.
    """
    from transformers import masking_utils

    from trainer.tasks.masks import Masks

    real, overlay = Masks.of, masking_utils.sliding_window_overlay

    @contextlib.contextmanager
    def of(self, *rows):
        wider = mock.patch.object(
            masking_utils, "sliding_window_overlay", lambda window: overlay(window + 1)
        )
        with wider, real(self, *rows):
            yield

    return mock.patch.object(Masks, "of", of)


def wrong_kv_head(engine: str) -> Any:
    """Queries see the keys of the next group."""

    def change(model: Any, spec: Any) -> None:
        keys = model.get_submodule("model.layers.1.self_attn.k_proj")
        keys.register_forward_hook(
            lambda module, inputs, output: output.roll(output.shape[-1] // 2, -1)
        )

    return in_blocks_of_the_run(change)


def rotary_embedding_of_the_last_stage(engine: str) -> Any:
    import torch.distributed as dist

    def change(model: Any, spec: Any) -> None:
        if dist.get_rank() == 1:
            real = model.model.rotary_emb.forward
            model.model.rotary_emb.forward = lambda x, position_ids, **named: real(
                x, 2 * position_ids, **named
            )

    return in_blocks_of_the_run(change)


def unscaled_attention(engine: str) -> Any:
    def change(model: Any, spec: Any) -> None:
        model.get_submodule("transformer.h.1.attn").register_forward_hook(
            lambda m, i, o: (o[0] * 1.001, *o[1:])
        )

    return in_blocks_of_the_run(change)


def weighed_by_its_own_targets(engine: str) -> Any:
    """The gradient is that of a mean of the ranks' own means."""
    from trainer.engines import normalise

    own: list[Any] = []

    def counted(real, *args):
        own.append(real(*args))
        return own[-1].clone()  # it is summed over the ranks in place

    def scale(real, targets, mesh, divided_by=1):
        return real(own[-1].clamp_min(1) * mesh.size("loss"), mesh, divided_by)

    stack = contextlib.ExitStack()
    stack.enter_context(around(normalise, "counted_here", counted))
    stack.enter_context(around(normalise, "gradient_scale", scale))
    return stack


def positions_of_each_rank(engine: str) -> Any:
    """Position ids restart on each rank."""

    def change(model: Any, spec: Any) -> None:
        real = model.model.rotary_emb.forward
        model.model.rotary_emb.forward = lambda x, position_ids, **named: real(
            x, position_ids - position_ids[:, :1], **named
        )

    return in_blocks_of_the_run(change)


def with_mask(change: Callable[..., Any]) -> Any:
    """`change(seen, function, border)` gives the mask, of what is seen within documents and of the
    model's own; `border(q, k)` is true if two ranks of a row have these tokens.
    """
    from trainer.tasks import masks

    def apart(real, function, documents):
        length = row[-1] // 2
        return change(real(function, documents), function, lambda q, k: q // length != k // length)

    row: list[int] = []
    stack = contextlib.ExitStack()
    stack.enter_context(
        around(masks, "_of_whole_rows", lambda real, *args: row.append(args[1]) or real(*args))
    )
    stack.enter_context(around(masks, "_apart", apart))
    return stack


def window_within_a_rank(engine: str) -> Any:
    return with_mask(
        lambda seen, function, border: lambda b, h, q, k: seen(b, h, q, k) & ~border(q, k)
    )


def border_of_documents_ignored(engine: str) -> Any:
    """A document on the second rank sees those on the first."""
    return with_mask(
        lambda seen, function, border: (
            lambda b, h, q, k: seen(b, h, q, k) | (function(b, h, q, k) & border(q, k))
        )
    )


def kv_heads_of_the_neighbour(engine: str) -> Any:
    from trainer.distributed.context_ranks import ContextRanks

    def attended(real, self, compute, query, key, value):
        others = (part.roll(part.shape[1] // self.division.size, 1) for part in (key, value))
        return real(self, compute, query, *others)

    return around(ContextRanks, "attended", attended)


def keys_in_the_order_of_groups(engine: str) -> Any:
    """Gathered keys and values stand as their ranks do: the tail of the first before the others."""
    from trainer.distributed.context_ranks import Division

    return around(Division, "in_order", lambda real, self, groups, dim: groups)
