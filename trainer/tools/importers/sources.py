"""Foreign data sets as sources of this trainer."""

from __future__ import annotations

from collections.abc import Sequence

from trainer.config.read import Json
from trainer.tools.importers.draft import Draft, Entry

_USUAL = {"split": "train", "text_column": "text"}


def put_sources(
    draft: Draft, entry: Entry, parts: Sequence[Json], labels: Sequence[str], test: bool = False
) -> None:
    """Set one data set as `trainer.data`, several as its sources; evaluation sets by path alone."""
    named = dict(zip(_unlike(labels), parts, strict=True))
    if test:
        paths = {label: part["path"] for label, part in named.items()}
        value = paths if len(paths) > 1 else parts[0]["path"]
        draft.put(entry, "trainer.data.evaluation_path", value)
        if any(_reads_otherwise(draft.get("trainer.data"), part) for part in parts):
            draft.lose(entry, "its rows are read as those that are trained on")
    elif len(parts) == 1:
        draft.made.setdefault("trainer", {}).setdefault("data", {}).update(parts[0])
        draft.keep(entry, "trainer.data")
    else:
        sources = [{"label": label, **part} for label, part in named.items()]
        draft.put(entry, "trainer.data.sources", sources)


def put_share(draft: Draft, held: Entry) -> None:
    """Set the share of the rows that is held out, unless there are data sets to evaluate on."""
    if held.value > 1:
        draft.lose(held, "a share is held out, not a number of rows")
    elif not draft.get("trainer.data.evaluation_path"):
        draft.put(held, "trainer.data.evaluation_fraction", held.value)
    elif not held.value:
        draft.skip(held)


def _reads_otherwise(data: Json, part: Json) -> bool:
    """Return True if the rows of an evaluation set need other options than those trained on."""
    # with several sources, the rows themselves decide what they hold
    decided = {"path", "records", "chat_column"} if "sources" in data else {"path"}
    options = {key: value for key, value in part.items() if key not in decided}
    return any(data.get(key, _USUAL.get(key)) != value for key, value in options.items())


def _unlike(labels: Sequence[str]) -> list[str]:
    """Shorten each path to its last part, numbered where that is not unique."""
    short = [label.rstrip("/").rpartition("/")[2][:80] or "source" for label in labels]
    return [f"{name}-{at}" if short.count(name) > 1 else name for at, name in enumerate(short)]
