"""Image classification: cross-entropy, and the number of images that are classified right."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from trainer.errors import ConfigError, Problem
from trainer.models.spec import ModelSpec
from trainer.tasks.supervised import Supervised
from trainer.tasks.task import IGNORED, Batch, changed

TOP = 5


class ImageClassification(Supervised):
    """The task of samples that are pairs of an image [channels, height, width], float32, and the
    number of its class.

    An image whose class is IGNORED, which stands for one that can't be read, counts for nothing.
    """

    def __init__(
        self, classes: int, build: Callable[[], nn.Module], blocks: Sequence[str] = ()
    ) -> None:
        super().__init__(class_loss, build, blocks)
        self._classes = classes
        self._smoothing = 0.0
        self.measures = ("accuracy", "accuracy_top5") if classes > TOP else ("accuracy",)

    def regularised(
        self, spec: ModelSpec, label_smoothing: float, neftune_alpha: float
    ) -> ImageClassification:
        """Return the same task with smoothed labels. Raises ConfigError for noise on embeddings."""
        super().regularised(spec, 0.0, neftune_alpha)
        return changed(self, _smoothing=label_smoothing)

    def loss_sum(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        smoothing = self._smoothing if model.training else 0.0
        return class_loss(self.output(model, batch), batch["target"], smoothing)[0] * batch["share"]

    def measured(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Return the summed loss, and how many images' classes score highest, or in the top 5."""
        logits = self.output(model, batch).float()
        target = batch["target"]
        # ties count against the model: else a constant one would be right by their order
        own = logits.gather(1, target.clamp_min(0)[:, None])
        better = (logits >= own).sum(1) - 1
        better = better.masked_fill(~torch.isfinite(own[:, 0]), self._classes)
        counted = target != IGNORED
        tops = (1, TOP) if self._classes > TOP else (1,)
        right = [((better < most) & counted).sum() for most in tops]
        measured = self._measured_by(logits[counted], target[counted]) if self._metrics else []
        counts = torch.stack([class_loss(logits, target)[0], *right, *measured])
        return counts.where(batch["share"] > 0, 0.0)

    def check_output(self, samples: Sequence[object], name: str) -> None:
        """Raise ConfigError unless the model gives a score for each class."""
        batch = self.collate(samples)
        output, _ = self._on_meta(batch)
        wanted = (len(batch["target"]), self._classes)
        if not torch.is_tensor(output) or tuple(output.shape) != wanted:
            actual = str(list(output.shape)) if torch.is_tensor(output) else type(output).__name__
            expected = f"scores {list(wanted)}: [batch, classes of the data]"
            place = f"trainer.model: {name}"
            hint = "Set num_classes."
            raise ConfigError(Problem(place, f"its output is {actual}", expected, hint))


def class_loss(
    output: torch.Tensor, target: torch.Tensor, smoothing: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the summed loss of `output` [batch, classes], and the number of targets [batch]."""
    total = cross_entropy(
        output.float(), target, ignore_index=IGNORED, reduction="sum", label_smoothing=smoothing
    )
    return total, (target != IGNORED).sum()
