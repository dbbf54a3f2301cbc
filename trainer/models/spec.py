"""`ModelSpec`: the one description of a model that all engines share, and how its values are
made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, conv_flop_count

from trainer.distributed.ranks import Ranks
from trainer.state import WEIGHT, StateTensor, renamed

WHOLE = "whole"
"""The word, besides transformers' own, for a tensor plan entry that every rank holds whole, with
its whole gradient.
"""


class Weights(Protocol):
    """Values of parameters, by name; None where there is none and the initial value stands."""

    def read(self, name: str) -> torch.Tensor | None: ...

    def release(self) -> None:
        """Free the weights held in memory: the engine is built."""
        ...


ONE_FILE = 250_000_000
"""The most parameters of an own module whose weights are saved as one file: 1 GB in float32."""


class NoWeights:
    """No pretrained weights: training from scratch."""

    def read(self, name: str) -> torch.Tensor | None:
        return None

    def release(self) -> None: ...


class Tuning(NamedTuple):
    """The optimizer settings of one parameter that differ from the rest."""

    lr_multiplier: float = 1.0
    weight_decay: float | None = None
    """The weight decay; None: the optimizer's own."""


@dataclass(frozen=True)
class Trial:
    """A small fixed input on the CPU, on which a copy of the model or a stage of it is tried."""

    output: Callable[[nn.Module], torch.Tensor]
    """Runs the whole model, or its last stage, on the input, and returns the output."""
    hidden: Callable[[nn.Module], torch.Tensor]
    """Runs any other stage on the input, and returns its hidden state."""
    batches: Sequence[dict[str, torch.Tensor]] = ()
    """The input as one micro-batch, then each sample as one."""


@dataclass(frozen=True)
class LanguageModel:
    """Properties of a language model; empty for any other module."""

    head_parameters: int = 0
    """The number of parameters of the output head's matrix (0 without one)."""
    embedding_parameters: int = 0
    """The number of parameters of the input table, which is in no matrix product (0 if it is also
    the head).
    """
    idle_parameters: int = 0
    """The number of parameters of experts that a token is not routed to (0 for a dense model)."""
    vocabulary: int = 0
    positions: int | None = None
    """The most tokens of a row; None where the config sets no limit."""
    hidden_size: int | None = None
    layers: int = 0
    attention_width: int = 0
    """The width of the attention products: heads x head size."""
    heads: int = 0
    kv_heads: int = 0
    tensor_plan: dict[str, str] = field(default_factory=dict)
    """Names of modules and parameters in blocks that tensor parallelism splits -> transformers'
    word for how.
    """
    plain_head: bool = False
    """True if the logits are the head's product with the last hidden state and nothing else."""
    own_loss: bool = False
    """True if its own `forward(labels=...)` adds a router's loss to the token losses
    (`output_router_logits`).
    """


@dataclass(frozen=True)
class Training:
    """The parameters of a model that are not trained or saved as all others are."""

    frozen: Mapping[str, int] = field(default_factory=dict)
    """The sizes of the parameters that the config freezes, by name."""
    tuned: Mapping[str, Tuning] = field(default_factory=dict)
    """Parameters with a learning rate or a weight decay of their own, by name."""
    sparse: tuple[str, ...] = ()
    """Patterns (numbers replaced by `*`) of the names of parameters that only some rows give a
    gradient.
    """
    fresh: frozenset[str] = frozenset()
    """Parameters that pretrained weights need not have: they get initial values."""
    unsaved: frozenset[str] = frozenset()
    """Frozen tensors that no checkpoint holds: those of an adapter's base."""


@dataclass(frozen=True)
class TinyCopies:
    """Smaller models of the same architecture, and the input on which they are tried."""

    input: Trial | None = None
    """The input on which a module that is no language model is tried; language models are tried on
    tokens.
    """
    copy: Callable[..., ModelSpec] | None = None
    """`copy(layers=3, split=1)` makes a tiny copy of the architecture with at least so many blocks,
    to try things on.

    Numbers that are multiples of `split` stay multiples of it; language models also take `sizes`.
    Raises ConfigError if no copy runs.
    """
    first_blocks: Callable[[int], ModelSpec] | None = None
    """`first_blocks(n)` is the same model with its first n blocks alone, without weights."""
    lacks: tuple[str, ...] = ()
    """Features of the model that this tiny copy lacks, so that a trial on the copy proves less."""


@dataclass(frozen=True)
class ModelFiles:
    """The folder of a trained model: its names, and how it is written and opened."""

    stem: str = "model"
    """The beginning of the names of its weight files."""
    published: Mapping[str, str] = field(default_factory=dict)
    """Our tensor names -> those in files, where they differ."""
    opens: str = "safetensors"
    """The function or format by which a trained model's folder is opened."""
    save_config: Callable[[Any, torch.dtype | None], None] = lambda folder, dtype: None
    """Writes config.json, with the dtype if one is given, and generation_config.json into a
    folder.
    """
    merged: Callable[[Path], ModelSpec] | None = None
    """Returns, if an adapter is to be merged, the spec of the base with a folder's adapter merged
    into it.
    """
    revision: str | None = None
    """The revision asked for of a model on the hub."""


