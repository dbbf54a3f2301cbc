"""Can the model be cut into pipeline stages that compute what the whole model does?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from trainer.errors import ConfigError, Problem, Raised, attempt, raised_at
from trainer.models.cut import StageBoundary, cut
from trainer.models.materialise import materialise, on_host
from trainer.models.names import differing, gradients_of, outermost
from trainer.models.spec import ModelSpec, Trial
from trainer.probes.inputs import trial_of
from trainer.probes.probe import TOLERANCE, Differs, Finding, observe, tiny_spec
from trainer.probes.question import Need, Probed, Question

KEY = "pipeline.stages"
HINT = "Set pipeline.stages to 1."
EXPECTED = "the same logits and gradients"
RULE = (
    "Each stage runs the whole forward pass, but for other stages' modules: what follows the "
    "blocks belongs in a module without children, and embeddings are to be called (docs/python.md)"
)
"""The rule that a model's own code most often breaks."""


def check_cut(spec: ModelSpec, stages: int) -> StageBoundary:
    """Check on a tiny copy that stages of a block each have the whole model's logits and gradients.

    Raises ConfigError, with the reason, for a model that can't be cut so or has fewer blocks than
    `stages`.
    """
    place = f"{KEY}: {spec.name}"
    if len(spec.blocks) < stages:
        actual = f"{len(spec.blocks)} blocks for {stages} pipeline stages"
        raise ConfigError(Problem(place, actual, "at least one block for each stage"))
    result = boundary_of(spec)
    if isinstance(result, Finding):
        raise result.error(place, EXPECTED, HINT)
    return result


def boundary_of(spec: ModelSpec) -> StageBoundary | Finding:
    """Return where a model is cut, or why it can't be."""
    result = observe(lambda: _compare(tiny_spec(spec)))
    if isinstance(result, Finding):
        return Finding(f"cut into stages: {result.actual}", raised=result.raised)
    return result


@dataclass
class _StagePass:
    """A stage with what it got and gave in a forward pass."""

    stage: nn.Module
    hidden: torch.Tensor | None
    output: torch.Tensor


def _compare(spec: ModelSpec) -> StageBoundary:
    """Compare stages of one block each with the whole model, forward and backward."""
    whole = on_host(spec).eval()
    trial = trial_of(spec)
    boundary, expected = _survey(whole, spec, trial)
    passes = _forward(spec, boundary, trial)
    if not torch.equal(passes[-1].output, expected):
        logits = "other logits than the whole model"
        raise Differs(f"{logits}: a block reads more than the block before it gives")
    weight = torch.sin(torch.arange(expected.numel()).reshape(expected.shape))
    (expected * weight).sum().backward()
    gradients = _backward(passes, weight)
    for name, _ in whole.named_parameters():
        if name not in gradients:
            raise Differs(f"no stage for {name}")
    if result := differing(gradients, gradients_of(whole), TOLERANCE):
        raise Differs(f"another gradient of {result[0]} than the whole model")
    return boundary


def _forward(spec: ModelSpec, boundary: StageBoundary, trial: Trial) -> list[_StagePass]:
    passes: list[_StagePass] = []
    for index in range(len(spec.blocks)):
        stage = spec.build()
        stage_input = cut(stage, spec, boundary, range(index, index + 1))
        # after the cut, as engines do: an initialiser may refer to a module that was cut away
        materialise(stage, spec, seed=0)
        hidden = passes[-1].output.detach().requires_grad_() if passes else None
        stage_input.put(hidden)
        last = index + 1 == len(spec.blocks)
        run = trial.output if last else trial.hidden
        output = attempt(partial(run, stage.eval()))
        if isinstance(output, Raised):
            if isinstance(output.error, Differs):
                raise output.error
            where = f"the stage of {spec.blocks[index]} fails at {raised_at(output.error)}"
            raise Differs(f"{where}: {output.reason}. {RULE}")
        if not isinstance(output, torch.Tensor):
            actual = f"what it gives is a {type(output).__name__}"
            raise Differs(f"{actual}, and a stage sends one tensor")
        passes.append(_StagePass(stage, hidden, output))
    return passes


