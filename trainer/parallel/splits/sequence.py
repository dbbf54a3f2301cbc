"""Sequence parallelism between the split matrices (Megatron-LM, arXiv 2205.05198, section 4.2.2).

From the first block to the last each tensor rank has a part of each row's tokens: what norms and
dropout compute and keep there is divided, too. A row that does not divide gets zeros at its end,
which no token sees.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import nn

from trainer.distributed.exchange import Exchange
from trainer.parallel.patches import replace_forward


def with_first(
    change: Callable[[torch.Tensor], torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a module with its hidden state, the first one, changed."""
    named = kwargs.get("hidden_states", next(iter(kwargs.values()), None))
    first: Any = args[0] if args else named
    changed = change(first)
    values = (changed if value is first else value for value in (*args, *kwargs.values()))
    return tuple(islice(values, len(args))), dict(zip(kwargs, values, strict=True))


class TokenParts:
    """The parts of a micro-batch's rows: hidden states [batch, part, width]."""

    def __init__(self, ranks: Exchange) -> None:
        self._ranks = ranks
        self.length = 0
        """The number of tokens of the rows in the forward pass that runs."""

    def apply(self, model: nn.Module, blocks: Sequence[str]) -> None:
        """Divide hidden states where they enter the first block, and gather what the last returns.

        In between dropout draws for whole sequences, of which this rank's part counts.
        """
        model.get_submodule(blocks[0]).register_forward_pre_hook(self._divided, with_kwargs=True)
        model.get_submodule(blocks[-1]).register_forward_hook(self._joined)
        for module in [m for name in blocks for m in model.get_submodule(name).modules()]:
            if isinstance(module, nn.Dropout):
                replace_forward(module, partial(self._dropped, module, module.forward))

    def gather(self, part: torch.Tensor, terms: bool) -> torch.Tensor:
        """Return whole sequences, of which each rank uses all: for its terms, or for the same."""
        gather = self._ranks.gather_to if terms else self._ranks.gather
        return gather(part, 1, self.length)

    def _divided(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        def divide(hidden: torch.Tensor) -> torch.Tensor:
            self.length = hidden.shape[1]
            return self._ranks.scatter(hidden, 1)

        return with_first(divide, args, kwargs)

    def _joined(self, module: nn.Module, inputs: object, output: object) -> object:
        part, *rest = output if isinstance(output, tuple) else (output,)
        whole = self._ranks.gather(part, 1, self.length)
        return (whole, *rest) if isinstance(output, tuple) else whole

    def _dropped(
        self, dropout: nn.Dropout, draw: Callable[..., torch.Tensor], given: torch.Tensor
    ) -> torch.Tensor:
        parts = -(-self.length // self._ranks.group.size())
        if not dropout.training or not dropout.p or given.shape[1] != parts:
            return draw(given)
        ones = given.new_ones(len(given), self.length, *given.shape[2:])
        return given * self._ranks.scatter(draw(ones), 1)
