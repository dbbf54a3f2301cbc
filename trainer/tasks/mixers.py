"""Layers that carry state along a sequence, run a document at a time (Mamba, gated delta nets).

Masks keep packed documents apart in attention alone. A recurrence or a convolution along the
sequence takes no mask: it starts from nothing only where it is called again. It also needs all of
a document's tokens, so of ranks that share sequences one gets the whole document.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import NamedTuple, TypeGuard

import torch
from torch import nn
from torch.nn.attention.flex_attention import BlockMask
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from trainer.distributed.documents import DocumentPlace, Lengths, WholeDocuments
from trainer.models.names import outermost, pattern_of
from trainer.models.spec import ModelSpec
from trainer.probes.inputs import sequence_of
from trainer.probes.probe import TOLERANCE, Finding, observe, tiny
from trainer.tasks.attention import CuSeqlens
from trainer.tasks.patches import replace_mixer

DOCUMENTS: ContextVar[WholeDocuments | None] = ContextVar("DOCUMENTS", default=None)
"""The documents of the forward pass that runs; None: a row is one."""


@contextmanager
def within(documents: WholeDocuments | None) -> Iterator[None]:
    """Let layers with state know the documents of a forward pass."""
    token = DOCUMENTS.set(documents)
    try:
        yield
    finally:
        DOCUMENTS.reset(token)


def kept_apart(forward: Callable[..., object]) -> Callable[..., object]:
    """Return a forward that knows the documents of now also when it runs again, in backward.

    A block that compiles has no layer that asks for them, and PyTorch before 2.15 does not compile
    the question.
    """
    if torch.compiler.is_compiling():
        return forward
    documents = DOCUMENTS.get()
    return forward if documents is None else partial(_among, documents, forward)


def _among(
    documents: WholeDocuments, forward: Callable[..., object], *args: object, **kwargs: object
) -> object:
    with within(documents):
        return forward(*args, **kwargs)


def lengths_of(documents: torch.Tensor, row: int) -> Lengths:
    """List the lengths of documents, [batch, most] with zeros, and of each row's padding."""
    lengths = [[length for length in own if length] for own in documents.tolist()]
    rest = [row - sum(own) for own in lengths]
    return [own + [more] if more else own for own, more in zip(lengths, rest, strict=True)]


class Mixer(NamedTuple):
    """A kind of layer with state: some families call those without state by the same name."""

    pattern: str
    kind: str
    """The name of its class."""


Mixers = frozenset[Mixer]


def run_by_document(model: nn.Module, mixers: Callable[[], Mixers]) -> None:
    """Run layers of these kinds on whole documents, each by itself, in place."""
    kinds = mixers()
    number = 0
    for name, module in model.named_modules():
        kind = Mixer(pattern_of(name), type(module).__name__)
        if kind in kinds and not runs_by_document(module):
            replace_mixer(module, partial(_by_document, module.forward, number))
            number += 1


def runs_by_document(module: nn.Module) -> bool:
    """Return True for a layer that may run for another number of documents on each rank."""
    forward = module.forward
    return isinstance(forward, partial) and forward.func is _by_document


@torch.compiler.disable
def _by_document(
    forward: Callable[..., object], number: int, *args: object, **kwargs: object
) -> object:
    documents = DOCUMENTS.get()
    if documents is None or documents.are_rows:
        return forward(*args, **kwargs)
    leaves, form = tree_flatten((args, kwargs))
    kinds = [_has_tokens(value, documents) for value in leaves]

    def compute(group: Sequence[DocumentPlace], parts: Sequence[torch.Tensor]) -> object:
        tokens = iter(parts)
        own = [
            next(tokens) if moved else _within(group, value, documents)
            for value, moved in zip(leaves, kinds, strict=True)
        ]
        own_args, own_kwargs = tree_unflatten(own, form)
        with within(None):
            output = forward(*own_args, **own_kwargs)
        _check(output, (len(group), group[0].length))
        return output

    parts = [value for value, moved in zip(leaves, kinds, strict=True) if moved]
    if not parts:
        raise ValueError(f"a layer with state gets nothing of each of {documents.part} tokens")
    return documents.computed(compute, parts, number)


def _check(output: object, shape: tuple[int, int]) -> None:
    """Raise ValueError for a result that is not one of each token: a state, a cache."""
    for value in tree_leaves(output):
        if torch.is_tensor(value) and value.shape[:2] != shape:
            raise ValueError(f"a layer with state returns a tensor of shape {list(value.shape)}")


