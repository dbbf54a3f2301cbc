"""`ModelSpec`: the one description of a model that all engines share."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import nn

from trainer.distributed.ranks import Ranks
from trainer.state import WEIGHT, Part, StateTensor, renamed
from trainer.storage import Json

WHOLE = "whole"
"""The style, in a tensor plan, of what stays whole on every rank."""
HEADS = "heads"
"""The style of a module whose numbers of heads become a rank's; other styles are transformers'."""
ONE_FILE = 250_000_000
"""The most parameters of a user's module whose weights are saved as one file: 1 GB in float32."""


class Weights(Protocol):
    """Values of parameters, by name; None for a parameter that gets its initial value."""

    def read(self, name: str) -> torch.Tensor | None: ...

    def release(self) -> None:
        """Free the weights in memory, once the engine is built."""
        return


class NoWeights(Weights):
    """No pretrained weights: training from scratch."""

    def read(self, name: str) -> torch.Tensor | None:
        return None


class MadeWeights(Weights):
    """Values that `make` returns; each is read as a copy. After a release, they are made again."""

    def __init__(self, make: Callable[[], Mapping[str, torch.Tensor]]) -> None:
        self._make = make

    @cached_property
    def _values(self) -> Mapping[str, torch.Tensor]:
        return self._make()

    def read(self, name: str) -> torch.Tensor | None:
        value = self._values.get(name)
        return None if value is None else value.detach().clone()

    def release(self) -> None:
        self.__dict__.pop("_values", None)


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
    """The input as one micro-batch, followed by each of its samples as a micro-batch."""


@dataclass(frozen=True)
class OutputHead:
    """The output head of a language model, which turns a hidden state into logits."""

    parameters: int = 0
    """The number of parameters of its matrix (0 without one)."""
    plain: bool = False
    """True if the logits are its product with the last hidden state and nothing else."""
    word_by_word: bool = False
    """True if a token's embedding and logit depend only on its own row of each matrix."""


@dataclass(frozen=True)
class AttentionSizes:
    """The attention heads of a language model."""

    heads: int = 0
    kv_heads: int = 0
    width: int = 0
    """The width of the attention products: heads x head size."""
    requested: str | None = None
    """The config's `trainer.model.attention`."""

    @property
    def head_size(self) -> int:
        return self.width // (self.heads or 1)

    @property
    def groups(self) -> int:
        """The number of query heads for each key-value head."""
        return self.heads // (self.kv_heads or 1)


@dataclass(frozen=True)
class LanguageModel:
    """Properties of a language model; empty for any other module."""

    head: OutputHead = field(default_factory=OutputHead)
    attention: AttentionSizes = field(default_factory=AttentionSizes)
    embedding_parameters: int = 0
    """The number of parameters of the input embedding, a lookup (0 if the head is tied to it)."""
    idle_parameters: int = 0
    """The number of parameters of experts that a token is not routed to (0 for a dense model)."""
    vocabulary: int = 0
    positions: int | None = None
    """The most tokens of a sequence; None where the config sets no limit."""
    hidden_size: int | None = None
    layers: int = 0
    tensor_plan: dict[str, str] = field(default_factory=dict)
    """Name of a module or parameter of a block that tensor parallelism splits -> its style."""
    own_loss: bool = False
    """True if `forward(labels=...)` adds a router's loss (`output_router_logits`)."""


@dataclass(frozen=True)
class Training:
    """The parameters of a model that are trained or saved in another way than the rest."""

    frozen: Mapping[str, int] = field(default_factory=dict)
    """The sizes of the parameters that the config freezes, by name."""
    tuned: Mapping[str, Tuning] = field(default_factory=dict)
    """Parameters with a learning rate or a weight decay of their own, by name."""
    sparse: tuple[str, ...] = ()
    """Name patterns (`*` for a number) of parameters that get a gradient from some samples only."""
    draws: bool = True
    """False if a training forward pass draws no random numbers, as its trial has shown."""
    fresh: frozenset[str] = frozenset()
    """Parameters that pretrained weights may lack: they then get initial values."""
    unsaved: frozenset[str] = frozenset()
    """Frozen tensors that are in no checkpoint: those of an adapter's base."""
    changed: bool = False
    """True once the config's adapter, frozen parameters and parameter groups are in the spec."""


