"""What is differentiated twice has every term, or is an error."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.support.layouts import PARTS, SPLIT
from tests.support.messages import raises
from tests.support.training import Case
from trainer.errors import ConfigError
from trainer.models.finetuning.quantised.nf4 import NF4
from trainer.models.finetuning.quantised.quantised_base import QuantisedLinear
from trainer.tasks.losses.cross_entropy import linear_cross_entropy, logits_cross_entropy
from trainer.tasks.losses.divergences import Likeliest, Mixed, logits_divergence
from trainer.tasks.losses.token_losses import logits_token_losses

TARGETS = torch.arange(4)
TEACHER = Likeliest(TARGETS[:, None], torch.tensor([0.5, 0.5]).log().expand(4, 2))
LOSSES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "of hidden states": lambda given: linear_cross_entropy(given, torch.eye(6), None, TARGETS),
    "of logits": lambda given: logits_cross_entropy(given, TARGETS),
    "of tokens": lambda given: logits_token_losses(given, TARGETS).sum(),
    "divergence": lambda given: logits_divergence(given, TARGETS, TEACHER, Mixed("reverse"))[0],
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_with_a_gradient_of_its_own_refuses(name: str) -> None:
    given = torch.randn(4, 6, requires_grad=True)
    total = 3 * LOSSES[name](given)
    first, again = (torch.autograd.grad(total, given, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, again)
    with raises(ConfigError, "create_graph"):
        torch.autograd.grad(total, given, create_graph=True)


def penalised(case: Case) -> list[str]:
    """Return the errors of a penalty on the gradient of what a layer gives. Runs on each rank."""
    import torch.distributed as dist

    from tests.support.training import build

    model = build(case, dist.get_rank()).modules[0].get_submodule("model.model.layers.0")
    errors = []
    for name in ("mlp", "self_attn.o_proj", "mlp.down_proj"):
        module = model.get_submodule(name)
        width = module.weight.to_local().shape[1] if hasattr(module, "weight") else 32
        hidden = torch.randn(1, 4, width, requires_grad=True)
        try:
            torch.autograd.grad(module(hidden).square().sum(), hidden, create_graph=True)
        except ConfigError as error:
            errors.append(str(error))
    return errors


@pytest.mark.parametrize("sequence", [False, True])
def test_a_module_split_over_tensor_ranks_refuses(pools, sequence: bool) -> None:
    case = replace(SPLIT, engine="mesh", more=PARTS if sequence else {})
    for errors in pools[2].run(penalised, case=case):
        assert len(errors) == 3
        assert all("create_graph" in error for error in errors)


def test_a_quantised_layer_has_every_term() -> None:
    layer = QuantisedLinear(nn.Linear(64, 8), NF4())
    layer.weight.data = layer.form.stored(torch.randn(8, 64))
    plain = nn.Linear(64, 8)
    plain.weight.data = layer.form.dequantised(layer.weight, torch.float32)
    plain.bias = layer.bias
    given = torch.randn(3, 64, requires_grad=True)
    penalties = []
    for module in (layer, plain):
        [gradient] = torch.autograd.grad(module(given).tanh().sum(), given, create_graph=True)
        penalties += torch.autograd.grad(gradient.square().sum(), given)
    torch.testing.assert_close(*penalties)
