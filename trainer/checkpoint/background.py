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
        """The copies of this rank's parts, by a state tensor's name and key and the part's number.
        """
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._reserved: Future[None] | None = None
        self._saving: Future[None] | None = None

    def reserve(self, entries: Callable[[], Sequence[StateTensor]]) -> None:
        """Have the thread allocate the copies of `entries()`, at the first call alone.

        To pin a GB takes half a second on one H200, and a first save would wait for all of it. It
        waits for what is left, and raises the error if there is too little memory.
        """
        if self._reserved is not None:
            return
        likes = {
            (entry.name, entry.key, number): (part.value.to("meta"), part.value.is_cuda)
            for entry in entries()
            for number, part in enumerate(entry.parts())
        }

        def allocate() -> None:
            for key, (like, pinned) in likes.items():
                self._copies[key] = _on_host(like, pinned)

        self._reserved = self._thread.submit(allocate)

    def save(self, entries: Sequence[StateTensor], write: Write) -> None:
        """Copy the present values of `entries`, and have a thread `write` the copy. Collective.

        Waits for the previous save, and raises its error.
        """
        self.wait()
        frozen = self._ranks.on_own(lambda: self._frozen(entries))
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

    def _frozen(self, entries: Sequence[StateTensor]) -> list[StateTensor]:
        """Return the state tensors with copies of this rank's parts, maybe still in progress."""
        if self._reserved is not None:
            self._reserved.result()
        return [self._duplicate(entry) for entry in entries]

    def _duplicate(self, entry: StateTensor) -> StateTensor:
        copies = []
        for number, part in enumerate(entry.parts()):
            key = (entry.name, entry.key, number)
            if key not in self._copies:
                self._copies[key] = _on_host(part.value, part.value.is_cuda)
            copy = self._copies[key].copy_(part.value, non_blocking=True)
            copies.append(replace(part, value=copy))
        return replace(entry, parts=lambda: copies)


def _on_host(like: torch.Tensor, pinned: bool) -> torch.Tensor:
    import torch

    return torch.empty_like(like, device="cpu", pin_memory=pinned)
