"""The task of texts that are compared: their vectors, and a loss over all samples of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from trainer.config.sections.embeddings import EmbeddingsSection
from trainer.distributed.context_ranks import ContextRanks
from trainer.errors import ConfigError, Problem
from trainer.models.language.forward import without_cache
from trainer.models.spec import ModelSpec, Trial
from trainer.recipes.embeddings.contrast import Contrast, Vectors
from trainer.recipes.embeddings.data import TextSample
from trainer.recipes.embeddings.pooling import pooled
from trainer.tasks.task import Batch

TOPS = (1, 10)
"""The numbers of documents among which an evaluation looks for the positive."""


@dataclass(frozen=True)
class Reading:
    """How a text's tokens are padded and pooled."""

    padding: int = 0
    pooling: str = "mean"
    skipped: tuple[int, int] = (0, 0)
    """The tokens of an anchor's prompt, and of a document's, that are not pooled."""
    normalize: bool = False
    width: int = 0
    """The width of a hidden state."""


class EmbeddingTask:
    """The task of samples of several texts, `trainer.recipes.embeddings.data.TextSample`.

    A micro-batch has all texts of its samples, [samples, columns, tokens], which the model takes as
    rows of one batch.
    """

    measures: tuple[str, ...] = (*(f"recall_at_{top}" for top in TOPS), "mrr")
    draws = False
    _group: dist.ProcessGroup | None = None

    def __init__(self, reading: Reading, contrast: Contrast) -> None:
        self._reading = reading
        self._contrast = contrast

    @classmethod
    def of(
        cls, options: EmbeddingsSection, padding: int, skipped: tuple[int, int], width: int
    ) -> EmbeddingTask:
        """Build the task that the config describes; the arguments are those of `Reading`."""
        reading = Reading(padding, options.pooling, skipped, options.normalize, width)
        cosine = options.similarity == "cosine"
        masks = options.duplicates == "mask"
        return cls(reading, Contrast(options.scale, cosine, options.symmetric, masks))

    @property
    def whole_step(self) -> EmbeddingComparison:
        return EmbeddingComparison(self)

    def regularised(
        self, spec: ModelSpec, label_smoothing: float, neftune_alpha: float
    ) -> EmbeddingTask:
        """Return the same task. Raises ConfigError for smoothed labels and noise on embeddings."""
        given = {"label_smoothing": label_smoothing, "neftune_alpha": neftune_alpha}
        for key, value in given.items():
            if value:
                actual = f"saw {value:g}, and the task embeddings"
                raise ConfigError(Problem(f"trainer.{key}", actual, "0: its loss has no such term"))
        return self

    def placed(self, context: ContextRanks | None, batch: dist.ProcessGroup | None = None) -> None:
        self._group = batch

    def prepare(self, model: nn.Module) -> nn.Module:
        return model

    def collate(self, samples: Sequence[TextSample]) -> Batch:
        """Pad the samples' texts to one width, [samples, columns, tokens]."""
        width = max(len(tokens) for sample in samples for tokens in sample["tokens"])
        shape = len(samples), len(samples[0]["tokens"]), width
        ids = np.full(shape, self._reading.padding, np.int64)
        real = np.zeros(shape, np.int64)
        pools = np.zeros(shape, np.int64)
        for row, sample in enumerate(samples):
            for column, tokens in enumerate(sample["tokens"]):
                ids[row, column, : len(tokens)] = tokens
                real[row, column, : len(tokens)] = 1
                skipped = self._reading.skipped[column > 0]
                pools[row, column, min(skipped, len(tokens) - 1) : len(tokens)] = 1
        return {
            "input_ids": torch.from_numpy(ids),
            "attention_mask": torch.from_numpy(real),
            "pools": torch.from_numpy(pools),
            "texts": torch.from_numpy(np.stack([sample["texts"] for sample in samples])),
            "real": torch.tensor([sample["real"] for sample in samples]),
        }

    def blank(self, sample: TextSample) -> TextSample:
        return {**sample, "real": False}

    def trial(self, samples: Sequence[TextSample]) -> Trial:
        """Make a trial of the model and its loss from a few samples."""
        batch = self.collate(samples)
        alone = [self.collate([sample]) for sample in samples]
        output = self.whole_step.output
        hidden = self.hidden
        return Trial(lambda of: output(of, batch), lambda of: hidden(of, batch), [batch, *alone])

    def shape(self, batch: Batch) -> tuple[int, ...]:
        return tuple(batch["input_ids"].shape)

    def hidden_shape(self, batch: Batch, block: int) -> tuple[int, ...]:
        return (*self.shape(batch), self._reading.width)

    def padded(self, batches: Sequence[Batch]) -> list[Batch]:
        longest = max(batch["input_ids"].shape[-1] for batch in batches)
        fills = {"input_ids": self._reading.padding, "attention_mask": 0, "pools": 0}

        def filled(batch: Batch, name: str) -> torch.Tensor:
            missing = longest - batch[name].shape[-1]
            return F.pad(batch[name], (0, missing), value=fills[name])

        return [{**batch, **{name: filled(batch, name) for name in fills}} for batch in batches]

    def targets(self, batch: Batch) -> torch.Tensor:
        return batch["real"].sum()

    def started(
        self, batches: Sequence[Batch], summed: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        """Count nothing: the loss is a mean over the targets."""

    def count(self, model: nn.Module, batch: Batch) -> int:
        return int(batch["real"].sum())

    def hidden(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Return the model's last hidden states, [samples x columns, tokens, width]."""
        given = {name: batch[name].flatten(0, 1) for name in ("input_ids", "attention_mask")}
        return model(**given, **without_cache(model))[0]  # type: ignore[no-any-return]

    def vectors(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Return the vector of each text, [samples, columns, width], float32 or wider."""
        pools = batch["pools"]
        result = pooled(self.hidden(model, batch), pools.flatten(0, 1), self._reading.pooling)
        result = result.unflatten(0, pools.shape[:2])
        return F.normalize(result, dim=-1) if self._reading.normalize else result

    def loss_sum(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Return the summed loss of the micro-batch's samples among all of the step.

        Its gradient is the sum of the vectors' products with `gradients`, which `compared` has
        added. Without them the step is this micro-batch.
        """
        vectors = self.vectors(model, batch)
        if "gradients" not in batch:
            every = Vectors(vectors, batch["texts"], batch["real"])
            return self._contrast.losses(every, slice(None)).sum()
        product = (vectors * batch["gradients"]).sum()
        return product - product.detach() + batch["loss"]

    def measured(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        return self.judged(self.together([batch], [self.vectors(model, batch)]), None)

    def together(self, batches: Sequence[Batch], outputs: Sequence[torch.Tensor]) -> Vectors:
        """Return the vectors of this rank's micro-batches as one."""
        texts, real = (torch.cat([batch[name] for batch in batches]) for name in ("texts", "real"))
        return Vectors(torch.cat(list(outputs)), texts, real)

    def judged(self, own: Vectors, group: dist.ProcessGroup | None) -> torch.Tensor:
        """Return the summed loss and measures of own samples among all ranks'. Collective."""
        every = own.gathered(group)
        first = (dist.get_rank(group) if group is not None else 0) * len(own.real)
        totals = own.vectors.new_zeros(1 + len(self.measures), dtype=torch.float64)
        for rows in self._contrast.chunks(every, first, len(own.real)):
            real = every.real[rows].double()
            places = self._contrast.ranks(every, rows).double()
            within = [((places <= top) * real).sum() for top in TOPS]
            loss = self._contrast.losses(every, rows).double().sum()
            totals += torch.stack([loss, *within, (real / places).sum()])
        return totals

    def compared(self, batches: Sequence[Batch], outputs: Sequence[torch.Tensor]) -> list[Batch]:
        """Return the micro-batches with their loss and their vectors' gradients. Collective."""
        own = self.together(batches, outputs)
        losses, gradients = self._contrast.gradients(own, self._group)
        sizes = [len(batch["texts"]) for batch in batches]
        parts = zip(batches, losses.split(sizes), gradients.split(sizes), strict=True)
        return [
            {**batch, "loss": loss.sum(), "gradients": gradient} for batch, loss, gradient in parts
        ]


class EmbeddingComparison:
    """The comparison of all vectors of a step, or of an evaluation."""

    def __init__(self, task: EmbeddingTask) -> None:
        self._task = task

    def output(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        return self._task.vectors(model, batch)

    def compared(self, batches: Sequence[Batch], outputs: Sequence[torch.Tensor]) -> list[Batch]:
        return self._task.compared(batches, outputs)

    def measured(self, batches: Sequence[Batch], outputs: Sequence[torch.Tensor]) -> torch.Tensor:
        return self._task.judged(self._task.together(batches, outputs), self._task._group)
