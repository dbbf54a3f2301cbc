"""Divergences of distillation: equal to TRL's over the whole vocabulary, and to a plain loop."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from trainer.tasks.losses import chunks
from trainer.tasks.losses.divergences import (
    DIVERGENCES,
    Likeliest,
    Mixed,
    linear_divergence,
    linear_likeliest,
    logits_divergence,
)

TOKENS, HIDDEN, VOCABULARY = 23, 8, 37


def drawn(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    """Hidden states, a head, targets of which some do not count, and a teacher's logits."""
    torch.manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, dtype=dtype, requires_grad=True)
    weight = torch.randn(VOCABULARY, HIDDEN, dtype=dtype, requires_grad=True)
    bias = torch.randn(VOCABULARY, dtype=dtype, requires_grad=True)
    targets = torch.randint(0, VOCABULARY, (TOKENS,))
    targets[::4] = -100
    return hidden, weight, bias, targets, 3 * torch.randn(TOKENS, VOCABULARY, dtype=dtype)


def likeliest_of(logits: torch.Tensor, count: int, temperature: float) -> Likeliest:
    """By a sort, of whole probabilities."""
    logs = torch.log_softmax(logits / temperature, -1)
    order = logs.argsort(-1, descending=True)
    ids, others = order[:, :count], order[:, count:]
    rest = torch.logsumexp(logs.gather(1, others), 1, keepdim=True)
    return Likeliest(ids, torch.cat([logs.gather(1, ids), rest], 1))


def plain(
    logits: torch.Tensor, targets: torch.Tensor, teacher: Likeliest, mixed: Mixed
) -> torch.Tensor:
    """The loss, token by token."""
    total = logits.new_zeros(())
    for row, target in enumerate(targets.tolist()):
        if target == -100:
            continue
        whole = torch.softmax(logits[row] / mixed.temperature, 0)
        ids = teacher.ids[row].tolist()
        others = [token for token in range(len(whole)) if token not in ids]
        q = [*(whole[token] for token in ids)]
        p = teacher.logs[row].exp()
        if others:
            q.append(whole[others].sum())
        soft = logits.new_zeros(())
        for one, other in zip(p, q, strict=False):  # the last p is 0 where there are no others
            m = mixed.beta * one + (1 - mixed.beta) * other
            of_p, of_q = one * (one.log() - m.log()), other * (other.log() - m.log())
            soft = (
                soft
                + {
                    "forward": one * (one.log() - other.log()),
                    "reverse": other * (other.log() - one.log()),
                    "jensen_shannon": mixed.beta * of_p + (1 - mixed.beta) * of_q,
                }[mixed.divergence]
            )
        log_q = torch.log_softmax(logits[row], 0)
        hard = -(1 - mixed.smoothing) * log_q[target] - mixed.smoothing * log_q.mean()
        weight = mixed.hard_weight
        total = total + (1 - weight) * mixed.temperature**2 * soft + weight * hard
    return total


def compare(actual: torch.Tensor, expected: torch.Tensor, leaves: Any, tolerance: float) -> None:
    """Compare losses, and the gradient of each leaf."""
    assert actual.item() == pytest.approx(expected.item(), rel=tolerance)
    ours = torch.autograd.grad(1.7 * actual, leaves, retain_graph=True)
    theirs = torch.autograd.grad(1.7 * expected, leaves, retain_graph=True)
    for one, other in zip(ours, theirs, strict=True):
        assert float((one - other).norm()) <= tolerance * float(other.norm())


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("count", [1, 5, VOCABULARY - 1, VOCABULARY])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_a_plain_loop_gives_the_same(
    divergence: Any, count: int, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "CHUNK_BYTES", VOCABULARY * 8 * 7)
    hidden, weight, bias, targets, logits = drawn()
    teacher = likeliest_of(logits, count, temperature)
    mixed = Mixed(divergence, 0.3, temperature, 0.25, 0.1)
    expected = plain(hidden @ weight.T + bias, targets, teacher, mixed)
    sums = linear_divergence(hidden, weight, bias, targets, teacher, mixed)
    compare(sums[0], expected, (hidden, weight, bias), 1e-8)
    own = logits_divergence(hidden @ weight.T + bias, targets, teacher, mixed)
    compare(own[0], expected, (hidden, weight, bias), 1e-8)
    assert own.tolist() == pytest.approx(sums.tolist())