def _backward(passes: Sequence[_StagePass], weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Run the backward passes, last stage first; return the gradients, summed over stages."""
    result: dict[str, torch.Tensor] = {}
    gradient: torch.Tensor | None = weight
    for one in reversed(passes):
        if one.output.requires_grad:  # else every parameter up to here is frozen
            one.output.backward(gradient)
        gradient = None if one.hidden is None else one.hidden.grad
        own = gradients_of(one.stage)
        for name, parameter in one.stage.named_parameters():
            result[name] = result.get(name, 0.0) + own.get(name, torch.zeros_like(parameter))
    return result


def runs_outside(
    model: nn.Module, spec: ModelSpec, trial: Trial
) -> tuple[dict[str, list[str]], int, torch.Tensor]:
    """Run the whole model; return where each module outside the blocks is called, in order.

    Also returns the number of values of a block (`StageBoundary.tuples`), and the output.
    """
    blocks = {model.get_submodule(name): index for index, name in enumerate(spec.blocks)}
    called: dict[str, list[str]] = {}
    place = "before"
    tuples = 0

    def enter(name: str) -> Any:
        return lambda module, inputs: called.setdefault(name, []).append(place)

    def leave(module: nn.Module, inputs: tuple[torch.Tensor, ...], output: object) -> None:
        nonlocal place, tuples
        place = "after" if blocks[module] + 1 == len(blocks) else "between"
        tuples = len(output) if isinstance(output, tuple | list) else 0

    for block in blocks:
        block.register_forward_hook(leave)
    for name, module in _modules_outside(model, spec.blocks).items():
        module.register_forward_pre_hook(enter(name))
    output = trial.output(model)
    return called, tuples, output


def _survey(model: nn.Module, spec: ModelSpec, trial: Trial) -> tuple[StageBoundary, torch.Tensor]:
    """Run the whole model; return where modules outside the blocks are called, and the output."""
    outside = _modules_outside(model, spec.blocks)
    runs, tuples, output = runs_outside(model, spec, trial)
    called = {name: set(places) for name, places in runs.items()}
    owners = [name for name, module in outside.items() if owns_parameters(module)]
    for name in owners:
        if any(block.startswith(f"{name}.") for block in spec.blocks) or not name:
            raise Differs(f"{name or spec.name} has parameters beside its blocks")
        places = called.get(name, set())
        if places not in ({"before"}, {"after"}, set()):
            where = " and ".join(sorted(places))
            raise Differs(f"{name} runs {where}, not once before or after all blocks")
    # modules that text never runs stay with the first stage, whole: their parts may read one
    # another's weights
    run = (*called, *spec.blocks)
    before = [name for name, _ in model.named_modules() if name and not _overlaps(name, run)]
    before += [name for name in owners if called.get(name, set()) != {"after"}]
    before = outermost([name for name in dict.fromkeys(before) if _overlaps(name, owners)])
    after = outermost([name for name, places in called.items() if places == {"after"}])
    around = [name for name, places in called.items() if places == {"before", "after"}]
    around = [name for name in around if name not in owners]
    return StageBoundary(tuple(before), tuple(after), tuples, tuple(around)), output


def _modules_outside(model: nn.Module, blocks: Sequence[str]) -> dict[str, nn.Module]:
    """Return the modules that do work of their own and belong to no block."""
    inside = tuple(f"{block}." for block in blocks)
    return {
        name: module
        for name, module in model.named_modules()
        if not f"{name}.".startswith(inside)
        and (owns_parameters(module) or not any(module.children()))
    }


def owns_parameters(module: nn.Module) -> bool:
    return any(parameter is not None for parameter in module._parameters.values())


def _overlaps(name: str, others: Sequence[str]) -> bool:
    """Return True if one of the other modules is this one, contains it or is inside it."""
    own = f"{name}."
    dotted = [f"{other}." for other in others]
    return any(other.startswith(own) or own.startswith(other) for other in dotted)


def _ask(about: Probed) -> Finding | None:
    result = boundary_of(about.trained)
    return result if isinstance(result, Finding) else None


QUESTION = Question(
    name="whether it can be cut into stages",
    key=KEY,
    expected=EXPECTED,
    hint=HINT,
    need=Need(
        "`pipeline.stages`",
        lambda about: about.layout.pipeline > 1,
        lambda about: about.under(pipeline=2),
    ),
    ask=_ask,
    holds="Stages of one block each have the logits and every gradient of the whole model",
    otherwise="unsupported: a block that reads more than the block before it gives",
    cost="0.1 s",
    elsewhere=True,
)
