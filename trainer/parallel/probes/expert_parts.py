"""Do experts that are spread over ranks compute what one process does?"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import nn

from trainer.distributed.exchange import Exchange
from trainer.errors import ConfigError, Problem, divided
from trainer.layout import Layout
from trainer.models.names import expert_stacks, layer_of
from trainer.models.spec import ModelSpec
from trainer.parallel.probes.rank_parts import difference
from trainer.parallel.splits import experts
from trainer.parallel.splits.expert_ranks import spread
from trainer.parallel.splits.experts import Part
from trainer.probes.question import Need, Question, by_check

KEY = "expert_parallel.autoep_size"
HINT = "Remove expert_parallel: each rank then has all experts, sharded by ZeRO."


def check(spec: ModelSpec, layout: Layout) -> None:
    """Raise ConfigError for a model whose experts can't be spread over `layout.expert` ranks."""
    place = f"{KEY}: {spec.name}"
    if problems := list(dict.fromkeys(_problems(spec, layout))):
        raise ConfigError(*(Problem(place, *problem, HINT) for problem in problems))
    if actual := difference(spec, layout.expert, _spread, _terms):
        raise ConfigError(Problem(place, actual, "what one process computes", HINT))


def _terms(small: ModelSpec) -> Callable[[str], bool]:
    """Return whether a parameter's gradient is a sum over ranks: that of an adapter on experts."""
    stacks = {layer_of(name) for name in expert_stacks(small.build(), small.blocks)}
    return lambda name: ".lora_" in name and layer_of(name.rpartition(".")[0]) in stacks


def _problems(spec: ModelSpec, layout: Layout) -> Iterator[tuple[str, str]]:
    model = spec.build()
    names = expert_stacks(model, spec.blocks)
    if not names:
        yield "no layer has its experts stacked in one module", "a mixture of experts"
    for name in names:
        sizes = {len(p) for p in model.get_submodule(name).parameters()}
        size = min(sizes)
        if len(sizes) > 1:
            yield f"{name} has parameters of other sizes", "parameters stacked over the experts"
        elif size % layout.expert:
            actual = f"{size} experts = {divided(size, layout.expert)}"
            yield actual, f"a multiple of {layout.expert}"
        elif layout.tensor > 1 and spec.language.tensor_plan.get(name) != experts.STYLE:
            yield f"its tensor plan leaves {name} whole", "a plan that splits experts"


def _spread(model: nn.Module, spec: ModelSpec, ranks: Exchange, part: Part) -> None:
    for name in expert_stacks(model, spec.blocks):
        spread(model.get_submodule(name), ranks, part, ranks)


QUESTION = Question(
    name="whether its experts can be spread",
    key=KEY,
    need=Need(
        "`expert_parallel.autoep_size`",
        lambda about: about.layout.expert > 1,
        lambda about: about.under(shard=2, expert=2),
    ),
    ask=by_check(check),
    holds="A tiny copy with experts on several ranks has the loss and gradients of the whole one",
    otherwise="unsupported: experts that are not stacked, or whose number the ranks do not divide",
    cost="0.2 s",
    elsewhere=True,
)
