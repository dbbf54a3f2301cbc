"""The constant that a certificate changes, and that it still has to."""

from __future__ import annotations

import pytest
import torch

from trainer.certify.patches import constant, loss_in_chunks
from trainer.certify.tiny_run import LONGEST, MICRO_BATCH
from trainer.models.tiny_config import SIZES
from trainer.tasks.losses import cross_entropy
from trainer.tasks.losses.cross_entropy import LossOptions, linear_cross_entropy


def count() -> int:
    """The number of chunks in which the loss of a micro-batch of a tiny run is computed."""
    ranges = []
    tokens, hidden = MICRO_BATCH * LONGEST, 16
    linear_cross_entropy(
        torch.zeros(tokens, hidden),
        torch.zeros(SIZES.vocabulary, hidden),
        None,
        torch.zeros(tokens, dtype=torch.int64),
        LossOptions(observe=lambda rows, losses: ranges.append(rows)),
    )
    return len(ranges)


def test_the_loss_of_a_tiny_run_has_several_chunks_only_while_it_is_verified() -> None:
    assert count() == 1
    with loss_in_chunks(8 * SIZES.vocabulary * 4):
        assert count() == MICRO_BATCH * LONGEST // 8
    assert count() == 1


def test_no_other_module_has_a_size_of_chunks_that_would_change_nothing() -> None:
    with pytest.raises(AttributeError, match="CHUNK_BYTES"):
        constant(cross_entropy, "CHUNK_BYTES", 1).__enter__()
