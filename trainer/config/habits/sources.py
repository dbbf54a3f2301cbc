"""Data sets of theirs as the sources of ours."""

from __future__ import annotations

from collections.abc import Sequence

from trainer.config.habits.draft import Asked, Draft
from trainer.config.read import Json


def put_sources(draft: Draft, asked: Asked, parts: Sequence[Json], labels: Sequence[str], test: bool = False) -> None:
    """One data set as `trainer.data`, several as its sources; of those to evaluate on, the paths alone."""
    if test:
        whole = {label: part["path"] for label, part in zip(_unlike(labels), parts, strict=True)}
        value = whole if len(whole) > 1 else next(iter(whole.values()))
        draft.put(asked, "trainer.data.evaluation_path", value, "its rows are read as those that are trained on")
    elif len(parts) == 1:
        draft.made.setdefault("trainer", {}).setdefault("data", {}).update(parts[0])
        draft.keep(asked, "trainer.data")
    else:
        named = zip(_unlike(labels), parts, strict=True)
        draft.put(asked, "trainer.data.sources", [{"label": label, **part} for label, part in named])


def _unlike(labels: Sequence[str]) -> list[str]:
    """The last part of each path, with a number where that is not enough."""
    short = [label.rstrip("/").rpartition("/")[2][:80] or "source" for label in labels]
    return [f"{name}-{at}" if short.count(name) > 1 else name for at, name in enumerate(short)]
