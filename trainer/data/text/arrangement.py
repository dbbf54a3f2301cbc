"""The arrangement of documents in samples, where the config leaves it open."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from trainer.config import DataSection
from trainer.data.sources.location import locate
from trainer.data.text.chats.turns import Chat
from trainer.data.text.records import read_documents
from trainer.distributed.ranks import Ranks
from trainer.errors import ConfigError, DataError, Problem


class Arranged(NamedTuple):
    """The value of trainer.data.documents, and its reason if it was decided here."""

    documents: str
    reason: str = ""


def arranged(options: DataSection, refusal: Callable[[], str], ranks: Ranks) -> Arranged:
    """Decide on `trainer.data.documents`: chats are packed, or padded if there is a `refusal`.

    `refusal` returns the reason why the model can't keep packed documents apart; else nothing.
    Everything but chats is concatenated. Collective. Raises ConfigError for a `too_long` that has
    no effect on concatenated documents.
    """
    if options.documents is not None:
        return Arranged(options.documents)
    if options.isolate or not ranks.await_first(lambda: holds_chats(options)):
        if options.too_long != "truncate":
            actual = (
                f'"{options.too_long}", with documents that are concatenated: they are no chats'
            )
            hint = 'Set trainer.data.documents to "pack" or "pad"'
            expected = "documents that are not cut wherever a window ends"
            raise ConfigError(Problem("trainer.data.too_long", actual, expected, hint)).share()
        return Arranged("concatenate")
    if reason := refusal():
        return Arranged("pad", f"the data are chats, and they can't be packed: {reason}")
    return Arranged("pack", "the data are chats, which the model keeps apart in a sample")


def holds_chats(options: DataSection) -> bool:
    """True if the first document of each source is a chat; False for data that can't be read."""
    own = [one.model_dump(exclude={"label", "weight", "epochs"}) for one in options.sources]
    parts = [options.model_copy(update=update) for update in own] or [options]
    try:
        return all(isinstance(next(_documents(part), None), Chat) for part in parts)
    except DataError:  # the preparation reports it
        return False


def _documents(options: DataSection) -> Iterator[object]:
    paths = [options.path] if isinstance(options.path, str) else options.path
    if paths is None or any("://" in path for path in paths):
        return
    documents = read_documents(locate(options.path, options.format), options)
    yield from (one for one in documents if one is not None and not isinstance(one, DataError))
