"""Can FSDP gather the model block by block, with its tables and its head as units of their own?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from trainer.errors import ConfigError, Problem
from trainer.layout import Layout
from trainer.models.materialise import on_host
from trainer.models.names import outermost
from trainer.models.spec import ModelSpec, Trial
from trainer.parallel.shard import Ends
from trainer.probes.inputs import trial_of
from trainer.probes.probe import Differs, Finding, observe, tiny_spec
from trainer.probes.question import Need, Question, by_check
from trainer.probes.questions.stages import owns_parameters, runs_outside


def ends_of(spec: ModelSpec, layout: Layout) -> tuple[Ends, tuple[str, ...]]:
    """Find the ends of a model on its tiny copy, with a note if they are not fit to be units.

    There are none if the two share a parameter: the root has it.
    """
    if layout.zero_stage == 0 or spec.tiny.copy is None:
        return Ends(), ()
    result = observe(lambda: _units_at_the_ends(spec))
    if isinstance(result, Ends):
        return result, ()
    return Ends(), (f"FSDP: embedding and head are in the unit of the root: {_reason(result)}",)


def _reason(finding: Finding) -> str:
    """Return why the ends stay in the root; an error means that a weight was needed elsewhere."""
    elsewhere = "the model uses their weights elsewhere"
    return f"{elsewhere} ({finding.actual:.80})" if finding.raised else finding.actual


def _units_at_the_ends(spec: ModelSpec) -> Ends:
    """Return the ends that are units. Raises Differs if they can't be."""
    small = tiny_spec(spec)
    trial = trial_of(small)
    model = on_host(small).eval()
    called, _, output = runs_outside(model, small, trial)
    own = {name: model.get_submodule(name) for name in called}
    own = {name: module for name, module in own.items() if owns_parameters(module)}
    ends = Ends(
        tuple(n for n in own if called[n] == ["before"] and isinstance(own[n], nn.Embedding)),
        tuple(outermost([name for name in own if called[name] == ["after"]])),
    )
    ties = [(_end(ends, alias), _end(ends, name)) for alias, name in spec.tied.items()]
    if any(one != other for one, other in ties):
        return Ends()
    if not _are_units(small, trial, ends, output):
        raise Differs("the model uses their weights elsewhere")
    return ends


def _end(ends: Ends, name: str) -> int | None:
    """Return the index of the end that has a parameter, or None."""
    starts = [tuple(f"{module}." for module in end) for end in ends]
    return next((index for index, own in enumerate(starts) if name.startswith(own)), None)


def _are_units(spec: ModelSpec, trial: Trial, ends: Ends, expected: torch.Tensor) -> bool:
    """Return True if the ends' weights are needed only while each runs, and the head sees all.

    Outside, a weight has another dtype, as that of a shard is. FSDP reduces the unit of the head
    when the gradient of its input is there: so nothing may pass by its first module.
    """
    model = on_host(spec).eval()
    rest = [p for name, p in model.named_parameters() if _end(ends, name) != 1]
    _have_weights_while_running(model, (*ends.tables, *ends.head), dtype=torch.float64)
    if ends.head:
        first = model.get_submodule(ends.head[0])
        first.register_forward_hook(lambda module, inputs, result: result.detach().requires_grad_())
    output = trial.output(model)
    if ends.head:
        output.sum().backward()
    return torch.equal(output, expected) and not any(p.grad is not None for p in rest)


def check_shardable(spec: ModelSpec, layout: Layout) -> None:
    """Raise ConfigError for a model that FSDP2 can't gather block by block."""
    if layout.zero_stage == 0:
        return
    blocks = tuple(f"{block}." for block in spec.blocks)
    shared = [
        f"{alias} is one with {name}"
        for alias, name in spec.tied.items()
        if alias.startswith(blocks) or name.startswith(blocks)
    ]
    expected = "blocks that share nothing"
    stages = ""
    if not spec.blocks:
        reason = "no blocks were found"
        expected = "a model of repeated blocks"
        stages = " (stages 1 and 2)"
    elif shared:
        reason = shared[0]
    elif spec.tiny.input and _uses_weights_outside(tiny_spec(spec), spec.tiny.input):
        reason = "a block's weight is used outside it"
    else:
        return
    place = f"zero_optimization.stage: {spec.name}"
    actual = f"FSDP2 shards block by block, and {reason}"
    hint = f'Set zero_optimization.stage to 0, or trainer.engine to "deepspeed"{stages}.'
    raise ConfigError(Problem(place, actual, expected, hint))


def _uses_weights_outside(spec: ModelSpec, trial: Trial) -> bool:
    """Return True if a forward pass fails when each block has its parameters only while it runs."""
    model = on_host(spec)
    _have_weights_while_running(model, spec.blocks)

    def run() -> None:
        with torch.no_grad():
            trial.output(model.eval())

    return isinstance(observe(run), Finding)


Parts = Sequence[tuple[nn.Module, Mapping[str, Any]]]
"""Modules, with the parameters that are set in each."""


def _have_weights_while_running(model: nn.Module, names: Iterable[str], **kind: Any) -> None:
    """Leave these modules without their parameters except while each runs: empty ones take
    their place.

    `kind`: options of the empty ones.
    """
    for name in names:
        unit = model.get_submodule(name)
        own = [(inner, dict(inner._parameters)) for inner in unit.modules()]
        empty = [
            (inner, {k: UninitializedParameter(**kind) for k, p in of.items() if p is not None})
            for inner, of in own
        ]

        def put(*_: object, parts: Parts) -> None:
            for inner, parameters in parts:
                inner._parameters.update(parameters)

        put(parts=empty)
        unit.register_forward_pre_hook(partial(put, parts=own))
        unit.register_forward_hook(partial(put, parts=empty))


QUESTION = Question(
    name="whether it is gathered block by block",
    key="zero_optimization.stage",
    need=Need(
        "`zero_optimization.stage`, on `mesh` and `accelerate`",
        lambda about: about.layout.zero_stage > 0,
        lambda about: about.under(shard=2, zero_stage=3),
    ),
    ask=by_check(check_shardable),
    holds="Blocks share no parameter, and each uses its weights only while it runs",
    otherwise="unsupported; if tables and head are used elsewhere, a note: they stay gathered",
    cost="0.1 s",
    elsewhere=True,
)
