"""`ModelSpec`: the one view of a model that all engines share, and how its values come to be."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn


class Weights(Protocol):
    """Values for parameters, by name; None where there is none and the initial value stands."""

    def read(self, name: str) -> torch.Tensor | None: ...


class NoWeights:
    """Training from scratch."""

    def read(self, name: str) -> torch.Tensor | None:
        return None


@dataclass(frozen=True)
class ModelSpec:
    """A model as embed -> blocks -> head, before a single byte of it is allocated."""

    name: str
    """What a person calls it: the folder or hub id, or the model type."""
    build: Callable[[], nn.Module]
    """Makes the module on the meta device."""
    initialise: Callable[[nn.Module, str], None]
    """`initialise(root, module_name)` fills one module's own parameters and buffers with initial values."""
    blocks: tuple[str, ...]
    """Dotted names of the repeated blocks, in order; empty where the model has none that are known."""
    parameters: int
    head_parameters: int
    """Parameters of the output head's matrix (0 without one)."""
    embedding_parameters: int
    """Parameters of the input table, which takes part in no matrix product (0 when it is also the head)."""
    vocabulary: int = 0
    hidden_size: int | None = None
    layers: int = 0
    attention_width: int = 0
    """Heads x head size: what the attention products are wide."""
    heads: int = 0
    kv_heads: int = 0
    tensor_plan: dict[str, str] = field(default_factory=dict)
    """Modules and parameters of the blocks that tensor parallelism splits -> how, by transformers' name for it."""
    tied: dict[str, str] = field(default_factory=dict)
    """Parameter name -> the name of the parameter that it is one with."""
    dropout: bool = False
    """Whether anything in it drops."""
    plain_head: bool = False
    """True when the logits are the head's product with the last hidden state and nothing else."""
    weights: Weights = field(default_factory=NoWeights)
    shrunk: Callable[[], ModelSpec] | None = None
    """Makes a tiny copy of the same architecture, to try things on."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """The architecture in numbers and words, to be compared."""
    save_config: Callable[[Any, torch.dtype | None], None] = lambda folder, dtype: None
    """Writes config.json, naming the dtype if one is given, and generation_config.json into a folder."""


def units(root: nn.Module, blocks: tuple[str, ...]) -> Iterator[list[tuple[str, nn.Module]]]:
    """The model in pieces that are materialised one at a time: each block whole, every other module alone.

    Yields the named modules of each unit, children before parents.
    """
    heads = set(blocks)
    for name, module in root.named_modules():
        if name in heads:
            yield list(_children_first(name, module))
        elif not any(name.startswith(f"{block}.") for block in blocks):
            yield [(name, module)]


def _children_first(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for child_name, child in module.named_children():
        yield from _children_first(f"{name}.{child_name}", child)
    yield name, module


def flops_per_token(spec: ModelSpec, sequence: int) -> float:
    """Training FLOPs per token, `6 N + 6 L H T` (causal half), forward and backward.

    N counts the parameters that take part in matrix products: not the input table, but the head.
    H is heads x head size. Source: PaLM, arXiv 2204.02311, appendix B, halved for the causal mask.
    """
    matrix = spec.parameters - spec.embedding_parameters
    return 6.0 * matrix + 6.0 * spec.layers * spec.attention_width * sequence
