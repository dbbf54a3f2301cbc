"""Faults of pairs: of their answers, masks, reference and sums."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

from tests.support.certify.faults.planting import around


def of_pairs(change: Any) -> Any:
    """`change(batch, samples)` comes after pairs were collated."""
    from trainer.recipes.pairs.task import PairsTask, scored_in

    def collate(real: Any, self: Any, samples: Any) -> Any:
        batch = change(real(self, samples), samples)
        return {**batch, "scored": scored_in(batch["targets"])}

    return around(PairsTask, "collate", collate)


def answers_swapped_on_one_rank(engine: str) -> Any:
    import torch
    import torch.distributed as dist

    def swapped(batch: Any, samples: Any) -> Any:
        if dist.get_rank() == 1:
            for name in ("input_ids", "targets", "lengths"):
                batch[name] = torch.cat(batch[name].chunk(2)[::-1])
        return batch

    return of_pairs(swapped)


def a_prompt_token_counted(engine: str) -> Any:
    def counted(batch: Any, samples: Any) -> Any:
        targets = batch["targets"]
        for row, target in enumerate(targets):
            first = int((target >= 0).nonzero()[0]) if bool((target >= 0).any()) else 0
            if first:
                target[first - 1] = batch["input_ids"][row, first]
        return batch

    return of_pairs(counted)


def padding_counted(engine: str) -> Any:
    def counted(batch: Any, samples: Any) -> Any:
        for row, length in enumerate(batch["lengths"].tolist()):
            batch["targets"][row, length[0] :] = 0
        return batch

    return of_pairs(counted)


def reference_of_another_sample(engine: str) -> Any:
    from trainer.data.text.token_files import PreparedPairs

    return around(
        PreparedPairs, "refer_to", lambda real, self, column: real(self, column[::-1].copy())
    )


def a_rounded_reference(engine: str) -> Any:
    """As FSDP rounds all that a batch has, if it is let."""

    def rounded(batch: Any, samples: Any) -> Any:
        if "reference" in batch:
            batch["reference"] = batch["reference"].bfloat16()
        return batch

    return of_pairs(rounded)


def dropout_in_the_reference(engine: str) -> Any:
    from trainer.recipes.pairs.task import PairsTask

    def measured(real: Any, self: Any, model: Any, batch: Any) -> Any:
        model.train(bool(self._column))
        result = real(self, model, batch)
        model.eval()
        return result

    return around(PairsTask, "measured", measured)


def tokens_of_one_rank(engine: str) -> Any:
    """The mean over the chosen answers' tokens is one of means."""
    from trainer.recipes.pairs.task import PairsTask

    return around(
        PairsTask,
        "started",
        lambda real, self, batches, summed: real(self, batches, lambda counts: counts),
    )


def gradient_of_other_words_missing(engine: str) -> Any:
    from trainer.distributed.exchange import Exchange
    from trainer.tasks.losses import token_losses

    class Alone(Exchange):
        def copy_to(self, whole: Any) -> Any:
            return whole

    def alone(real: Any, weight: Any) -> Any:
        shard = real(weight)
        return shard and replace(shard, ranks=Alone(shard.ranks.group))

    return around(token_losses, "vocabulary_shard_of", alone)


def a_sigmoid_for_each_part_of_a_sequence(engine: str) -> Any:
    from trainer.distributed.context_ranks import ContextRanks

    return mock.patch.object(ContextRanks, "summed", lambda self, term: term)


def gradient_counted_by_each_part(engine: str) -> Any:
    """The sum over the ranks that share a sequence adds up its gradients, too."""
    from trainer.distributed.context_ranks import ContextRanks

    def summed(self: Any, term: Any) -> Any:
        for exchange in (self._heads, self._rows):
            term = exchange.copy_to(exchange.reduce_from(term)) if exchange else term
        return term

    return mock.patch.object(ContextRanks, "summed", summed)


def truncated_unequally(engine: str) -> Any:
    from trainer.data.text.cutting import CutDocuments

    def shorter(real: Any, self: Any, pair: Any, cut: Any) -> Any:
        kept = slice(None, max(3, min(len(pair.rejected.tokens), cut.sequence_length) - 2))
        rejected = pair.rejected
        rejected = rejected._replace(tokens=rejected.tokens[kept], counted=rejected.counted[kept])
        rejected.counted[-1] = True
        return real(self, pair._replace(rejected=rejected), cut)

    return around(CutDocuments, "add_pair", shorter)
