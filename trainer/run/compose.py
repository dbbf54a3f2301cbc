"""A config on a machine or a cluster: resolved, laid out, and the engine that runs it.

All commands come through here. Nothing needs torch until an engine is asked for.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from trainer.config import Config, RuntimeFacts, resolve
from trainer.errors import ConfigError, listed
from trainer.layout import Layout, layout_of

if TYPE_CHECKING:
    from trainer.engines import EngineKind


@dataclass(frozen=True)
class Composed:
    """A config whose layout fits the processes that it is for."""

    config: Config
    """Resolved as far as the facts are known."""
    layout: Layout
    facts: RuntimeFacts

    def engine(self, wanted: str | None = None) -> tuple[str, EngineKind]:
        """Return the engine `wanted`, else the config's, by its name. Raises ConfigError.

        Whether it can train a model is the question of `engine_choice.choice_of`.
        """
        from trainer.engines import select

        name = wanted or self.config.trainer.engine
        return select(name, self.layout, self.config, self.facts.device)

    def knowing(self, **facts: Any) -> Composed:
        """The same with more facts known."""
        return compose(self.config, replace(self.facts, **facts))


def compose(config: Config, facts: RuntimeFacts) -> Composed:
    """Resolve a config and lay it out.

    Raises ConfigError where mesh, batch sizes or layout do not fit the number of processes.
    """
    config = resolve(config, facts)
    return Composed(config, layout_of(config, facts.world_size), facts)


def nodes_for(config: Config, facts: RuntimeFacts) -> str:
    """List the numbers of nodes like this one, up to 1,024, that fit the config; "" if none."""
    fitting = []
    local = facts.local_world_size or 1
    for nodes in range(1, 1025):
        with suppress(ConfigError):
            compose(config, replace(facts, world_size=nodes * local))
            fitting.append(str(nodes))
    return listed(fitting, 12)
