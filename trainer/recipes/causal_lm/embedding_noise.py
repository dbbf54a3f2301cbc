"""NEFTune (arXiv 2310.05914): noise on input embeddings in training."""

from __future__ import annotations

from contextlib import suppress

import torch
from torch import nn

from trainer.distributed.context_ranks import ContextRanks
from trainer.models.spec import ModelSpec


class EmbeddingNoise:
    """Adds to each entry a uniform random number between -1 and 1, times alpha / sqrt(L d).

    L is the number of tokens of the document, without padding, as in the authors' code; d is the
    width of an embedding. It is drawn first in a forward pass, from the seed of the micro-batch,
    and in float32, so that it is the same in every precision. There is none in evaluation.
    """

    def __init__(self, alpha: float) -> None:
        self._alpha = alpha
        self._lengths = torch.ones(())
        self._ranks: ContextRanks | None = None

    def start(self, lengths: torch.Tensor, ranks: ContextRanks | None = None) -> None:
        """Set L for the next micro-batch, by row or token: [batch, 1 or sequence].

        `ranks` share its rows.
        """
        self._lengths = lengths
        self._ranks = ranks

    def add_to(self, model: nn.Module) -> None:
        """Add noise to the model's input embeddings in training, from now on."""

        def add(
            module: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor
        ) -> torch.Tensor:
            return self._noisy(output) if module.training else output

        # a function, which a copy of the model shares, not a method, which it would copy
        model.get_input_embeddings().register_forward_hook(add)  # type: ignore[operator]

    def _noisy(self, embedded: torch.Tensor) -> torch.Tensor:
        def drawn(like: torch.Tensor) -> torch.Tensor:
            return torch.rand(like.shape, device=like.device).mul_(2).sub_(1)

        lengths = self._lengths
        if self._ranks:
            noise = self._ranks.of_rows(drawn, embedded)
            lengths = self._ranks.part(lengths) if lengths.shape[1] > 1 else lengths
        else:
            noise = drawn(embedded)
        largest = self._alpha / (lengths.clamp_min(1) * embedded.shape[-1]).sqrt()
        return embedded + noise.mul_(largest[..., None]).to(embedded.dtype)


def has_table(spec: ModelSpec) -> bool:
    """True if the model looks tokens up in a table of embeddings, to which noise can be added."""
    # transformers raises these for a family that it does not know
    with suppress(NotImplementedError, AttributeError):
        return isinstance(spec.build().get_input_embeddings(), nn.Embedding)  # type: ignore[operator]
    return False
