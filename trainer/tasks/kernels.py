"""The kernel that computes a mask of packed documents, as the model was tried with it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from trainer.distributed.context_ranks import ContextRanks
from trainer.tasks.attention import Attention
from trainer.tasks.kernel_probes import tested


def kernel_chooser(
    attention: Callable[[], Attention], device: torch.device, ranks: ContextRanks | None
) -> Callable[..., str]:
    """Return the function that chooses a mask's kernel; the model is tried now, if ever.

    `ranks` share each sequence, where context parallelism divides it.
    """
    if device.type != "cuda":
        return lambda *_: "mask"
    model = attention()
    divided = ranks is not None and ranks.division.groups > 1
    return lambda pattern, place, dtype: tested(model, pattern, dtype, place, divided)[0]
