"""Faults of labels and rewards, planted in the run alone."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch

from tests.support.certify.faults.planting import around, in_blocks_of_the_run


def _of_collation(change: Any) -> Any:
    from trainer.recipes.labels.task import LabelTask

    return around(LabelTask, "collate", lambda real, self, samples: change(real(self, samples)))


def padding_scored(engine: str) -> Any:
    """The head takes the score of the last place of a row, which may be padding."""

    def changed(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        filled = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, 1)
        return batch | {"input_ids": filled}

    return _of_collation(changed)


def padding_attended(engine: str) -> Any:
    return _of_collation(
        lambda batch: batch | {"attention_mask": torch.ones_like(batch["attention_mask"])}
    )


def padding_on_the_other_side(engine: str) -> Any:
    def changed(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        lengths = batch["attention_mask"].sum(1).tolist()
        rolled = {}
        for name in ("input_ids", "attention_mask"):
            width = batch[name].shape[1]
            rows = zip(batch[name], lengths, strict=True)
            rolled[name] = torch.stack([row.roll(width - length) for row, length in rows])
        return batch | rolled

    return _of_collation(changed)


def labels_shifted(engine: str) -> Any:
    return _of_collation(lambda batch: batch | {"labels": batch["labels"].roll(1, -1)})


def answers_swapped_on_one_rank(engine: str) -> Any:
    import torch.distributed as dist

    def changed(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if dist.get_rank() == 0:
            return batch
        order = torch.arange(len(batch["input_ids"])).reshape(-1, 2).flip(1).flatten()
        return batch | {name: batch[name][order] for name in ("input_ids", "attention_mask")}

    return _of_collation(changed)


def mean_of_means(engine: str) -> Any:
    """Each micro-batch's mean has the same weight, as in transformers' Trainer (#47688)."""
    from trainer.recipes.labels.task import LabelTask

    def changed(real: Any, self: Any, model: Any, batch: Any) -> torch.Tensor:
        return real(self, model, batch) / batch["count"].clamp_min(1) * 16

    return around(LabelTask, "loss_sum", changed)


def classes_weighted(engine: str) -> Any:
    from trainer.recipes.labels.kinds import Single

    def changed(real: Any, self: Any, logits: Any, batch: Any, *rest: Any) -> torch.Tensor:
        of_first = {**batch, "labels": batch["labels"].masked_fill(batch["labels"] != 0, -100)}
        return real(self, logits, batch, *rest) + 0.1 * real(self, logits, of_first, *rest)

    return around(Single, "loss", changed)


def margin_left_out(engine: str) -> Any:
    return _of_collation(lambda batch: batch | {"margins": torch.zeros_like(batch["margins"])})


def not_centred(engine: str) -> Any:
    from trainer.recipes.labels.kinds import Reward

    def changed(real: Any, self: Any, *given: Any) -> torch.Tensor:
        with mock.patch.object(self, "_centring", 0.0):
            return real(self, *given)

    return around(Reward, "loss", changed)


def head_without_gradient_on_one_rank(engine: str) -> Any:
    import torch.distributed as dist
    import torch.nn.functional as F

    def changed(model: Any, spec: Any) -> None:
        head = next(part for name, part in model.named_modules() if name.endswith("score"))
        if dist.get_rank() == 1:
            head.forward = lambda hidden: F.linear(hidden, head.weight.detach() + 0 * head.weight)

    return in_blocks_of_the_run(changed)
