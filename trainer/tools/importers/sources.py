"""Foreign data sets as sources of this trainer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainer.config.grammar import show
from trainer.config.read import Json
from trainer.tools.importers.draft import Draft, Entry


def put_sources(
    draft: Draft, entry: Entry, parts: Sequence[Json], labels: Sequence[str], test: bool = False
) -> None:
    """Set one data set as `trainer.data`, several as its sources; of evaluation sets, the paths
    only.
    """
    if test:
        whole = {label: part["path"] for label, part in zip(_unlike(labels), parts, strict=True)}
        value = whole if len(whole) > 1 else next(iter(whole.values()))
        draft.put(
            entry,
            "trainer.data.evaluation_path",
            value,
            "its rows are read as those that are trained on",
        )
        data = draft.made["trainer"]["data"]
        for label, part in zip(labels, parts, strict=True):
            odd = {
                key: value
                for key, value in part.items()
                if key != "path" and _read(data, key, part) != value
            }
            if odd:
                draft.lose(
                    entry, f"{label} has {show(odd)}, which the rows that are trained on have not"
                )
    elif len(parts) == 1:
        draft.made.setdefault("trainer", {}).setdefault("data", {}).update(parts[0])
        draft.keep(entry, "trainer.data")
    else:
        named = zip(_unlike(labels), parts, strict=True)
        draft.put(
            entry, "trainer.data.sources", [{"label": label, **part} for label, part in named]
        )


def put_share(draft: Draft, held: Entry) -> None:
    """Set the share of the rows that is held out, unless there are data sets to evaluate on."""
    if held.value > 1:
        draft.lose(held, "a share is held out, not a number of rows")
    elif not draft.has("trainer.data.evaluation_path"):
        draft.put(held, "trainer.data.evaluation_fraction", held.value)
    elif not held.value:
        draft.skip(held)


def _read(data: Json, key: str, part: Json) -> Any:
    """Return the value with which evaluation rows are read; for several sources, the rows
    themselves decide.
    """
    if "sources" in data and key in ("records", "chat_column"):
        return part[key]
    return data.get(key, {"split": "train", "text_column": "text"}.get(key))


def _unlike(labels: Sequence[str]) -> list[str]:
    """Shorten each path to its last part, numbered where that is not unique."""
    short = [label.rstrip("/").rpartition("/")[2][:80] or "source" for label in labels]
    return [f"{name}-{at}" if short.count(name) > 1 else name for at, name in enumerate(short)]
