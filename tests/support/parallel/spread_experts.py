"""A layer of experts over ranks that are threads, beside the whole layer of one rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from tests.support.together import together
from trainer.distributed.exchange import Exchange
from trainer.distributed.ranks import Ranks
from trainer.parallel.splits import expert_ranks

Values = dict[str, torch.Tensor | None]


@dataclass(frozen=True)
class Routing:
    """A layer's sizes, and the experts that each rank's tokens chose: [tokens, chosen] each."""

    experts: int
    chosen: Sequence[torch.Tensor]
    hidden: int = 4
    width: int = 3
    dtype: torch.dtype = torch.float64

    @property
    def ranks(self) -> int:
        return len(self.chosen)

    def couples(self, rank: int) -> int:
        """Count the distinct other ranks of each of a rank's tokens, together."""
        homes = (self.chosen[rank] // (self.experts // self.ranks)).tolist()
        return sum(len(set(row) - {rank}) for row in homes)

    def rows(self, rank: int) -> int:
        """Count the tokens of other ranks that chose an expert of this one."""
        others = [chosen for r, chosen in enumerate(self.chosen) if r != rank]
        homes = (torch.cat(others) // (self.experts // self.ranks)).tolist() if others else []
        return sum(rank in row for row in homes)

    def part(self, whole: torch.Tensor | None, name: str, rank: int) -> torch.Tensor | None:
        """Return a rank's part of what the whole layer has by this name."""
        if whole is None:
            return None
        if name in ("output", "hidden", "weights"):
            return whole.split([len(chosen) for chosen in self.chosen])[rank]
        return whole.chunk(self.ranks)[rank]

    def layer(self) -> Any:
        """Return the whole layer, the same each time."""
        config = Qwen3MoeConfig(
            num_experts=self.experts, hidden_size=self.hidden, moe_intermediate_size=self.width
        )
        config._experts_implementation = "eager"
        layer = Qwen3MoeExperts(config).to(self.dtype)
        generator = torch.Generator().manual_seed(1)
        for parameter in layer.parameters():
            parameter.data.normal_(generator=generator)
        return layer

    def given(self, rank: int) -> list[torch.Tensor]:
        """Return the hidden states and weights of a rank's tokens."""
        generator = torch.Generator().manual_seed(rank + 2)
        shape = self.chosen[rank].shape
        options: Any = dict(generator=generator, dtype=self.dtype)
        return [torch.randn(shape[0], self.hidden, **options), torch.rand(shape, **options)]

    def on_ranks(self) -> list[tuple[Values, Counter[torch.dtype]]]:
        """Return what each rank has, and the bytes that it sent to others by dtype."""
        return together(self.ranks, self._on_rank)

    def _on_rank(self, ranks: Ranks) -> tuple[Values, Counter[torch.dtype]]:
        layer, exchange = self.layer(), Threads(SimpleNamespace(), ranks)  # type: ignore[arg-type]
        exchange.group.size = lambda: ranks.world_size  # type: ignore[method-assign]
        exchange.group.rank = lambda: ranks.rank  # type: ignore[method-assign]

        def part(parameter: nn.Parameter, dim: int) -> nn.Parameter:
            return nn.Parameter(parameter.data.chunk(self.ranks, dim)[ranks.rank].clone())

        expert_ranks.spread(layer, exchange, part, None)
        return passes(layer, self.chosen[ranks.rank], *self.given(ranks.rank)), exchange.sent

    def whole(self) -> Values:
        """Return the same of one process that has all tokens."""
        rows = map(torch.cat, zip(*map(self.given, range(self.ranks)), strict=True))
        return passes(self.layer(), torch.cat(list(self.chosen)), *rows)


def passes(layer: nn.Module, chosen: torch.Tensor, *given: torch.Tensor) -> Values:
    """Return what a layer gives, and every gradient."""
    hidden, weights = (value.requires_grad_() for value in given)
    output = layer(hidden, chosen, weights)
    scale = torch.arange(1, output.shape[1] + 1, dtype=output.dtype)
    loss = (output.square() * scale).sum()
    if loss.requires_grad:  # a whole layer without tokens computes nothing
        loss.backward()
    inputs = {"output": output.detach(), "hidden": hidden.grad, "weights": weights.grad}
    return inputs | {name: p.grad for name, p in layer.named_parameters()}


@dataclass(frozen=True)
class Threads(Exchange):
    """The exchanges of ranks that are threads; it counts the bytes that go to others."""

    ranks: Ranks
    sent: Counter[torch.dtype] = field(default_factory=Counter)

    def _moved(
        self, sent: Sequence[int], received: Sequence[int]
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        return partial(self._all_to_all, sent, received)

    def _all_to_all(
        self, sent: Sequence[int], received: Sequence[int], rows: torch.Tensor
    ) -> torch.Tensor:
        parts = list(rows.detach().split(list(sent)))
        others = (part for rank, part in enumerate(parts) if rank != self.ranks.rank)
        self.sent[rows.dtype] += sum(part.nbytes for part in others)
        mine = [theirs[self.ranks.rank] for theirs in self.ranks.gather(parts)]
        assert [len(part) for part in mine] == list(received)
        return torch.cat(mine)
