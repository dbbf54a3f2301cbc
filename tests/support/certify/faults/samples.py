"""Faults of samples, their order, padding and loss, and of what is counted."""

from __future__ import annotations

from typing import Any

from tests.support.certify.faults.planting import around, of_collation


def shifted_targets(engine: str) -> Any:
    return of_collation(
        lambda real, samples: (b := real(samples)) | {"targets": b["targets"].roll(-1, 1)}
    )


def padding_counted(engine: str) -> Any:
    def counted(real, samples):
        batch = real(samples)
        for row, sample in enumerate(samples):
            batch["targets"][row, len(sample["targets"]) :] = 0
        return batch

    return of_collation(counted)


def truncated_sample(engine: str) -> Any:
    return of_collation(
        lambda real, samples: real([{k: v[:-1] for k, v in samples[0].items()}, *samples[1:]])
    )


def later_token_as_input(engine: str) -> Any:
    def leaked(real, samples):
        batch = real(samples)
        counted = batch["targets"] >= 0
        batch["input_ids"][counted] = batch["targets"][counted]
        return batch

    return of_collation(leaked)


def samples_of_another_rank(engine: str) -> Any:
    from trainer.data import loader

    return around(
        loader,
        "micro_batches",
        lambda real, ids, micro, accumulation, ranks, rank: real(
            ids, micro, accumulation, ranks, 0
        ),
    )


def samples_in_the_order_of_epoch_0(engine: str) -> Any:
    from trainer.data import order

    return around(order, "_keyed", lambda real, key, size: real([key[0], 0], size))


def last_chunk_dropped(engine: str) -> Any:
    from trainer.tasks.losses import chunks

    return around(chunks, "chunks_of", lambda real, *args, **kwargs: real(*args, **kwargs)[:-1])


def means_of_means(engine: str) -> Any:
    """The held-out loss as the mean of the micro-batches' own means."""
    import torch

    from trainer.engines.normalise import NormalisedEngine

    def means(real, self, batches):
        batches, task, mesh = list(batches), self.job.task, self._mesh
        total, targets = real(self, batches)
        own = [
            self._runner.evaluate([batch])[0].double() / task.targets(batch).clamp_min(1)
            for batch in batches
        ]
        mean = torch.stack(own).mean() / mesh.layout.world_size
        torch.distributed.all_reduce(mean)
        return torch.cat([(mean * targets)[None], total[1:]]), targets

    return around(NormalisedEngine, "evaluate", means)


def ids_of_ten_bits(engine: str) -> Any:
    return of_collation(
        lambda real, samples: (b := real(samples)) | {"input_ids": b["input_ids"] % 1024}
    )


def rows_of_64(engine: str) -> Any:
    return of_collation(
        lambda real, samples: real([{k: v[:64] for k, v in sample.items()} for sample in samples])
    )


def accuracy_of_the_next_target(engine: str) -> Any:
    from trainer.tasks.losses import cross_entropy

    return around(
        cross_entropy,
        "count_correct",
        lambda real, logits, targets, *words: real(logits, targets.roll(1, -1), *words),
    )


def tokens_of_one_rank_logged(engine: str) -> Any:
    from trainer.run import loop

    return around(
        loop, "RunState", lambda real, step, samples, tokens: real(step, samples, tokens // 2)
    )
