"""The way of hidden states into a module with split layers, and of their gradient out of it.

Its layers split by columns get the same hidden state; each tensor rank has a term of its gradient.
In the backward pass (Megatron-LM's `LinearWithGradAccumulationAndAsyncCommunication`):

    gather the hidden state again     begun, where a rank keeps its part of the tokens alone
    dx = sum of dy W                  products of all these layers
    sum dx over ranks                 begun
    dW = dy^T x                       products of all these layers
    wait for the sum

The order is that of autograd: of the nodes that are ready, the one made last runs first.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
import torch.nn.functional as F
from torch import nn
from transformers.pytorch_utils import Conv1D

from trainer.distributed.autograd import differentiable_once
from trainer.distributed.dtensor import local
from trainer.distributed.exchange import Exchange
from trainer.models.finetuning.quantised.quantised_base import QuantisedLinear
from trainer.parallel import float8
from trainer.parallel.splits.sequence import TokenParts, with_first

Linear: TypeAlias = nn.Linear | Conv1D | QuantisedLinear


def matrix_of(layer: nn.Linear | Conv1D) -> torch.Tensor:
    """Return this rank's part of a layer's matrix, [outputs, inputs]."""
    weight = local(layer.weight)
    return weight.T if isinstance(layer, Conv1D) else weight


def product(layer: Linear, given: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return x W^T + b by this rank's part of W."""
    if isinstance(layer, QuantisedLinear):
        return layer.product(given, bias)
    if float8.converted(layer):
        return float8.product(layer, given, bias)
    return F.linear(given, matrix_of(layer), bias)


class Backward(NamedTuple):
    """How the backward pass of a region computes."""

    overlaps: bool
    """True if the gradients of matrices are computed while messages are under way."""
    recomputed: bool
    """True if the module is computed again, with its whole hidden state: it is kept until then, and
    not gathered once more."""


class Region:
    """A module that hidden states enter, whose gradient is summed once.

    With `terms` all that the module computes is a rank's term of what it gives.
    """

    def __init__(
        self,
        ranks: Exchange,
        sequence: TokenParts | None,
        terms: bool,
        backward: Backward,
    ) -> None:
        self._ranks = ranks
        self.sequence = sequence
        self._terms = terms
        self._backward = backward
        self.layers: list[Linear] = []
        """The layers split by columns in it."""
        self._given: torch.Tensor | None = None
        self._entered: torch.Tensor | None = None
        self._pass: _RegionPass | None = None
        self._matrices: dict[nn.Module, tuple[int, torch.Tensor]] = {}
        """The numbers and matrices of layers whose gradients are computed so in this pass."""

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        def entering(hidden: torch.Tensor) -> torch.Tensor:
            layers = self._overlapped()
            if layers:
                hidden = self._overlap(hidden, layers)
            elif self.sequence is not None:
                hidden = self.sequence.gather(hidden, self._terms)
            elif self._terms:
                hidden = self._ranks.copy_to(hidden)
            self._given = hidden
            self._entered = hidden if self._terms else None
            return hidden

        return with_first(entering, args, kwargs)

    def leave(self, *_: object) -> None:
        self._given = self._entered = self._pass = None
        self._matrices = {}

    def _overlapped(self) -> list[nn.Linear | Conv1D]:
        """List the layers whose gradients are computed while messages are under way."""
        if not self._backward.overlaps or not torch.is_grad_enabled():
            return []
        if torch.compiler.is_compiling():  # the compiler has an order of its own
            return []
        trained = [layer for layer in self.layers if layer.weight.requires_grad]
        plain = [layer for layer in trained if not isinstance(layer, QuantisedLinear)]
        return [layer for layer in plain if not float8.converted(layer)]

    def _overlap(self, hidden: torch.Tensor, layers: list[nn.Linear | Conv1D]) -> torch.Tensor:
        length = None if self.sequence is None else self.sequence.length
        self._pass = _RegionPass(self._ranks, length)
        hidden = _Awaited.apply(hidden, self._pass)
        matrices = _Matrices.apply(self._pass, *map(matrix_of, layers))
        self._matrices = dict(zip(layers, enumerate(matrices), strict=True))
        if length is not None and not self._backward.recomputed:
            self._pass.part = hidden.detach()
        return _Entered.apply(hidden, self._pass)  # type: ignore[no-any-return]

    def entered(self, given: torch.Tensor, whole: bool) -> torch.Tensor:
        """Return what a layer gets, once its gradient is summed over the ranks.

        `whole`: it gives the columns of all ranks.
        """
        if self._terms and self._given is not None and not whole:
            return given
        if given is not self._given:
            return self._ranks.copy_to(given)
        if self._entered is None:
            self._entered = self._ranks.copy_to(given)
        return self._entered

    def columns(self, layer: Linear, given: torch.Tensor) -> torch.Tensor:
        """Return this rank's columns of what a layer gives."""
        bias = None if layer.bias is None else local(layer.bias)
        if self._pass is None or layer not in self._matrices or given is not self._given:
            return product(layer, given, bias)
        number, matrix = self._matrices[layer]
        return _Columns.apply(given, matrix, bias, self._pass, number)  # type: ignore[no-any-return]


class _Term(NamedTuple):
    """A term of a matrix's gradient, still to be computed: dy^T x."""

    number: int
    gradient: torch.Tensor
    """dy [..., outputs]."""
    hidden: torch.Tensor
    """x [..., inputs]."""


