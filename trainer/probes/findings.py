"""The findings of the probes of a model, and the spec that follows from them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch import nn

from trainer.errors import listed
from trainer.models.names import in_short, pattern_of
from trainer.models.spec import ModelSpec


@dataclass(frozen=True)
class Draws:
    """The places in a training forward pass that draw random numbers which change its result."""

    any: bool = False
    between: bool = False
    """True if it draws outside the blocks, after the first."""
    skips: bool = False
    """True if the numbers drawn decide which blocks run."""
    private: bool = False
    """True if some are from Python, NumPy or another generator than torch's default."""


@dataclass(frozen=True)
class Findings:
    unused: tuple[str, ...] = ()
    """Patterns of the names of parameters that get no gradient, numbers replaced by `*`."""
    sparse: tuple[str, ...] = ()
    """Patterns of the names of parameters that only some sequences leave without a gradient."""
    draws: Draws = Draws()
    blocks: bool = True
    """True if the spec's blocks run once each, in their order."""
    moves_buffers: str = ""
    """The buffer, no running statistic, that a forward pass in training changes; else empty."""
    normalises: str = ""
    """The module that keeps running statistics of its input (batch norm); else empty."""
    unproven: str = ""
    """Why nothing could be tried; every other field is then a guess."""
    notes: tuple[str, ...] = ()
    """Notes for the user, a line each."""


def learned(before: Findings, after: Findings) -> Iterator[str]:
    """Yield what a question has added to the findings, in words; nothing if all is as expected."""
    yield from after.notes[len(before.notes) :]
    if before.blocks and not after.blocks and after.notes == before.notes:
        yield "no modules run once each, in order, from hidden state to hidden state"
    if after.moves_buffers != before.moves_buffers:
        yield f"training changes its buffer {after.moves_buffers}: one process alone can train it"
    if after.sparse != before.sparse:
        yield f"some samples give no gradient to {listed(after.sparse)}"
    if after.draws.skips and not before.draws.skips:
        yield "it leaves out blocks at random (layerdrop): one process alone can train it"


def applied(spec: ModelSpec, findings: Findings) -> ModelSpec:
    """Return the spec with unused parameters frozen, and no blocks if they do not run in order."""
    if findings.unused:
        spec = spec.with_frozen(_matching(spec, findings.unused).keys())
    blocks = spec.blocks if findings.blocks else ()
    draws = findings.draws.any or bool(findings.unproven)
    training = replace(spec.training, sparse=findings.sparse, draws=draws)
    return replace(spec, blocks=blocks, training=training)


def notes_on_unused(spec: ModelSpec, patterns: Sequence[str]) -> Iterator[str]:
    """Yield a line on the parameters that match, if there are some: they get no gradient."""
    if not patterns:
        return
    matching = _matching(spec, patterns)
    values = sum(parameter.numel() for parameter in matching.values()) / 1e6
    others = {name for name, _ in spec.build().named_parameters()} - matching.keys()
    where = in_short(matching, others)
    count = f"{len(matching)} parameters ({values:,.1f} M values)"
    source = " from text" if spec.tiny.input is None else ""
    yield f"{count} get no gradient{source}, and are frozen: {where}"


def _matching(spec: ModelSpec, patterns: Sequence[str]) -> dict[str, nn.Parameter]:
    named = spec.build().named_parameters()
    return {name: parameter for name, parameter in named if pattern_of(name) in patterns}
