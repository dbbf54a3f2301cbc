"""`ModelSpec`: the one view of a model that all engines share, and how its values come to be."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, conv_flop_count

from trainer.distributed.ranks import Ranks
from trainer.state import WEIGHT, StateTensor, renamed

WHOLE = "whole"
"""In a tensor plan, beside transformers' words: every rank has all of it, and all of its gradient."""


class Weights(Protocol):
    """Values for parameters, by name; None where there is none and the initial value stands."""

    def read(self, name: str) -> torch.Tensor | None: ...

    def release(self) -> None:
        """The engine is built: what stands in memory alone may go."""
        ...


ONE_FILE = 250_000_000
"""Parameters, 1 GB in float32, up to which an own module's weights are one file."""


class NoWeights:
    """Training from scratch."""

    def read(self, name: str) -> torch.Tensor | None:
        return None

    def release(self) -> None: ...


class Tuning(NamedTuple):
    """What the optimizer does otherwise with a parameter."""

    lr_multiplier: float = 1.0
    weight_decay: float | None = None
    """None: the optimizer's own."""


@dataclass(frozen=True)
class Trial:
    """A small fixed input, on which a copy of the model or a stage of it is tried. On the CPU."""

    output: Callable[[nn.Module], torch.Tensor]
    """What the whole model, or its last stage, makes of it."""
    hidden: Callable[[nn.Module], torch.Tensor]
    """The hidden state that another stage gives."""
    batches: Sequence[dict[str, torch.Tensor]] = ()
    """All of it as one micro-batch, then each sample as one."""


@dataclass(frozen=True)
class LanguageModel:
    """What only a model of tokens has; of another module all of it is empty."""

    head_parameters: int = 0
    """Parameters of the output head's matrix (0 without one)."""
    embedding_parameters: int = 0
    """Parameters of the input table, which takes part in no matrix product (0 when it is also the head)."""
    idle_parameters: int = 0
    """Parameters of experts that a token was not sent to (0 for a dense model)."""
    vocabulary: int = 0
    hidden_size: int | None = None
    layers: int = 0
    attention_width: int = 0
    """Heads x head size: what the attention products are wide."""
    heads: int = 0
    kv_heads: int = 0
    tensor_plan: dict[str, str] = field(default_factory=dict)
    """Modules and parameters of the blocks that tensor parallelism splits -> how, by transformers' name for it."""
    plain_head: bool = False
    """True when the logits are the head's product with the last hidden state and nothing else."""
    own_loss: bool = False
    """True when its own `forward(labels=...)` adds to the token losses: a router's, by `output_router_logits`."""


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
    language: LanguageModel = field(default_factory=LanguageModel)
    tied: dict[str, str] = field(default_factory=dict)
    """Parameter name -> the name of the parameter that it is one with."""
    trial: Trial | None = None
    """How a module that is no language model is tried; that is tried on tokens."""
    sparse: tuple[str, ...] = ()
    """Parameters that some rows leave without a gradient, and others not, by name, numbers replaced by `*`."""
    weights: Weights = field(default_factory=NoWeights)
    frozen: Mapping[str, int] = field(default_factory=dict)
    """Parameters that stay as they are because the config asks for it, by name, with their sizes."""
    tuned: Mapping[str, Tuning] = field(default_factory=dict)
    """Parameters with a learning rate or a weight decay of their own, by name."""
    fresh: frozenset[str] = frozenset()
    """Parameters that pretrained weights need not have: they get initial values."""
    unsaved: frozenset[str] = frozenset()
    """Tensors that are held as they are and that no checkpoint has: those of the base of an adapter."""
    notes: tuple[str, ...] = ()
    """What of the folder or the config is not trained, a line each."""
    constructed: Callable[[str], torch.Tensor | None] = lambda name: None
    """The value that the constructor gives a small parameter or buffer, for what `initialise` leaves alone."""
    shrunk: Callable[..., ModelSpec] | None = None
    """`shrunk(layers=3, split=1)`: a tiny copy of the same architecture with at least so many blocks, to try things on.

    What was a multiple of `split` still is; raises ConfigError where no copy runs. Of language models it takes `sizes`.
    """
    shallow: Callable[[int], ModelSpec] | None = None
    """`shallow(n)`: the same model with its first n blocks alone, without weights; more blocks are more of the same."""
    lacks: tuple[str, ...] = ()
    """Of a tiny copy: what the model has and the copy has not, so that the copy proves less."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """The architecture in numbers and words, to be compared."""
    published: Mapping[str, str] = field(default_factory=dict)
    """Names of tensors, where files have others: ours -> that of the files."""
    merged: Callable[[Path], ModelSpec] | None = None
    """Of an adapter, if it is asked for: the model that the base is with the adapter of a folder added into it."""
    revision: str | None = None
    """Of a name on the hub, where one is asked for."""
    stem: str = "model"
    """How the names of its files of weights begin."""
    opens: str = "safetensors"
    """What opens the folder of a trained one."""
    save_config: Callable[[Any, torch.dtype | None], None] = lambda folder, dtype: None
    """Writes config.json, naming the dtype if one is given, and generation_config.json into a folder."""

    @property
    def one_file(self) -> bool:
        """True where a trained one is to be a single file, whoever held its shards: a small own module."""
        return self.opens == "safetensors" and self.parameters <= ONE_FILE


def stored(spec: ModelSpec, entries: Sequence[StateTensor]) -> list[StateTensor]:
    """Of an engine's state tensors those that files have, under the names that they have there."""
    return renamed([entry for entry in entries if entry.name not in spec.unsaved], spec.published)


