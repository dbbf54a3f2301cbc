"""Reads another trainer's YAML or JSON, and arguments of a command line. Raises ConfigError."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from math import isfinite
from pathlib import Path
from typing import Any

from trainer.config.grammar import show
from trainer.config.read import DEEPEST, LARGEST, Json, parse_yaml, read
from trainer.errors import ConfigError, Problem, first_line

_ARGUMENT = re.compile(r"--[A-Za-z_]")
_VARIABLE = re.compile(r"\$[A-Za-z_{(]")
_SCRIPTS = (".sh", ".bash", ".zsh", ".slurm", ".sbatch", ".py", ".txt", ".bat", ".ps1")
_ADVICE = (
    "Give the arguments themselves after --: meshloom import -- --model_name_or_path NAME "
    "--learning_rate 1e-5"
)
_WORDS = {"true": True, "yes": True, "false": False, "no": False}


def read_file(path: Path) -> Json:
    """Read the keys of a YAML or JSON file: text keys, and values as in JSON."""
    if path.suffix in _SCRIPTS:
        raise ConfigError(Problem(str(path), "a script or a text", "a YAML or JSON file", _ADVICE))
    found = checked(read(path) if path.suffix.lower() == ".json" else _yaml(path), str(path))
    if not isinstance(found, dict):
        advice = _ADVICE if isinstance(found, str) and _ARGUMENT.search(found) else ""
        raise ConfigError(Problem(str(path), f"saw {show(found)}", "keys with values", advice))
    return dict(found)


def read_flags(words: Sequence[str]) -> Json:
    """Parse `--key value`, `--key=value`, `--key` (true), `--no_key` (false), lists of values."""
    if not words or not _ARGUMENT.match(words[0]):
        seen = f"saw {show(words[0])} first" if words else "saw nothing"
        expected = "--key value: the arguments without the command before them"
        raise ConfigError(Problem("--", seen, expected))
    flags: Json = {}
    for key, value in _pairs(words):
        if key in flags:
            seen = f"saw {show(flags[key])} and {show(value)}"
            raise ConfigError(Problem(f"--{key}", seen, "one value"))
        flags[key] = value
    checked(flags, "--")
    return flags


def checked(given: Any, place: str) -> Any:
    """Return `given` if it is a tree of what JSON holds, without shell variables."""
    if (problem := next(_strange(given, place), None)) is not None:
        raise ConfigError(problem)
    return given


def beside(folder: Path, name: str) -> Path | None:
    """Find a file or folder, relative to `folder`, else to the working directory, or None."""
    try:
        path = Path(name).expanduser()
        return next((found for found in (folder / path, path) if found.exists()), None)
    except (OSError, RuntimeError, ValueError):
        return None


def _strange(given: Any, place: str) -> Iterator[Problem]:
    """Yield what is wrong with each value of a tree."""
    waiting: list[tuple[str, Any, int]] = [("", given, 0)]
    while waiting:
        key, value, depth = waiting.pop()
        where = key or place
        if depth > DEEPEST:
            seen = f"sections nested more than {DEEPEST} deep"
            yield Problem(place, seen, "the few levels of a config")
        elif isinstance(value, dict):
            odd = [name for name in value if not (isinstance(name, str) and name.isprintable())]
            if odd:
                expected = "keys of printable text, a number in quotes"
                yield Problem(where, f"saw the key {show(odd[0])}", expected)
            inner = ((f"{key}.{name}".lstrip("."), below) for name, below in value.items())
            waiting += [(name, below, depth + 1) for name, below in inner]
        elif isinstance(value, list):
            waiting += [(f"{key}[{at}]", below, depth + 1) for at, below in enumerate(value)]
        elif expected := _expected(value):
            yield Problem(where, f"saw {_shown(value)}", expected)


def _expected(value: Any) -> str:
    """Return what is expected in place of a value; empty if it is good."""
    if isinstance(value, str):
        if _VARIABLE.search(value) and "{%" not in value:
            return "its value: what a shell puts in is not known here"
        if re.search("[\0\ud800-\udfff]", value):
            return "text without the character 0 and halves of characters"
        return ""
    if isinstance(value, int) and abs(value) >= 2**63:
        return "a smaller one"
    if value is None or isinstance(value, int) or (isinstance(value, float) and isfinite(value)):
        return ""
    return "text, a finite number, true, false or null"


def _shown(value: Any) -> str:
    text = "a number beyond 64 bits" if isinstance(value, int) else str(value)[:60]
    return show(value) if isinstance(value, str) else text


def _yaml(path: Path) -> Any:
    try:
        return parse_yaml(_text(path), str(path))
    except RecursionError:
        seen, expected = "sections nested too deep", "the few levels of a config"
        raise ConfigError(Problem(str(path), seen, expected)) from None


def _text(path: Path) -> str:
    try:
        if not path.is_file():
            seen = "a folder" if path.is_dir() else "no such file"
            raise ConfigError(Problem(str(path), seen, "a YAML or JSON file"))
        with path.open("rb") as file:
            content = file.read(LARGEST + 1)
        if len(content) > LARGEST:
            raise ConfigError(Problem(str(path), f"more than {LARGEST >> 20} MB", "a config"))
        return content.decode("utf-8-sig")
    except (OSError, ValueError) as error:
        expected = "a text file that can be read"
        raise ConfigError(Problem(str(path), first_line(error), expected)) from None


def _pairs(words: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield (key, value) in the order of the command line."""
    starts = [at for at, word in enumerate(words) if _ARGUMENT.match(word)]
    for start, stop in zip(starts, [*starts[1:], len(words)], strict=True):
        name, equals, first = words[start][2:].partition("=")
        given = [*([first] if equals else []), *words[start + 1 : stop]]
        values = [_WORDS.get(word.lower(), word) for word in given]
        key = name.replace("-", "_")
        if not values and key.startswith("no_") and key != "no_cuda":
            yield key.removeprefix("no_"), False
        else:
            yield key, True if not values else values[0] if len(values) == 1 else values