@pytest.mark.parametrize(
    ("divergence", "beta"),
    [("forward", 0), ("reverse", 1), *[("jensen_shannon", b) for b in (0.1, 0.5, 0.9)]],
)
@pytest.mark.parametrize("temperature", [1.0, 0.9, 3.0])
@pytest.mark.more
def test_it_is_trls_over_the_whole_vocabulary(
    divergence: Any, beta: float, temperature: float
) -> None:
    """TRL's GKD, of a whole vocabulary, times T^2, in float32: loss and every gradient."""
    GKDTrainer = pytest.importorskip("trl.experimental.gkd").GKDTrainer
    hidden, weight, bias, targets, logits = drawn(torch.float32)
    theirs = GKDTrainer.generalized_jsd_loss(
        (hidden @ weight.T + bias)[None], logits[None], targets[None], beta, temperature
    )
    measured = linear_likeliest(
        logits, torch.eye(VOCABULARY), None, VOCABULARY, VOCABULARY, temperature
    )
    teacher = Likeliest(measured[:, :VOCABULARY].int(), measured[:, VOCABULARY:].float())
    mixed = Mixed(divergence, beta or 0.5, temperature)
    sums = linear_divergence(hidden, weight, bias, targets, teacher, mixed)
    counted = int((targets != -100).sum())
    compare(sums[0] / counted, theirs * temperature**2, (hidden, weight, bias), 1e-6)
    assert sums[2].item() / counted == pytest.approx(theirs.item(), rel=1e-6)
    hard = F.cross_entropy(hidden @ weight.T + bias, targets)
    assert sums[1].item() / counted == pytest.approx(hard.item(), rel=1e-6)
    assert sums[3].item() == counted


@pytest.mark.parametrize("count", [1, 6, VOCABULARY])
def test_the_likeliest_tokens_are_those_of_a_sort(count: int) -> None:
    logits = drawn()[-1]
    expected = likeliest_of(logits, count, 1.5)
    actual = linear_likeliest(logits, torch.eye(VOCABULARY).double(), None, count, VOCABULARY, 1.5)
    assert actual[:, :count].tolist() == expected.ids.tolist()
    assert torch.allclose(actual[:, count:], expected.logs, atol=1e-12)


def test_likeliest_tokens_are_of_the_shared_ids_alone() -> None:
    logits = drawn()[-1]
    actual = linear_likeliest(logits, torch.eye(VOCABULARY).double(), None, 4, 20, 1.0)
    logs = torch.log_softmax(logits, -1)
    assert float(actual[:, :4].max()) < 20
    best = logs[:, :20].topk(4, 1).values
    assert torch.allclose(actual[:, 4:8], best)
    assert torch.allclose(actual[:, 8], torch.log1p(-best.exp().sum(1)), atol=1e-9)


def test_fewer_tokens_give_a_smaller_divergence() -> None:
    """The tail is one bucket: the divergence is a lower bound of that of the whole vocabulary."""
    hidden, weight, bias, targets, logits = drawn()
    for divergence in DIVERGENCES:
        results = []
        for count in (1, 4, 16, VOCABULARY):
            mixed: Any = Mixed(divergence)
            teacher = likeliest_of(logits, count, 1.0)
            sums = linear_divergence(hidden, weight, bias, targets, teacher, mixed)
            results.append(sums[2].item())
        assert results == sorted(results)
        assert results[0] > 0


def test_a_token_that_is_ruled_out_gives_finite_gradients() -> None:
    """Logits of minus infinity, of the student and of the teacher, outside of the likeliest."""
    _, _, _, targets, logits = drawn()
    own = torch.randn_like(logits)
    own[:, 3] = -math.inf
    logits[:, 3] = -math.inf
    own.requires_grad_()
    for divergence in DIVERGENCES:
        mixed: Any = Mixed(divergence)
        [grad] = torch.autograd.grad(
            logits_divergence(own, targets, likeliest_of(logits, 5, 1.0), mixed)[0], [own]
        )
        assert torch.isfinite(grad).all()
        assert float(grad.sum(1).abs().max()) < 1e-12