def given_tensors(spec: ModelSpec, ranks: Ranks) -> list[StateTensor]:
    """The model as its weights have it, without an engine: each rank reads every so many tensors, one at a time."""
    model = spec.build()
    stateful = model.state_dict().keys()
    tensors = {name: t for name, t in (*model.named_parameters(), *model.named_buffers()) if name in stateful}

    def entry(name: str, owner: int, like: torch.Tensor) -> StateTensor:
        dtype = value.dtype if (value := spec.weights.read(name)) is not None else like.dtype
        read = lambda: spec.weights.read(name) if owner == ranks.rank else None  # noqa: E731
        return StateTensor(name, WEIGHT, tuple(like.shape), dtype, owner, read, write=lambda value: None)

    return [entry(name, index % ranks.world_size, tensors[name]) for index, name in enumerate(tensors)]


def units(root: nn.Module, blocks: tuple[str, ...]) -> Iterator[list[tuple[str, nn.Module]]]:
    """The model in units that are materialised one at a time: each block whole, every other module alone.

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


def counted_flops(spec: ModelSpec, loss: Callable[[nn.Module], torch.Tensor]) -> float:
    """FLOPs of a forward and a backward pass of a loss, counted by PyTorch on the meta device.

    Matrix products, convolutions and attention are counted; `loss(model)` brings its own input there.
    """
    ours = {torch.ops.aten.convolution_backward: _convolution_backward}
    with FlopCounterMode(display=False, custom_mapping=ours) as counter:
        loss(spec.build().train()).backward()
    return float(counter.get_total_flops())


def _convolution_backward(grad: Any, given: Any, weight: Any, *rest: Any, **_: Any) -> int:
    """As many for the input and for the weight as forward; PyTorch's own formula takes no heed of groups."""
    transposed, wanted = rest[4], rest[7]
    return conv_flop_count(given, weight, grad, transposed) * sum(wanted[:2])


def flops_per_token(spec: ModelSpec, sequence: int) -> float:
    """Training FLOPs per token, `6 N + 6 L H T` (causal half), forward and backward.

    N counts the parameters that take part in a token's matrix products: not the input table, nor experts that it is not
    sent to, but the head.
    What is frozen has no gradient of its own: 4 N.
    H is heads x head size. Source: PaLM, arXiv 2204.02311, appendix B, halved for the causal mask.
    """
    matrix = spec.parameters - spec.language.embedding_parameters - spec.language.idle_parameters
    learned = min(matrix, spec.parameters - sum(spec.frozen.values()))
    return 4.0 * matrix + 2.0 * learned + 6.0 * spec.language.layers * spec.language.attention_width * sequence
