"""Faults of masked language models, planted in the run alone."""

from __future__ import annotations

from typing import Any

import torch

from tests.support.certify.faults.planting import around


def _of_collation(change: Any) -> Any:
    from trainer.recipes.masked_lm.task import MaskedTask

    return around(MaskedTask, "collate", lambda real, self, samples: change(real(self, samples)))


def _of_loading(change: Any) -> Any:
    """Change the epoch with which the run's loader, and no other, asks for a sample."""
    from trainer.data import loader

    def changed(real: Any, source: Any, number: int, epoch: int | None) -> Any:
        return real(source, number, epoch if epoch is None else change(epoch))

    return around(loader, "sample_of", changed)


def masks_by_rank(engine: str) -> Any:
    import torch.distributed as dist

    return _of_loading(lambda epoch: epoch + 10 * dist.get_rank())


def the_same_masks(engine: str) -> Any:
    return _of_loading(lambda epoch: 0)


def padding_attended(engine: str) -> Any:
    return _of_collation(
        lambda batch: {name: value for name, value in batch.items() if name != "attention_mask"}
    )


def all_counted(engine: str) -> Any:
    """The loss is also that of tokens which are read as they are."""

    def changed(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        real = batch["input_ids"] > 1
        labels = torch.where(real & (batch["labels"] < 0), batch["input_ids"], batch["labels"])
        return batch | {"labels": labels, "places": torch.nonzero(labels >= 0)}

    return _of_collation(changed)


def places_moved(engine: str) -> Any:
    return _of_collation(lambda batch: batch | {"places": batch["places"].roll(1, 0)[:-1]})


def mean_of_means(engine: str) -> Any:
    """Each micro-batch's mean has the same weight."""
    from trainer.recipes.masked_lm.task import MaskedTask

    def changed(real: Any, self: Any, model: Any, batch: Any) -> torch.Tensor:
        return real(self, model, batch) / batch["count"].clamp_min(1) * 16

    return around(MaskedTask, "loss_sum", changed)
