"""Packed documents, and their loss one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from tests.support.training import TRAIN_BATCH, VOCABULARY
from trainer.tasks.task import IGNORED


def packed_samples(step: int, count: int = TRAIN_BATCH) -> list[dict[str, np.ndarray]]:
    """Rows of one to four ragged documents, some with a single target."""
    rng = np.random.default_rng(100 + step)
    results = []
    for _ in range(count):
        lengths = rng.integers(1, 11, int(rng.integers(1, 5)))
        ids = [rng.integers(1, VOCABULARY, n) for n in lengths]
        targets = [
            np.append(row[1:], IGNORED) if len(row) % 3 else np.full(len(row), row[0])
            for row in ids
        ]
        results.append(
            {
                "input_ids": np.concatenate(ids),
                "targets": np.concatenate(targets),
                "documents": np.array(lengths),
            }
        )
    return results


def loss_alone(model: Any, samples: list[dict[str, np.ndarray]]) -> torch.Tensor:
    """The summed loss of the documents, each run by itself through the model's own forward."""
    total = torch.zeros(())
    for sample in samples:
        ends = np.cumsum([0, *sample["documents"]])
        for a, b in zip(ends, ends[1:], strict=False):
            ids, targets = (
                torch.tensor(sample[key][a:b])[None] for key in ("input_ids", "targets")
            )
            logits = model(input_ids=ids, use_cache=False).logits
            total = total + F.cross_entropy(
                logits[0], targets[0], reduction="sum", ignore_index=IGNORED
            )
    return total


def samples_of(lengths: list[list[int]]) -> list[dict[str, np.ndarray]]:
    """Draw a packed sample for each row of documents of these lengths."""
    rng = np.random.default_rng(0)
    results = []
    for row in lengths:
        ids = [rng.integers(1, VOCABULARY, n) for n in row]
        targets = [np.append(own[1:], own[0] if len(own) == 1 else IGNORED) for own in ids]
        sample = {"input_ids": np.concatenate(ids), "targets": np.concatenate(targets)}
        results.append(sample | {"documents": np.array(row)})
    return results
