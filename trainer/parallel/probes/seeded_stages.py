"""Do pipeline stages, seeded by the positions of their blocks, draw what the whole model draws?"""

from __future__ import annotations

import torch
from torch import nn

from trainer.models.cut import cut
from trainer.models.spec import ModelSpec
from trainer.parallel.forward_backward import Dropout
from trainer.probes.inputs import trial_of
from trainer.probes.probe import Finding, drawn, probe
from trainer.probes.question import Need, Probed, Question
from trainer.probes.questions.stages import check_cut

TOLERANCE = 1e-5


def _ask(about: Probed) -> Finding | None:
    draws = about.findings.draws
    if about.trained.language.own_loss:
        product = "a product of means over all layers: no sum over stages"
        actual = f"the router's loss (output_router_logits) is {product}"
        return Finding(actual, "1 stage, or output_router_logits false")
    if draws.between:
        between = "it draws random numbers between its blocks"
        actual = f"{between}, which a stage could only repeat by running those before"
        return Finding(actual, "1 stage, or a model config without that dropout")
    return probe(about.trained, _in_stages, _compare) if draws.any else None


def _in_stages(model: nn.Module, spec: ModelSpec) -> torch.Tensor:
    """Return what stages of one block each give, one after the other."""
    boundary = check_cut(spec, 1)
    trial = trial_of(spec)
    hidden = torch.empty(0)
    last = len(spec.blocks) - 1
    with torch.no_grad():
        for index in range(len(spec.blocks)):
            stage = model if index == 0 else drawn(spec)
            dropout = Dropout(stage.train(), spec)
            stage_input = cut(stage, spec, boundary, range(index, index + 1))
            stage_input.put(hidden)
            dropout.start(1, 0)
            hidden = trial.output(stage) if index == last else trial.hidden(stage)
    return hidden


def _compare(whole: nn.Module, output: torch.Tensor, spec: ModelSpec) -> Finding | None:
    dropout = Dropout(whole, spec)
    dropout.start(1, 0)
    with torch.no_grad():
        expected = trial_of(spec).output(whole.train())
    error = float((output - expected).abs().max() / expected.abs().max())
    if error <= TOLERANCE:
        return None
    stages = "stages that start from their own seeds"
    return Finding(f"{stages} give other logits than the whole model, by {error:.1e}")


QUESTION = Question(
    name="what its stages draw",
    key="pipeline.stages",
    expected="1 stage, or a model config without what is random in it",
    need=Need(
        "`pipeline.stages`",
        lambda about: about.layout.pipeline > 1,
        lambda about: about.under(pipeline=2),
    ),
    ask=_ask,
    holds=(
        "Stages, each seeded by the position of its blocks, give the logits of the whole model in "
        "training"
    ),
    otherwise="unsupported: randomness between blocks; a router's loss",
    cost="0.1 s",
)
