"""Do tensor ranks, each with a part of the matrices, compute what one process does?"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from torch import nn
from transformers.pytorch_utils import Conv1D

from trainer.distributed.exchange import Exchange
from trainer.errors import ConfigError, Problem, divided
from trainer.layout import Layout
from trainer.models.finetuning.quantised.quantised_base import QuantisedLinear
from trainer.models.language.tensor_plan import widths
from trainer.models.names import layer_of
from trainer.models.spec import ModelSpec
from trainer.parallel.probes.rank_parts import difference
from trainer.parallel.splits import experts
from trainer.parallel.splits.experts import Part
from trainer.parallel.splits.matrices import STYLES, UNSPLIT, has_partial_gradient, split
from trainer.probes.question import Need, Question, by_check

KEY = "tensor_parallel.autotp_size"
HINT = "Change tensor_parallel.autotp_size; 1 trains every model."


def check(spec: ModelSpec, layout: Layout) -> None:
    """Raise ConfigError for a model that `layout.tensor` ranks can't train exactly."""
    place = f"{KEY}: {spec.name}"
    problems = dict.fromkeys(
        Problem(place, re.sub(r"\.\d+\.", ".*.", actual), expected, HINT)
        for actual, expected in _problems(spec, layout)
    )
    if problems:
        raise ConfigError(*problems)
    actual = _difference(spec, layout)
    if actual is None:
        return
    hint = HINT
    if layout.sequence_parallel and not _difference(spec, replace(layout, sequence_parallel=False)):
        place = f"tensor_parallel.sequence_parallel: {spec.name}"
        hint = "Set it to false: each rank then works on whole sequences between split matrices."
    raise ConfigError(Problem(place, actual, "what one process computes", hint))


def _difference(spec: ModelSpec, layout: Layout) -> str | None:
    def parts(model: nn.Module, small: ModelSpec, ranks: Exchange, part: Part) -> None:
        split(model, small, layout, ranks, part, small.blocks)

    return difference(spec, layout.tensor, parts, lambda small: has_partial_gradient(small, layout))


def _problems(spec: ModelSpec, layout: Layout) -> Iterator[tuple[str, str]]:
    plan = spec.language.tensor_plan
    size = layout.tensor
    model = spec.build()
    modules = dict(model.named_modules())
    parameters = dict(model.named_parameters())
    if not plan and spec.tiny.input is not None:
        yield (
            "your own module has no tensor plan",
            "a recipe whose spec has one: LanguageModel(tensor_plan=...)",
        )
    elif not plan:
        lacks = "its blocks have no linear layers to make one of"
        actual = f"its family has no tensor plan in transformers, and {lacks}"
        yield actual, "a model with `base_model_tp_plan`"
    for name, style in plan.items():
        layer = modules.get(name)
        rows = style.startswith("rowwise")
        if style in (*UNSPLIT, experts.STYLE):
            continue
        if style == "colwise" and name in parameters:
            what = "size"
            width = len(parameters[name])
        elif style in STYLES and isinstance(layer, nn.Linear | Conv1D | QuantisedLinear):
            what = "in_features" if rows else "out_features"
            width = widths(layer)[not rows]
        else:
            actual = f"{name} is to be split as {style!r}"
            yield actual, f"linear layers, split as one of {', '.join(STYLES)}"
            continue
        if width % size:
            yield f"{name}.{what} = {width} = {divided(width, size)}", f"a multiple of {size}"
    yield from experts.problems(spec, size)
    regions = {layer_of(name).rpartition(".")[0] for name in plan if plan[name] == "colwise"}
    if any("att" in region for region in regions):
        counts = {
            "attention heads": spec.language.attention.heads,
            "key-value heads": spec.language.attention.kv_heads,
        }
        for what, heads in counts.items():
            if heads % size:
                yield f"{heads} {what} = {divided(heads, size)}", f"a multiple of {size}"


QUESTION = Question(
    name="whether its matrices can be split",
    key=KEY,
    need=Need(
        "`tensor_parallel.autotp_size`",
        lambda about: about.layout.tensor > 1,
        lambda about: about.under(tensor=2),
    ),
    ask=by_check(check),
    holds="A split tiny copy has the loss, gradients and random numbers of the whole one",
    otherwise=(
        "unsupported: dropout between split matrices; a plan, of transformers or made from the "
        "shapes of layers, that trains differently"
    ),
    cost="0.2 s",
    elsewhere=True,
)