@dataclass(frozen=True)
class TinyCopies:
    """Smaller models of the same architecture, and the input on which they are tried."""

    input: Trial | None = None
    """The input for a module that gives no logits; language models are tried on tokens."""
    copy: Callable[..., ModelSpec] | None = None
    """`copy(layers=3, split=1)` makes a tiny copy with at least `layers` blocks, to try things on.

    Sizes that are multiples of `split` stay multiples of it. Language models without changes by the
    config also take `sizes`. Raises ConfigError if no copy runs.
    """
    first_blocks: Callable[[int], ModelSpec] | None = None
    """`first_blocks(n)` is the same model with its first n blocks alone, without weights."""
    lacks: tuple[str, ...] = ()
    """Features of the model that this tiny copy lacks, so that a trial on the copy proves less."""


class BaseFolder(Protocol):
    """The folder of a base as it is saved again, with the trained tensors in it."""

    @property
    def opens(self) -> str: ...

    def entries(self, entries: Sequence[StateTensor], ranks: Ranks) -> list[StateTensor]:
        """Return state tensors under the base's names, and any of the base that is not trained."""

    @property
    def is_part(self) -> bool:
        """True if the trained model is a part of the base's model."""

    def whole(self) -> nn.Module:
        """Build the base's model on the meta device."""

    def names(self) -> dict[str, str]:
        """Map each tensor's name in the trained model to its name in the base's model, if any."""

    def save_config(self, folder: Path, dtype: torch.dtype | None) -> None: ...

    def save_tokenizer_files(self, folder: Path) -> None:
        """Copy the files of the base's tokenizer that the tokenizer's library did not write."""

    def check(self, folder: Path) -> None:
        """Raise DiskError unless a folder that was written has all that it should have."""


@dataclass(frozen=True)
class ModelFiles:
    """The folder of a trained model: its names, and how it is written and opened."""

    stem: str = "model"
    """The beginning of the names of its weight files."""
    published: Mapping[str, str] = field(default_factory=dict)
    """Our tensor names -> those in files, where they differ."""
    opens: str = "safetensors"
    """The function or format by which a trained model's folder is opened."""
    save_config: Callable[[Path, torch.dtype | None], None] = lambda folder, dtype: None
    """Writes config.json, with a dtype if one is given, and generation_config.json to a folder."""
    check: Callable[[Path], None] = lambda folder: None
    """Raises DiskError unless a folder that was written opens as the model that is trained."""
    merged: Callable[[Path], ModelSpec] | None = None
    """Makes the spec of the base with a folder's adapter merged; None if none is to be merged."""
    revision: str | None = None
    """The requested revision of a model on the hub."""
    base: BaseFolder | None = None
    """The base's folder, saved with the trained tensors; None: the trained model is saved alone."""

    def exported(self) -> ModelFiles:
        """Return how the folder at the end of a run is written and opened."""
        if self.base is None:
            return self
        base = self.base
        return replace(self, save_config=base.save_config, opens=base.opens, check=base.check)


@dataclass(frozen=True)
class Building:
    """How a model is made: its modules on the meta device, then the values of their tensors.

    A value is read from `weights`. If it is not there, `initialise` makes it. A tensor that this
    leaves empty gets its value from `constructed`.
    """

    build: Callable[[], nn.Module]
    """Builds the module on the meta device."""
    initialise: Callable[[nn.Module, str], None]
    """`initialise(root, module_name)` fills one module's own parameters and buffers."""
    weights: Weights = field(default_factory=NoWeights)
    constructed: Callable[[str], torch.Tensor | None] = lambda name: None
    """Returns the constructor's value of a small tensor that `initialise` leaves empty, or None."""


