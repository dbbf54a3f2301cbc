"""The engines, and which of them runs a layout."""

from __future__ import annotations

from trainer.engines import accelerate, deepspeed, mesh
from trainer.engines.engine import Engine, EngineKind, Job, Machine, Metrics
from trainer.errors import ConfigError, Problem
from trainer.layout import Layout

ENGINES: dict[str, EngineKind] = {
    "deepspeed": deepspeed.KIND,
    "accelerate": accelerate.KIND,
    "mesh": mesh.KIND,
}

__all__ = ["ENGINES", "Engine", "EngineKind", "Job", "Machine", "Metrics", "select"]


def select(wanted: str, layout: Layout) -> tuple[str, EngineKind]:
    """The engine `wanted`, or for "auto" the first that can run the layout; DeepSpeed comes last where a model is cut
    or split.

    Raises ConfigError with each engine's reason when none can.
    """
    order = sorted(ENGINES, key=lambda name: name == "deepspeed" and layout.pipeline * layout.tensor > 1)
    candidates = {name: ENGINES[name] for name in (order if wanted == "auto" else [wanted])}
    refusals = {name: kind.refusal(layout) for name, kind in candidates.items()}
    for name, refusal in refusals.items():
        if refusal is None:
            return name, candidates[name]
    raise ConfigError(
        *(
            Problem(f"engine {name}", f"{layout.describe()}", "a layout that it can run", refusal or "")
            for name, refusal in refusals.items()
        )
    )
