"""Reads a JSON config file and applies `key.path=value` overrides. Knows JSON, not DeepSpeed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from trainer.config.grammar import show
from trainer.errors import ConfigError, Problem

Json = dict[str, Any]


def read(path: Path) -> Json:
    """The object in a JSON file. Raises ConfigError for a file that is missing, a folder, no UTF-8, or bad JSON."""
    place = str(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(Problem(place, "no such file", "a DeepSpeed JSON config", _nearby(path))) from None
    except IsADirectoryError:
        raise ConfigError(Problem(place, "a folder", "a DeepSpeed JSON config", _nearby(path / "x"))) from None
    except UnicodeDecodeError as error:
        raise ConfigError(Problem(place, f"byte {error.start} is not UTF-8", "a UTF-8 text file")) from None
    except OSError as error:
        raise ConfigError(Problem(place, str(error.strerror), "a file that can be read")) from None
    twice: list[str] = []
    try:
        raw = json.loads(text, object_pairs_hook=lambda pairs: _unique(pairs, twice), parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        at = f"{place}:{error.lineno}:{error.colno}"
        raise ConfigError(Problem(at, error.msg, "JSON", "Comments and trailing commas are not JSON.")) from None
    except ValueError as error:
        raise ConfigError(Problem(place, f"saw {error}", "a finite number")) from None
    if twice:
        raise ConfigError(*(Problem(place, f'saw the key "{key}" twice in one section', "once") for key in twice))
    if not isinstance(raw, dict):
        raise ConfigError(Problem(place, f"saw {show(raw)}", "a JSON object {...}"))
    return raw


def override(raw: Json, overrides: Sequence[str]) -> tuple[Json, list[str], list[Problem]]:
    """`raw` with each `key.path=value` set; also the paths that were set, and the problems.

    A value is JSON where it parses as such, else a string. Missing sections are made on the way.
    """
    result, paths, problems = deepcopy(raw), [], []
    for text in overrides:
        path, equals, value = text.partition("=")
        names = path.split(".")
        if not equals or not all(names):
            problems.append(Problem(text, "saw an override without a key path", "key.path=value"))
            continue
        section: Any = result
        for depth, name in enumerate(names[:-1], start=1):
            section = section.setdefault(name, {})
            if not isinstance(section, dict):
                seen = f'"{".".join(names[:depth])}" is {show(section)}'
                problems.append(Problem(text, seen, "a section {...}", "Set that key itself instead."))
                break
        else:
            section[names[-1]] = _value(value)
            paths.append(path)
    return result, paths, problems


def leaves(tree: Json, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every (dotted path, value) of a tree that is not a section."""
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _value(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_no_constant)
    except ValueError:
        return text


def _unique(pairs: list[tuple[str, Any]], twice: list[str]) -> Json:
    keys = [key for key, _ in pairs]
    twice.extend(sorted({key for key in keys if keys.count(key) > 1}))
    return dict(pairs)


def _no_constant(name: str) -> None:
    raise ValueError(name)


def _nearby(path: Path) -> str:
    """A mend that names the JSON files beside a path."""
    names = sorted(found.name for found in path.parent.glob("*.json"))[:6] if path.parent.is_dir() else []
    return f"In {path.parent}: {', '.join(names)}" if names else ""
