"""What tests of probes share: a plain layout, and the questions about a model asked of a spec."""

from __future__ import annotations

from typing import Any

from trainer.layout import Layout, Recompute
from trainer.models.spec import ModelSpec
from trainer.parallel.checks import OF_MODELS
from trainer.probes.findings import Findings
from trainer.probes.question import Probed, Question, ask, ask_all


def layout(**sizes: Any) -> Layout:
    """Return the layout of one process, without ZeRO, but for these fields."""
    axes = {"pipeline": 1, "replicate": 1, "shard": 1, "tensor": 1}
    batch = {"micro_batch": 1, "accumulation": 2}
    memory = {"zero_stage": 0, "offload_optimizer": "none", "offload_param": "none"}
    plain: dict[str, Any] = {"precision": "float32", "recompute": Recompute()}
    return Layout(**{**axes, **batch, **memory, **plain, **sizes})


def findings_of(spec: ModelSpec, task: Any) -> Findings:
    """Ask all questions about a model in any layout."""
    about = Probed(spec, task, layout())
    ask_all(OF_MODELS, about)
    return about.findings


def ask_about(question: Question, spec: ModelSpec, task: Any, **options: Any) -> None:
    """Ask one question. `options` are fields of a layout, or `packed`."""
    packed = options.pop("packed", False)
    ask(question, Probed(spec, task, layout(**options), packed=packed))
