"""The constant that a certificate changes, and that it still has to."""

from __future__ import annotations

import torch

from trainer.certify.patches import constant
from trainer.certify.tiny_run import LONGEST, MICRO_BATCH
from trainer.models.tiny_config import SIZES
from trainer.tasks import cross_entropy
from trainer.tasks.cross_entropy import LossOptions, linear_cross_entropy


def chunks() -> int:
    """The number of chunks in which the loss of a micro-batch of a tiny run is computed."""
    seen = []
    tokens, hidden = MICRO_BATCH * LONGEST, 16
    linear_cross_entropy(
        torch.zeros(tokens, hidden),
        torch.zeros(SIZES.vocabulary, hidden),
        None,
        torch.zeros(tokens, dtype=torch.int64),
        LossOptions(observe=lambda rows, losses: seen.append(rows)),
    )
    return len(seen)


def test_the_loss_of_a_tiny_run_has_several_chunks_only_while_it_is_verified() -> None:
    assert chunks() == 1
    with constant(cross_entropy, "CHUNK_BYTES", 7 * SIZES.vocabulary * 4):
        assert chunks() > 1
    assert chunks() == 1
