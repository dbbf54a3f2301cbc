"""Messages with the batch in which a send or a receive is under way."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch.distributed.pipelining import schedules

from trainer.tools.planner import simulate
from trainer.tools.planner.fakes.messages import Message, Messages

BATCHES = ((dist, "batch_isend_irecv"), (schedules, "_batch_p2p"))
"""Functions that send and receive several at once; schedules wait for all of the second."""


@dataclass(frozen=True)
class InBatch(Message):
    """A message with the number of its batch."""

    batch: int | None = None
    """The same for sends and receives of a rank that are under way together; None if alone."""


class BatchedMessages(Messages):
    """Records, besides what `Messages` does, the batch of each message."""

    def __enter__(self) -> Any:
        self._batches = self._depth = 0
        self._patches = ExitStack()
        for owner, name in BATCHES:
            self._patches.enter_context(
                mock.patch.object(owner, name, self._batched(getattr(owner, name)))
            )
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patches.close()

    def _batched(self, function: Any) -> Any:
        """Wrap a function so that all it sends and receives is one batch."""

        def run(*args: Any, **kwargs: Any) -> Any:
            self._batches += not self._depth
            self._depth += 1
            try:
                return function(*args, **kwargs)
            finally:
                self._depth -= 1

        return run

    def _note(self, name: str, args: Any, output: Any) -> None:
        known = len(self.found)
        super()._note(name, args, output)
        for message in self.found[known:]:
            batch = self._batches if message.peer is not None and self._depth else None
            self.found[known] = InBatch(**vars(message), batch=batch)


@contextmanager
def noting_batches() -> Iterator[None]:
    """Have simulations note batches; each rank is simulated in a fork of this process."""
    with mock.patch.object(simulate, "Messages", BatchedMessages):
        yield