@dataclass(eq=False)
class _RegionPass:
    """One forward pass of a region, and what its backward pass has begun."""

    ranks: Exchange
    length: int | None
    """The tokens of whole sequences of which each rank has a part; None: each has them all."""
    part: torch.Tensor | None = None
    """This rank's part of the hidden state, if the whole is gathered again."""
    terms: list[_Term] = field(default_factory=list)
    _whole: torch.Tensor | None = None
    _sum: torch.Tensor | None = None

    def begin_gather(self, part: torch.Tensor) -> torch.Tensor:
        """Begin to gather the hidden state of which each rank has a part."""
        assert self.length is not None
        return self.ranks.begin_gather(part, 1, self.length)

    def gather_again(self, part: torch.Tensor) -> None:
        """Begin to gather it for the gradients of matrices, once for all of them."""
        if self._whole is None:
            self._whole = self.begin_gather(part)

    def take_gradients(self, count: int) -> list[torch.Tensor | None]:
        """Return the gradients of so many matrices; None for those that were not multiplied by."""
        whole = None if self._whole is None else self.ranks.land(self._whole)
        gradients: list[torch.Tensor | None] = [None] * count
        for number, gradient, hidden in self.terms:
            rows = hidden if whole is None else whole
            term = gradient.flatten(0, -2).T @ rows.flatten(0, -2)
            others = gradients[number]
            gradients[number] = term if others is None else others + term
        self.terms.clear()
        self._whole = None
        return gradients

    def begin_sum(self, gradient: torch.Tensor) -> torch.Tensor:
        """Begin to sum the ranks' terms of the gradient of the hidden state."""
        if self.length is None:
            self._sum = self.ranks.begin_sum(gradient)
        else:
            self._sum = self.ranks.begin_reduce_scatter(gradient, 1)
        return self._sum

    def take_sum(self) -> torch.Tensor:
        """Wait for the sum, and return it."""
        assert self._sum is not None
        total = self.ranks.land(self._sum)
        self._sum = None
        return total


class _Context(Protocol):
    state: _RegionPass
    number: int
    needs_input_grad: tuple[bool, ...]
    saved_tensors: tuple[torch.Tensor, ...]

    def save_for_backward(self, *tensors: torch.Tensor) -> None: ...

    def set_materialize_grads(self, value: bool) -> None: ...


class _Awaited(torch.autograd.Function):
    """Waits in the backward pass for the sum that `_Entered` has begun."""

    @staticmethod
    def forward(ctx: _Context, hidden: torch.Tensor, state: _RegionPass) -> torch.Tensor:  # type: ignore[override]
        ctx.state = state
        return hidden.view_as(hidden)

    @staticmethod
    @differentiable_once("a module split over tensor ranks")
    def backward(ctx: _Context, gradient: torch.Tensor) -> object:  # type: ignore[override]
        return ctx.state.take_sum(), None


class _Matrices(torch.autograd.Function):
    """Computes the gradients of all matrices of a region in the backward pass."""

    @staticmethod
    def forward(ctx: _Context, state: _RegionPass, *matrices: torch.Tensor) -> object:  # type: ignore[override]
        ctx.state = state
        ctx.set_materialize_grads(False)
        return tuple(matrix.view_as(matrix) for matrix in matrices)

    @staticmethod
    @differentiable_once("a module split over tensor ranks")
    def backward(ctx: _Context, *empty: object) -> object:  # type: ignore[override]
        return None, *ctx.state.take_gradients(len(empty))


class _Entered(torch.autograd.Function):
    """Gathers the hidden state, if each rank has a part, and begins the sum of its gradient."""

    @staticmethod
    def forward(ctx: _Context, hidden: torch.Tensor, state: _RegionPass) -> torch.Tensor:  # type: ignore[override]
        ctx.state = state
        if state.length is None:
            return hidden.view_as(hidden)
        whole = state.ranks.land(state.begin_gather(hidden))
        return whole.contiguous()  # models' code makes views of it

    @staticmethod
    @differentiable_once("a module split over tensor ranks")
    def backward(ctx: _Context, gradient: torch.Tensor) -> object:  # type: ignore[override]
        return ctx.state.begin_sum(gradient), None


class _Columns(torch.autograd.Function):
    """x W^T + b: the gradient of W is left to `_Matrices`, which gets an empty one."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: _Context,
        given: torch.Tensor,
        matrix: torch.Tensor,
        bias: torch.Tensor | None,
        state: _RegionPass,
        number: int,
    ) -> torch.Tensor:
        ctx.state = state
        ctx.number = number
        ctx.save_for_backward(given if state.part is None else state.part, matrix)
        return F.linear(given, matrix, bias)

    @staticmethod
    @differentiable_once("a module split over tensor ranks")
    def backward(ctx: _Context, gradient: torch.Tensor) -> object:  # type: ignore[override]
        hidden, matrix = ctx.saved_tensors
        state = ctx.state
        given, _, bias, *_ = ctx.needs_input_grad
        if state.part is not None:
            state.gather_again(hidden)
        state.terms.append(_Term(ctx.number, gradient, hidden))
        return (
            gradient @ matrix if given else None,
            matrix.new_zeros(()).expand_as(matrix),
            gradient.flatten(0, -2).sum(0) if bias else None,
            None,
            None,
        )
