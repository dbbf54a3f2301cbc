"""The conversion of the data sets in other trainers' configs to `trainer.data`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trainer.errors import ConfigError, Problem, show
from trainer.storage import Json
from trainer.tools.importers.draft import Draft, Entry, Roles, names, number

_USUAL = {"split": "train", "text_column": "text"}
_NAMES = {"path": "id", "name": "config"}
"""TRL's names -> the alignment handbook's."""
_UNNAMED = "a split of a Hub data set can't be named for evaluation here: set trainer.data."


def put_sources(
    draft: Draft, entry: Entry, parts: Sequence[Json], labels: Sequence[str], test: bool = False
) -> None:
    """Set one data set as `trainer.data`, several as its sources.

    `labels`: their names or paths, one for each of the `parts`. `test`: they are evaluation sets,
    of which only the paths are set.
    """
    named = dict(zip(_unlike(labels), parts, strict=True))
    if test:
        paths = {label: part["path"] for label, part in named.items()}
        value = paths if len(paths) > 1 else parts[0]["path"]
        draft.put(entry, "trainer.data.evaluation_path", value)
        if any(_reads_otherwise(draft.get("trainer.data"), part) for part in parts):
            draft.lose(entry, "here its rows are read in the way of those that are trained on")
    elif len(parts) == 1:
        draft.made.setdefault("trainer", {}).setdefault("data", {}).update(parts[0])
        draft.keep(entry, "trainer.data")
    else:
        sources = [{"label": label, **part} for label, part in named.items()]
        draft.put(entry, "trainer.data.sources", sources)


def put_share(draft: Draft, held_out: Entry) -> None:
    """Set the share of the rows that is held out, unless there are data sets to evaluate on.

    A number of rows can't be converted, as the rows are not counted: the default share stays.
    """
    if held_out.value > 1:
        text = (
            "a number of rows is held out there, here the share evaluation_fraction (default 0.01)"
        )
        draft.note(held_out, text)
    elif not draft.get("trainer.data.evaluation_path"):
        draft.put(held_out, "trainer.data.evaluation_fraction", held_out.value)
    elif not held_out.value:
        draft.skip(held_out)


def has_rows_to_evaluate(draft: Draft) -> bool:
    data = draft.get("trainer.data") or {}
    return bool(data.get("evaluation_path") or data.get("evaluation_fraction", 0.01))


def put_mixture(draft: Draft, keys: Roles) -> None:
    """Convert a mixture: TRL's list, or the alignment handbook's newer or older section.

    Each data set is one source, read whole. There, a weight is a share of its rows, drawn once. It
    has no counterpart here, and the key is lost unless it is 1. Raises ConfigError for values that
    are no mixture.
    """
    forms = [keys[name] for name in ("datasets", "dataset_mixture", "dataset_mixer")]
    entry = next((form for form in forms if form.is_set), None)
    if entry is None:
        return
    if entry is forms[2]:
        sets = _paired(draft, keys)
    else:
        held_out = keys["test_split_size"]
        listed = entry.value
        if entry is forms[1]:
            held_out, listed = _sections_of(entry)
        sets = _listed(entry, listed)
        draft.skip(*(keys[name] for name in ("dataset_splits", "dataset_configs")))
        _put_held_out(draft, held_out if held_out.key else Entry(entry.key, 0))
    parts = [_part(draft, entry, one) for one in sets]
    if parts:
        put_sources(draft, entry, parts, [part["path"] for part in parts])


def _sections_of(entry: Entry) -> tuple[Entry, object]:
    """Return the held-out share in a section of the alignment handbook, and its data sets."""
    given = entry.value if isinstance(entry.value, Mapping) else {}
    return Entry(entry.key, given.get("test_split_size") or 0), given.get("datasets")


def _listed(entry: Entry, given: object) -> list[Json]:
    """Return data sets with the alignment handbook's keys, for which TRL has path and name."""
    listed = given if isinstance(given, list) else []
    sets = [one if isinstance(one, dict) else {} for one in listed]
    renamed = [{str(_NAMES.get(key, key)): value for key, value in one.items()} for one in sets]
    if not renamed or not all("id" in one for one in renamed):
        raise entry.refused("a list of data sets, each with its name")
    return renamed


def _put_held_out(draft: Draft, held_out: Entry) -> None:
    if type(held_out.value) not in (int, float) or held_out.value < 0:
        raise held_out.refused("a share below 1, or a number of rows", " to hold out")
    put_share(draft, held_out)


def _paired(draft: Draft, keys: Roles) -> list[Json]:
    """Return the data sets of the older form: names with shares, and lists of splits and subsets.

    Each training split of each data set is one. Splits for evaluation are noted.
    """
    entry, splits, configs = (
        keys[name] for name in ("dataset_mixer", "dataset_splits", "dataset_configs")
    )
    if not isinstance(entry.value, Mapping):
        raise entry.refused("a section of names with shares")
    parts = names(splits.value) if splits.is_set else ["train", "test"]
    subsets = names(configs.value) if configs.is_set else [None] * len(entry.value)
    if len(subsets) != len(entry.value):
        actual = f"{len(subsets)} for {len(entry.value)} data sets"
        raise ConfigError(Problem(configs.key, actual, "one for each"))
    draft.put(Entry(entry.key, 0.0), "trainer.data.evaluation_fraction", 0.0)
    draft.skip(configs)
    trained = [part for part in parts if "train" in part]
    if len(trained) < len(parts):
        draft.note(splits if splits.key else entry, f"{_UNNAMED}evaluation_path")
    draft.skip(splits)
    return [
        {"id": name, "weight": share, "split": part, "config": subset}
        for part in trained
        for (name, share), subset in zip(entry.value.items(), subsets, strict=True)
    ]


def _part(draft: Draft, entry: Entry, one: Json) -> Json:
    """Convert one data set. The column `messages` means chats; other columns are lost."""
    columns = one.get("columns") or []
    part = {"path": str(one["id"]), "split": str(one.get("split") or "train")}
    if one.get("config"):
        part["name"] = str(one["config"])
    if columns == ["messages"]:
        part["records"] = "chat"
    elif columns:
        draft.lose(entry, f"the columns {', '.join(map(str, columns))}: only messages is read")
    if number(one.get("weight", 1)) not in (None, 1):
        reason = (
            f"a share of {show(one['weight'])} of the rows of {part['path']}: here all are read"
        )
        draft.lose(entry, reason)
    if extra := one.keys() - {"id", "config", "split", "columns", "weight"}:
        names_of = ", ".join(sorted(map(str, extra)))
        draft.lose(entry, f"a data set has keys that are not known: {names_of}")
    return part


def _reads_otherwise(data: Json, part: Json) -> bool:
    """Return True if the rows of an evaluation set need other options than the training rows."""
    # with several sources, the rows themselves decide what they hold
    decided = {"path", "records", "chat_column"} if "sources" in data else {"path"}
    options = {key: value for key, value in part.items() if key not in decided}
    return any(data.get(key, _USUAL.get(key)) != value for key, value in options.items())


def _unlike(labels: Sequence[str]) -> list[str]:
    """Shorten each path to its last part, numbered where that is not unique."""
    short = [label.rstrip("/").rpartition("/")[2][:80] or "source" for label in labels]
    return [f"{name}-{at}" if short.count(name) > 1 else name for at, name in enumerate(short)]
