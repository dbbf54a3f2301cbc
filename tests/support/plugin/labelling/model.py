"""A tagger: a table, blocks of attention and an MLP, and a head of its own for labels."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

WORDS = 31


class Tagger(nn.Module):
    def __init__(self, labels: int, width: int, blocks: int, length: int) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, width)
        self.places = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, labels)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Score the labels of tokens [batch, sequence]: [batch, sequence, labels]."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        # by a call, as the stages of a pipeline but the first have no table to index
        hidden = self.table(tokens) + self.places(places)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(width, 3 * width)
        self.dropout = nn.Dropout(0.1)
        self.mlp = Mlp(width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the next hidden state, [batch, sequence, width]."""
        query, key, value = self.mix(self.norm(hidden)).chunk(3, -1)
        hidden = hidden + self.dropout(scaled_dot_product_attention(query, key, value))
        return hidden + self.mlp(hidden)  # type: ignore[no-any-return]


class Mlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(hidden).tanh())  # type: ignore[no-any-return]


def tensor_plan(blocks: int) -> dict[str, str]:
    """Return how tensor ranks split the blocks: their MLPs by columns, then by rows."""
    plan = {}
    for number in range(blocks):
        plan[f"blocks.{number}.mlp.up"] = "colwise"
        plan[f"blocks.{number}.mlp.down"] = "rowwise"
    return plan
