"""The loss of each token: values and gradients against PyTorch's cross-entropy, in chunks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from trainer.certify.patches import loss_in_chunks
from trainer.tasks.losses.token_losses import (
    TokenLossHead,
    linear_token_losses,
    logits_token_losses,
)
from trainer.tasks.task import IGNORED


@pytest.mark.parametrize("chunk", [7 * 4 * 3, 1 << 20], ids=["chunks", "one"])
@pytest.mark.parametrize("bias", [True, False])
def test_values_and_gradients(chunk: int, bias: bool) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(2, 5, 3, requires_grad=True)
    weight = torch.randn(7, 3, requires_grad=True)
    offset = torch.randn(7, requires_grad=True) if bias else None
    targets = torch.randint(0, 7, (2, 5))
    targets[0, :2] = IGNORED
    scale = torch.randn(2, 5)
    inputs = [one for one in (hidden, weight, offset) if one is not None]
    plain = F.cross_entropy(
        F.linear(hidden, weight, offset).flatten(0, 1), targets.flatten(), reduction="none"
    ).view(2, 5)
    wanted = torch.autograd.grad((plain * scale).sum(), inputs)
    with loss_in_chunks(chunk):
        losses = linear_token_losses(hidden, weight, offset, targets)
        gradients = torch.autograd.grad((losses * scale).sum(), inputs)
    torch.testing.assert_close(losses, plain)
    for one, other in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(one, other)


def test_of_logits() -> None:
    torch.manual_seed(0)
    logits = torch.randn(2, 4, 6, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(0, 6, (2, 4))
    losses = logits_token_losses(logits, targets)
    assert losses.dtype == torch.float32
    wide = logits.detach().float().requires_grad_()
    plain = F.cross_entropy(wide.flatten(0, 1), targets.flatten(), reduction="none").view(2, 4)
    torch.testing.assert_close(losses, plain)
    scale = torch.arange(8.0).view(2, 4)
    own = torch.autograd.grad((losses * scale).sum(), logits)[0]
    torch.testing.assert_close(own.float(), torch.autograd.grad((plain * scale).sum(), wide)[0],
                               rtol=1e-2, atol=1e-2)  # fmt: skip


def test_a_frozen_head_gets_no_gradient() -> None:
    head = TokenLossHead(nn.Linear(3, 5).requires_grad_(False))
    hidden = torch.randn(4, 3, requires_grad=True)
    head(hidden, torch.arange(4)).sum().backward()
    assert hidden.grad is not None
    assert head.weight.grad is None
    assert head(hidden).shape == (4, 5)  # without targets it is the model's own head
