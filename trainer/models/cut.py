"""A model cut into pipeline stages: the model itself, with stand-ins for other stages' blocks.

So rotary embeddings, masks, windows and soft caps stay the model's own code, and no parameter
changes its name. Every stage runs the model's whole forward on the micro-batch's ids. The hidden
state from the previous stage replaces the output of the block before the stage's first.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from trainer.models.spec import ModelSpec


@dataclass(frozen=True)
class StageBoundary:
    """Modules outside the blocks, by where in a model's forward they run."""

    before: tuple[str, ...]
    """Names of modules with parameters that run before the blocks, and of those that never run."""
    after: tuple[str, ...]
    """Names of modules that run after the blocks, with or without parameters."""
    tuples: int
    """The number of values a block returns; 0 for a bare tensor."""
    around: tuple[str, ...] = ()
    """Names of modules without parameters that run both before and after the blocks."""


class StageInput:
    """The hidden state [batch, sequence, hidden] that a stage got from the stage before it."""

    def __init__(self) -> None:
        self.hidden: torch.Tensor | None = None
        """The hidden state; None on the first stage, and between micro-batches."""

    def put(self, hidden: torch.Tensor | None) -> None:
        """Set the hidden state that the next forward pass starts from."""
        self.hidden = hidden


class _Passed(nn.Module):
    """A stand-in for a block, norm or head of another stage: returns its first argument."""

    def __init__(self, tuples: int = 0) -> None:
        super().__init__()
        self._tuples = tuples

    @property
    def weight(self) -> torch.Tensor:
        """An empty tensor: a model's initialiser may fill its head's weight on any stage."""
        return torch.empty(0)

    def forward(self, *args: object, **kwargs: object) -> object:
        hidden = args[0] if args else next(iter(kwargs.values()))
        return (hidden, *[None] * (self._tuples - 1)) if self._tuples else hidden


class _UntilBlocks(nn.Module):
    """A stand-in for a module that runs before and after the blocks.

    After the blocks it returns its input, as another stage runs the module there.
    """

    def __init__(self, module: nn.Module, whole: nn.Module, last_block: nn.Module) -> None:
        super().__init__()
        self.module = module
        self._behind = False
        whole.register_forward_pre_hook(lambda *_: self._stand(behind=False))
        last_block.register_forward_hook(lambda *_: self._stand(behind=True))

    def forward(self, *args: object, **kwargs: object) -> object:
        if self._behind:
            return args[0] if args else next(iter(kwargs.values()))
        return self.module(*args, **kwargs)

    def _stand(self, *, behind: bool) -> None:
        self._behind = behind


class _Blank(nn.Module):
    """A stand-in for an input embedding or projection: returns zeros, which no block reads."""

    def __init__(self, stage_input: StageInput, width: int, table: bool) -> None:
        super().__init__()
        self._stage_input = stage_input
        self._width = width
        self._table = table

    @property
    def weight(self) -> torch.Tensor:
        """The hidden state, from which some models read an embedding's device and dtype.

        Empty before there is one: a model's initialiser may fill its embeddings.
        """
        hidden = self._stage_input.hidden
        return torch.empty(0) if hidden is None else hidden

    def forward(self, given: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        hidden = self._stage_input.hidden
        assert hidden is not None
        return hidden.new_zeros(*(given.shape if self._table else given.shape[:-1]), self._width)


class _Received(_Passed):
    """A stand-in for the block before this stage's first: returns the received hidden state."""

    def __init__(self, stage_input: StageInput, tuples: int = 0) -> None:
        super().__init__(tuples)
        self._stage_input = stage_input

    def forward(self, *args: object, **kwargs: object) -> object:
        return super().forward(self._stage_input.hidden)


def is_whole(module: nn.Module) -> bool:
    """Return False if another stage has a part of the module."""
    return not any(isinstance(part, _Passed | _Blank | _UntilBlocks) for part in module.modules())


def cut(model: nn.Module, spec: ModelSpec, boundary: StageBoundary, blocks: range) -> StageInput:
    """Reduce `model`, in place, to the stage with these `blocks`; return the stage's input.

    The first stage keeps the input embeddings, the last stage the final norm and the head. If the
    head is tied to an input embedding, the last stage keeps that, too: the parameter is then on
    both stages.
    """
    stage_input = StageInput()
    first = blocks.start == 0
    last = blocks.stop == len(spec.blocks)
    for index, name in enumerate(spec.blocks):
        if index == blocks.start - 1:
            _replace_block(model, name, _Received(stage_input, boundary.tuples))
        elif index not in blocks:
            _replace_block(model, name, _Passed(boundary.tuples))
    if not first:
        kept = kept_for_the_head(spec, boundary) if last else set()
        for name in boundary.before:
            if name not in kept:
                model.set_submodule(name, _blank(model.get_submodule(name), stage_input))
    if not last:
        for name in boundary.after:
            model.set_submodule(name, _Passed())
        whole = getattr(model, "base_model", model)
        last_block = model.get_submodule(spec.blocks[blocks.stop - 1])
        for name in boundary.around:
            model.set_submodule(name, _UntilBlocks(model.get_submodule(name), whole, last_block))
    return stage_input


def _replace_block(model: nn.Module, name: str, stand_in: nn.Module) -> None:
    """Replace a block; the stand-in gets its string attributes.

    A model may read in one of them what kind of mask a block needs.
    """
    block = model.get_submodule(name)
    attributes: dict[str, object] = {}
    for part in (*reversed(type(block).__mro__), block):
        attributes.update(vars(part))
    words = {k: v for k, v in attributes.items() if isinstance(v, str) and not k.startswith("_")}
    vars(stand_in).update(words)
    model.set_submodule(name, stand_in)


def _blank(module: nn.Module, stage_input: StageInput) -> nn.Module:
    width = getattr(module, "embedding_dim", None) or getattr(module, "out_features", None)
    if not isinstance(width, int):
        return _Passed()
    return _Blank(stage_input, width, isinstance(module, nn.Embedding))


def kept_for_the_head(spec: ModelSpec, boundary: StageBoundary) -> set[str]:
    """Return the modules before the blocks that the last stage keeps: the head is tied to them."""
    after = tuple(f"{name}." for name in boundary.after)
    owners = [owner for alias, owner in spec.tied.items() if alias.startswith(after)]
    return {owner.rpartition(".")[0] for owner in owners} & set(boundary.before)
