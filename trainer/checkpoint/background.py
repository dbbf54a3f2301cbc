"""Saving in the background: the loop waits until the state is copied; a thread writes the copy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

from trainer.distributed.ranks import Ranks
from trainer.state import StateTensor

if TYPE_CHECKING:
    import torch

Write = Callable[[Sequence[StateTensor], Ranks], None]
"""Saves state tensors, agreeing with the given ranks. Collective."""


class Background:
    """Saves in a thread, one at a time, from a copy of the state in host memory, which is reused.

    `ranks` have a process group of their own, since the thread uses it. Leaving the context waits
    for the save. It raises the save's error, unless the context ends with another one.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._copies: dict[tuple[str, str, int], torch.Tensor] = {}
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._saving: Future[None] | None = None

    def save(self, entries: Sequence[StateTensor], write: Write) -> None:
        """Copy the present values of `entries`, and have a thread `write` the copy. Collective.

        Waits for the previous save, and raises its error.
        """
        self.wait()
        frozen = self._ranks.on_own(lambda: [self._frozen(entry) for entry in entries])
        if any(tensor.is_pinned() for tensor in self._copies.values()):
            import torch

            torch.cuda.current_stream().synchronize()
        self._saving = self._thread.submit(write, frozen, self._ranks)

    def wait(self) -> None:
        """Wait for the save in progress, if there is one. Raises its error on every rank."""
        saving = self._saving
        self._saving = None
        if saving is not None:
            saving.result()

    def __enter__(self) -> Background:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._thread.shutdown()  # waits for the save
        if kind is None:
            self.wait()

    def _frozen(self, entry: StateTensor) -> StateTensor:
        """Return the state tensor with copies of this rank's parts, maybe still in progress."""
        import torch

        frozen = []
        for number, part in enumerate(entry.parts()):
            key = (entry.name, entry.key, number)
            like = part.value
            if key not in self._copies:
                self._copies[key] = torch.empty_like(like, device="cpu", pin_memory=like.is_cuda)
            frozen.append(replace(part, value=self._copies[key].copy_(like, non_blocking=True)))
        return replace(entry, parts=lambda: frozen)
