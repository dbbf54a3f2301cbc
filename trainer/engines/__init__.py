"""The engines, and the choice of the one that runs a layout."""

from __future__ import annotations

from dataclasses import replace

from trainer.config import Config, support
from trainer.engines.deepspeed import engine as deepspeed
from trainer.engines.engine import Engine, EngineKind, Job, Machine, Metrics
from trainer.engines.torch import accelerate, mesh
from trainer.errors import ConfigError, Problem
from trainer.layout import Layout
from trainer.optim.builders import No

ENGINES: dict[str, EngineKind] = {
    "deepspeed": deepspeed.KIND,
    "accelerate": accelerate.KIND,
    "mesh": mesh.KIND,
}

__all__ = [
    "ENGINES",
    "Engine",
    "EngineKind",
    "Job",
    "Machine",
    "Metrics",
    "compiles_faster",
    "select",
]


def select(engine: str, layout: Layout, config: Config, device: str) -> tuple[str, EngineKind]:
    """Choose `engine`; for "auto", the first engine that runs the layout and the optimizer.

    DeepSpeed comes last for pipelines, tensor and expert parallelism; mesh comes first where it
    `compiles_faster`. Raises ConfigError with each reason if none can.
    """
    cuts = layout.pipeline * layout.tensor * layout.expert > 1
    order = sorted(ENGINES, key=lambda name: name == "deepspeed" and cuts)
    if compiles_faster(layout, config, device):
        order.sort(key=lambda name: name != "mesh")
    candidates = {name: ENGINES[name] for name in (order if engine == "auto" else [engine])}
    decays = config.optimizer.params.get("weight_decay", 0) > 0
    spares = decays and config.trainer.weight_decay_excludes != "nothing"
    grouped = spares or bool(config.trainer.parameter_groups)
    problems = []
    unsupported = support.refusals(config)
    for name, kind in candidates.items():
        place = f"engine {name}"
        refusal = kind.refusal(layout) or unsupported.get(name)
        builder = kind.optimizer(config.settings, layout, device, grouped)
        if refusal is not None:
            expected = "a layout that it can run"
            problems.append(Problem(place, layout.describe(), expected, refusal))
        elif isinstance(builder, No):
            actual = f"the optimizer {config.optimizer.type}, ZeRO-{layout.zero_stage}, on {device}"
            problems.append(Problem(place, actual, "an optimizer that it can build", f"{builder}."))
        else:
            return name, kind
    raise ConfigError(*problems)


def compiles_faster(layout: Layout, config: Config, device: str) -> bool:
    """Return True if mesh compiles a layout's blocks on a GPU, where DeepSpeed can only run it.

    And if no key asks for what DeepSpeed alone does. Offloaded states count as such a key: it
    updates them by a kernel of its own.
    """
    if device != "cuda" or layout.compile != "auto" or layout.offloads:
        return False
    compiled = replace(layout, compile="blocks")
    uncompiled = deepspeed.refusal(layout) is None and deepspeed.refusal(compiled) is not None
    return uncompiled and mesh.refusal(compiled) is None and not support.notes(config, "mesh")
