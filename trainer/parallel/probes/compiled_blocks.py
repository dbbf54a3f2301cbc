"""Do the blocks compile as a whole, and are compiled gradients the same?"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from trainer.distributed.seeding import seed_generators
from trainer.layout import Layout, Recompute
from trainer.models.spec import ModelSpec
from trainer.parallel import compilation
from trainer.parallel.recompute import activation_checkpointing, tiles
from trainer.probes.inputs import trial_of
from trainer.probes.probe import TOLERANCE, Finding, differing_gradient, probe
from trainer.probes.question import Need, Probed, Question
from trainer.supervise.process import Machine


def decided(
    layout: Layout, spec: ModelSpec, machine: Machine, refusal: str | None = None
) -> tuple[Layout, tuple[str, ...]]:
    """Return the layout with its `compile` decided, and a note on it. Collective.

    `refusal`: the reason why the engine can't compile its blocks. They run uncompiled, as do those
    of a model whose tiny copy does not compile as a whole; on a GPU the loss is compiled even so.
    """
    plain = replace(layout, compile="none")
    automatic = layout.compile == "auto"
    if layout.compile == "loss":  # decided before
        return layout, ()
    if layout.compile == "none" or (automatic and machine.device.type == "cpu"):
        return plain, ()
    # seconds of imports, which an uncompiled run goes without
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    lacks = None
    if automatic:
        _, lacks = machine.ranks.lowest(compilation.lacking(machine.device)) or (0, None)
    reason = lacks or refusal or compilation.refusal(layout)
    reason = reason or (None if spec.blocks else "the model has no blocks")
    reason = reason or machine.ranks.on_first(lambda: broken(spec, layout.recompute))
    uncompiled = f"trainer.compile: the blocks run uncompiled: {reason}"
    waits = "which the first steps wait for"
    folder = f"kept in {cache_dir()} (TORCHINDUCTOR_CACHE_DIR)"
    if reason is None:
        blocks = "blocks, around their experts," if layout.expert > 1 else "blocks"
        note = f"{blocks} and loss are compiled, {waits}; {folder}"
        return replace(layout, compile="blocks"), (note,)
    if lacks or machine.device.type == "cpu":
        return plain, (uncompiled,)
    note = f"the loss is compiled, {waits}; {folder}"
    return replace(layout, compile="loss"), (uncompiled, note)


def broken(spec: ModelSpec, recompute: Recompute) -> str | None:
    """Return where a tiny copy's blocks break the graph, or which gradient is another; or None."""

    def compiled(model: nn.Module, small: ModelSpec) -> nn.Module:
        activation_checkpointing.apply(model.train(), small, tiles.tried(recompute))
        compilation.apply(model, small, trial=True)
        return model

    def compare(plain: nn.Module, model: nn.Module, small: ModelSpec) -> Finding | None:
        activation_checkpointing.apply(plain.train(), small, tiles.tried(recompute))
        for one in (plain, model):
            seed_generators(1)
            trial_of(small).output(one).float().square().mean().backward()
        if (difference := differing_gradient(model, plain, TOLERANCE)) is None:
            return None
        name, share = difference
        return Finding(
            f"compiled, the gradient of {name} of a tiny copy is another, by {share:.1e}"
        )

    try:
        finding = probe(spec, compiled, compare)
    finally:
        torch.compiler.reset()  # else the sizes of the copy count as ones that change
    if finding is not None and finding.raised:
        return f"on a tiny copy of {spec.name}: {compilation.reason_of(finding.raised)}"
    return finding.actual if finding else None


def _ask(about: Probed) -> Finding | None:
    reason = broken(about.trained, about.layout.recompute)
    return Finding(reason) if reason else None


QUESTION = Question(
    name="whether its blocks compile",
    key="trainer.compile",
    expected='blocks that compile as a whole, or "none"',
    need=Need(
        "`trainer.compile`",
        lambda about: about.layout.compile != "none",
        lambda about: about.under(compile="blocks"),
    ),
    ask=_ask,
    holds="Each block is one graph, and compiled gradients are the same",
    otherwise="a note: the blocks run uncompiled",
    cost="10 s",
    elsewhere=True,
)