def _has_tokens(value: object, documents: WholeDocuments) -> bool:
    """Return True for a tensor with something for each of this rank's tokens: hidden states,
    positions. Raises ValueError for a tensor with another place for tokens, and for a mask that is
    no tensor.
    """
    if isinstance(value, CuSeqlens | BlockMask | Mapping):
        raise ValueError("a layer with state gets the mask of an attention kernel")
    if not torch.is_tensor(value) or _is_mask(value, documents):
        return False
    if not {documents.part, documents.row} & {*value.shape}:
        return False
    rows = len(documents.lengths)
    if value.ndim > 1 and value.shape[0] in (1, rows) and value.shape[1] == documents.part:
        return True
    raise ValueError(f"a layer with state gets a tensor of shape {list(value.shape)}")


def _is_mask(value: torch.Tensor, documents: WholeDocuments) -> bool:
    return value.ndim == 4 and value.shape[-2:] == (documents.row, documents.row)


def _within(group: Sequence[DocumentPlace], value: object, documents: WholeDocuments) -> object:
    """Return a mask of whole rows for some documents, and all else as it is."""
    if not torch.is_tensor(value) or not _is_mask(value, documents):
        return value
    masks = value.expand(len(documents.lengths), *value.shape[1:])
    tokens = [(row, slice(begin, begin + length)) for row, begin, length in group]
    return torch.stack([masks[row, :, own, own] for row, own in tokens])


def mixers_of(spec: ModelSpec, logits: Callable[..., torch.Tensor]) -> Mixers:
    """Find the outermost modules in blocks through which one document moves the next.

    On a tiny copy, each module that gives a hidden state for each token runs again on what it got,
    but for another first document. `logits(model, row)` runs a row of two packed documents.
    """

    def look() -> Mixers:
        small, model = tiny(spec)
        ids = sequence_of(small)[None]
        with torch.no_grad():
            calls = _calls(model.eval(), small.blocks, lambda: logits(model, ids))
            moved = [
                name
                for name, call in calls.items()
                if _moves(call, ids.shape[1] // 2, ids.shape[1])
            ]
        kinds = {name: type(calls[name].module).__name__ for name in outermost(moved)}
        return frozenset(Mixer(pattern_of(name), kind) for name, kind in kinds.items())

    result = observe(look)
    return frozenset() if isinstance(result, Finding) else result


class Call(NamedTuple):
    """The first call of a module: what it got, and what it gave."""

    module: nn.Module
    args: tuple[object, ...]
    kwargs: dict[str, object]
    output: object


def _calls(
    model: nn.Module, blocks: Sequence[str], run: Callable[[], object]
) -> Mapping[str, Call]:
    """Return the first call of each module within blocks, parents first."""
    calls: dict[str, Call] = {}
    inside = tuple(f"{block}." for block in blocks)
    handles = []
    for name, module in model.named_modules():
        if name.startswith(inside):

            def note(
                module: nn.Module,
                args: tuple[object, ...],
                kwargs: dict[str, object],
                output: object,
                name: str = name,
            ) -> None:
                calls.setdefault(name, Call(module, args, kwargs, output))

            handles.append(module.register_forward_hook(note, with_kwargs=True))
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return {name: calls[name] for name, _ in model.named_modules() if name in calls}


def _moves(call: Call, before: int, length: int) -> bool:
    """Return True if tokens from `before` on get another output when those before them change."""
    result = _state(call.output, length)
    if result is None:
        return False
    leaves, form = tree_flatten((call.args, call.kwargs))
    places = [index for index, value in enumerate(leaves) if _is_state(value, length)]
    if not places:
        return False
    other = leaves[places[0]].clone()
    other[:, :before] = other[:, :before].flip(1) * 2 + 1
    leaves[places[0]] = other
    args, kwargs = tree_unflatten(leaves, form)
    again = _state(call.module(*args, **kwargs), length)
    assert again is not None
    error = (again - result)[:, before:].abs().max()
    return not bool(error <= TOLERANCE * result.abs().max())


def _state(output: object, length: int) -> torch.Tensor | None:
    """Return the first hidden state in an output."""
    return next((value for value in tree_flatten(output)[0] if _is_state(value, length)), None)


def _is_state(value: object, length: int) -> TypeGuard[torch.Tensor]:
    if not torch.is_tensor(value) or not value.is_floating_point():
        return False
    return value.ndim == 3 and value.shape[:2] == (1, length)
