"""The choice of a run's engine, and what the user is told of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

from trainer.engines import ENGINES, EngineKind, compiles_faster
from trainer.errors import ConfigError
from trainer.models.spec import ModelSpec
from trainer.run.compose import Composed


class EngineChoice(NamedTuple):
    name: str
    reason: str = ""
    """Why "auto" took it, where mesh is faster than DeepSpeed; else empty."""

    @property
    def kind(self) -> EngineKind:
        return ENGINES[self.name]


def kept(composed: Composed, earlier: str | None) -> str | None:
    """Return the engine that a run had until now, if the config leaves the choice and it still can
    run the layout."""
    # a list, because a damaged run description may hold a value that can't be hashed
    if earlier not in [*ENGINES] or composed.config.trainer.engine != "auto":
        return None
    with suppress(ConfigError):
        return composed.engine(earlier)[0]
    return None


def choice_of(
    composed: Composed, wanted: str | None = None, spec: ModelSpec | None = None
) -> EngineChoice:
    """Choose the engine `wanted`, else the config's, that can train the model of `spec`.

    Where "auto" takes mesh for its speed, and mesh can't train that model, it is DeepSpeed. Raises
    ConfigError.
    """
    automatic = (wanted or composed.config.trainer.engine) == "auto"
    prefers = automatic and _prefers_mesh(composed)
    name, kind = composed.engine(wanted)
    if spec is not None:
        try:
            kind.check(spec, composed.layout)
        except ConfigError:
            if not prefers:
                raise
            name = choice_of(composed, "deepspeed", spec).name
    if not prefers:
        return EngineChoice(name)
    if name == "mesh":
        return EngineChoice(name, "it compiles the blocks, which DeepSpeed can't here")
    return EngineChoice(name, "mesh would compile the blocks, but can't train this model")


def faster(composed: Composed, name: str) -> Iterator[str]:
    """Yield a note if DeepSpeed was taken for a key of its own, and mesh would compile blocks."""
    chosen = composed.facts.device, name, composed.config.trainer.engine, composed.layout.compile
    if chosen != ("cuda", "deepspeed", "auto", "auto") or _prefers_mesh(composed):
        return
    if composed.layout.offloads:
        return
    compiled = replace(composed, layout=replace(composed.layout, compile="blocks"))
    if ENGINES[name].refusal(compiled.layout) is None:
        return
    with suppress(ConfigError):
        compiled.engine("mesh")
        yield "trainer.engine=mesh compiles blocks: 1.3 times as fast on one H200"


def _prefers_mesh(composed: Composed) -> bool:
    return compiles_faster(composed.layout, composed.config, composed.facts.device)