@dataclass(frozen=True)
class ModelSpec:
    """A model as embed -> blocks -> head, before any of it is allocated."""

    name: str
    """The name shown to the user: the folder or hub id, or the model type."""
    build: Callable[[], nn.Module]
    """Builds the module on the meta device."""
    initialise: Callable[[nn.Module, str], None]
    """`initialise(root, module_name)` fills one module's own parameters and buffers with initial
    values.
    """
    blocks: tuple[str, ...]
    """Dotted names of the repeated blocks, in order; empty if none are known."""
    parameters: int
    language: LanguageModel = field(default_factory=LanguageModel)
    tied: dict[str, str] = field(default_factory=dict)
    """Parameter name -> the name of the parameter that it is tied to."""
    weights: Weights = field(default_factory=NoWeights)
    constructed: Callable[[str], torch.Tensor | None] = lambda name: None
    """Returns the constructor's value of a small parameter or buffer that `initialise` does not
    fill, or None.
    """
    training: Training = field(default_factory=Training)
    tiny: TinyCopies = field(default_factory=TinyCopies)
    files: ModelFiles = field(default_factory=ModelFiles)
    notes: tuple[str, ...] = ()
    """Notes on parts of the folder or the config that are not trained, a line each."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """The architecture as numbers and words, for comparison."""

    def tried_on(self, trial: Trial) -> ModelSpec:
        """Return the spec with the input on which it is tried."""
        return replace(self, tiny=replace(self.tiny, input=trial))

    @property
    def one_file(self) -> bool:
        """True if a trained model is saved as a single file, whichever ranks held its shards: a
        small own module.
        """
        return self.files.opens == "safetensors" and self.parameters <= ONE_FILE


def stored(spec: ModelSpec, entries: Sequence[StateTensor]) -> list[StateTensor]:
    """Select an engine's state tensors that files hold, under their names in the files."""
    return renamed(
        [entry for entry in entries if entry.name not in spec.training.unsaved],
        spec.files.published,
    )


def given_tensors(spec: ModelSpec, ranks: Ranks) -> list[StateTensor]:
    """Return the model's tensors from its weights, without an engine; each rank reads its share,
    one at a time.
    """
    model = spec.build()
    stateful = model.state_dict().keys()
    tensors = {
        name: t
        for name, t in (*model.named_parameters(), *model.named_buffers())
        if name in stateful
    }

    def entry(name: str, owner: int, like: torch.Tensor) -> StateTensor:
        dtype = value.dtype if (value := spec.weights.read(name)) is not None else like.dtype
        read = lambda: spec.weights.read(name) if owner == ranks.rank else None  # noqa: E731
        return StateTensor(
            name, WEIGHT, tuple(like.shape), dtype, owner, read, write=lambda value: None
        )

    return [
        entry(name, index % ranks.world_size, tensors[name]) for index, name in enumerate(tensors)
    ]


def units(root: nn.Module, blocks: tuple[str, ...]) -> Iterator[list[tuple[str, nn.Module]]]:
    """Split the model into units that are materialised one at a time: each block whole, every other
    module alone.

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
    """Count the FLOPs of a forward and a backward pass of a loss, with PyTorch's counter on the
    meta device.

    Matrix products, convolutions and attention are counted; `loss(model)` makes its own input on
    that device.
    """
    ours = {torch.ops.aten.convolution_backward: _convolution_backward}
    with FlopCounterMode(display=False, custom_mapping=ours) as counter:
        loss(spec.build().train()).backward()
    return float(counter.get_total_flops())


def _convolution_backward(grad: Any, given: Any, weight: Any, *rest: Any, **_: Any) -> int:
    """Count as many FLOPs for the input and for the weight as forward; PyTorch's own formula
    ignores groups.
    """
    transposed, wanted = rest[4], rest[7]
    return conv_flop_count(given, weight, grad, transposed) * sum(wanted[:2])


def flops_per_token(spec: ModelSpec, sequence: int) -> float:
    """Return the training FLOPs per token, forward and backward: `6 N + 6 L H T` (causal half).

    N counts the parameters in a token's matrix products: with the head, but without the input table
    and the experts that it is not routed to. Frozen ones have no weight gradient: 4 N. H is heads x
    head size. Source: PaLM, arXiv 2204.02311, appendix B, halved for the causal mask.
    """
    matrix = spec.parameters - spec.language.embedding_parameters - spec.language.idle_parameters
    learned = min(matrix, spec.parameters - sum(spec.training.frozen.values()))
    return (
        4.0 * matrix
        + 2.0 * learned
        + 6.0 * spec.language.layers * spec.language.attention_width * sequence
    )