@dataclass(frozen=True)
class ModelSpec:
    """A model as embed -> blocks -> head, before any of it is allocated."""

    name: str
    """The name shown to the user: the folder or hub id, or the model type."""
    building: Building
    blocks: tuple[str, ...]
    """Dotted names of the repeated blocks, in order; empty if none are known."""
    parameters: int
    language: LanguageModel = field(default_factory=LanguageModel)
    tied: dict[str, str] = field(default_factory=dict)
    """Parameter name -> the name of the parameter that it is tied to."""
    training: Training = field(default_factory=Training)
    tiny: TinyCopies = field(default_factory=TinyCopies)
    files: ModelFiles = field(default_factory=ModelFiles)
    notes: tuple[str, ...] = ()
    """Notes on parts of the folder or the config that are not trained, a line each."""
    config: Json = field(default_factory=dict)
    """The architecture as numbers and words, for comparison."""

    def build(self) -> nn.Module:
        """Build the module on the meta device."""
        return self.building.build()

    def built_by(self, build: Callable[[], nn.Module]) -> ModelSpec:
        """Return the spec of the same model, whose modules `build` makes."""
        return replace(self, building=replace(self.building, build=build))

    def with_weights(self, weights: Weights) -> ModelSpec:
        """Return the spec of the same model with other values."""
        return replace(self, building=replace(self.building, weights=weights))

    def tried_on(self, trial: Trial) -> ModelSpec:
        """Return the spec with the input on which it and its tiny copies are tried."""
        copy = self.tiny.copy
        tried = copy and (lambda *size, **sizes: copy(*size, **sizes).tried_on(trial))
        return replace(self, tiny=replace(self.tiny, input=trial, copy=tried))

    def with_frozen(self, names: Collection[str]) -> ModelSpec:
        """Return the spec in which the parameters called `names` get no gradient."""

        def build() -> nn.Module:
            model = self.build()
            for name, parameter in model.named_parameters():
                if name in names:
                    parameter.requires_grad_(False)
            return model

        return self.built_by(build)

    @property
    def one_file(self) -> bool:
        """True for a user's small module: it is saved as one file, however it is sharded."""
        return self.files.opens == "safetensors" and self.parameters <= ONE_FILE


def stored(spec: ModelSpec, entries: Sequence[StateTensor]) -> list[StateTensor]:
    """Select an engine's state tensors that are in files, under their names in the files."""
    saved = [entry for entry in entries if entry.name not in spec.training.unsaved]
    return renamed(saved, spec.files.published)


def exported(spec: ModelSpec, entries: Sequence[StateTensor], ranks: Ranks) -> list[StateTensor]:
    """Return state tensors as they are in the folder at the end of a run."""
    base = spec.files.base
    return list(entries) if base is None else base.entries(entries, ranks)


def given_tensors(spec: ModelSpec, ranks: Ranks) -> list[StateTensor]:
    """Return the tensors of the weights, without an engine; each rank reads a share. Collective."""
    model = spec.build()
    stateful = model.state_dict().keys()
    weights = spec.building.weights
    tensors = dict((*model.named_parameters(), *model.named_buffers()))
    kept = [name for name in tensors if name in stateful]
    owners = {name: index % ranks.world_size for index, name in enumerate(kept)}
    own = [name for name in kept if owners[name] == ranks.rank]
    read = {name: value.dtype for name in own if (value := weights.read(name)) is not None}
    dtypes = {name: dtype for of_rank in ranks.gather(read) for name, dtype in of_rank.items()}

    def entry(name: str) -> StateTensor:
        def parts() -> list[Part]:
            value = weights.read(name) if owners[name] == ranks.rank else None
            return [] if value is None else [Part(value)]

        like = tensors[name]
        dtype = dtypes.get(name, like.dtype)
        owner = owners[name]
        return StateTensor(
            name, WEIGHT, tuple(like.shape), dtype, owner, parts, write=lambda value: None
        )

    return [entry(name) for name in kept]
