"""Do the biases of routers decide which experts tokens get?"""

from __future__ import annotations

import torch
from torch import nn

from trainer.models.names import pattern_of
from trainer.models.spec import ModelSpec
from trainer.parallel.splits.expert_loads import KEY, biases_of, chosen_by
from trainer.probes.inputs import trial_of
from trainer.probes.probe import Finding, probe
from trainer.probes.question import Need, Probed, Question


def _ask(about: Probed) -> Finding | None:
    if not biases_of(about.trained):
        return Finding("it has none")
    return probe(about.trained, _raise_biases, _compare)


def _raise_biases(model: nn.Module, spec: ModelSpec) -> nn.Module:
    """Raise the bias of the first expert of each layer: every token is to choose it."""
    for bias in biases_of(spec, model).values():
        model.state_dict()[bias].flatten()[0] += 1e4
    return model


def _compare(plain: nn.Module, raised: nn.Module, spec: ModelSpec) -> Finding | None:
    missed: list[str] = []
    for stack, bias in biases_of(spec, raised).items():

        def see(
            experts: nn.Module,
            args: tuple[torch.Tensor, ...],
            kwargs: dict[str, torch.Tensor],
            bias: str = bias,
        ) -> None:
            if not bool((chosen_by(args, kwargs) == 0).any(1).all()):
                missed.append(bias)

        raised.get_submodule(stack).register_forward_pre_hook(see, with_kwargs=True)
    with torch.no_grad():
        trial_of(spec).output(raised.eval())
    if not missed:
        return None
    return Finding(f"{pattern_of(missed[0])} does not decide which experts tokens get")


QUESTION = Question(
    name="what chooses its experts",
    key=KEY,
    expected="a bias that chooses experts, saved with the weights and not learned",
    hint="Remove it: experts are then balanced by the model's own loss, if it has one.",
    need=Need(
        f"`{KEY}`",
        lambda about: bool(about.layout.router_bias_rate),
        lambda about: about.under(router_bias_rate=1e-3),
    ),
    ask=_ask,
    holds="Raising the bias of an expert sends every token to it",
    otherwise="unsupported: a model without such biases, or whose router does not follow them",
    cost="0.05 s",
)
