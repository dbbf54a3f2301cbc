"""Prepared data: what a run trains on and is evaluated on, and how it is described."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from trainer.data.cache import Check
from trainer.data.mixture import Source
from trainer.data.stream import Stream
from trainer.data.text.token_files import Counts, PreparedSource, Summary
from trainer.storage import Json


class Share(NamedTuple):
    """A source, and the number of its samples in an epoch."""

    label: str
    source: PreparedSource
    samples: int

    def describe(self, whole: int) -> str:
        times = self.samples / len(self.source)
        share = f"{self.samples / whole:.1%} of it, each {times:.2f} times"
        content = self.source.summary.describe()
        return f"{self.label}: {self.samples:,} samples an epoch ({share}), from {content}"

    def description(self) -> Json:
        """Return the numbers of the samples, which a checkpoint keeps."""
        left_out = {"kind", "first_dropped", "empty", "corrupt", "first_corrupt", "unrendered"}
        newer = {"chats", "too_long", "fill"}  # earlier checkpoints lack them
        return {
            name: value
            for name, value in self.source.summary.flat().items()
            if name not in left_out and (value or name not in newer)
        }


@dataclass(frozen=True)
class Data:
    """The data that a run trains on and is evaluated on."""

    train: Source
    evaluations: Mapping[str, PreparedSource]
    """Held-out data by name, which shares no document with `train`; may be empty."""
    shares: tuple[Share, ...]
    """The parts of `train`; a single one is all of it."""
    fingerprint: str
    """A digest of the training samples, the same wherever the same data was prepared."""
    check: Check
    """The comparison of what this process has opened with what was written."""

    @property
    def summary(self) -> Summary:
        """The summary of the only source."""
        [share] = self.shares
        return share.source.summary

    @property
    def has_chats(self) -> bool:
        return any(share.source.summary.origin.chats for share in self.shares)

    def unrendered(self) -> tuple[str, ...]:
        """Say, if there is any, what chats hold that their template does not render."""
        counts = Counts()
        for part in (*(share.source for share in self.shares), *self.evaluations.values()):
            counts.note(part.summary.counts.unrendered)
        held_out = [
            f"{key} ({count:,} {'chats' if key == 'tools' else 'messages'})"
            for key, count in counts.unrendered.items()
        ]
        start = "the chat template does not render all that the chats hold: left out are"
        return (f"{start} {', '.join(held_out)}",) if held_out else ()

    def describe(self) -> str:
        """Describe the data for the user, on one line."""
        if isinstance(self.train, Stream):
            first = f"the first has {self.summary.describe()}"
            return f"{self.train.files:,} files, each prepared when it is needed; {first}"
        if len(self.shares) == 1:
            return self.summary.describe()
        origin = f"from {sum(len(share.source) for share in self.shares):,} that they have"
        return f"{len(self.shares)} sources, {len(self.train):,} samples an epoch, {origin}"

    def lines(self) -> list[str]:
        """Describe each source of a mixture, a line each; empty for a single source."""
        shares = self.shares if len(self.shares) > 1 else ()
        return [share.describe(len(self.train)) for share in shares]

    def description(self) -> Json:
        """Return the data's numbers, which a checkpoint keeps beside the fingerprint.

        Of a stream: the first file's, and the digest of all files' names and sizes.
        """
        if len(self.shares) == 1:
            return self.shares[0].description() | {"fingerprint": self.fingerprint}
        return {
            share.label: {**share.description(), "samples_an_epoch": share.samples}
            for share in self.shares
        }

    @property
    def largest_token_id(self) -> int:
        """The largest token id in any part, to be compared with the model's embedding."""
        parts = [*(share.source for share in self.shares), *self.evaluations.values()]
        return max(part.summary.largest_token_id for part in parts)
