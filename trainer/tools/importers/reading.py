"""Reads another trainer's YAML or JSON, and arguments of a command line. Raises ConfigError."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from trainer.config.read import nodes, parse, unfit
from trainer.errors import ConfigError, Problem, show
from trainer.storage import Json

_ARGUMENT = re.compile(r"--[A-Za-z_]")
_VARIABLE = re.compile(r"\$[A-Za-z_{(]")
_SCRIPTS = (".sh", ".bash", ".zsh", ".slurm", ".sbatch", ".py", ".txt", ".bat", ".ps1")
_ADVICE = (
    "Give the arguments themselves after --: meshloom import -- --model_name_or_path NAME "
    "--learning_rate 1e-5"
)
_WORDS = {"true": True, "yes": True, "false": False, "no": False}


def read_file(path: Path) -> Json:
    """Read a YAML or JSON file: text keys, and values as in JSON. Raises ConfigError for others."""
    if path.suffix in _SCRIPTS:
        actual = "a script or a text file"
        raise ConfigError(Problem(str(path), actual, "a YAML or JSON file", _ADVICE))
    content = parse(path, path.suffix.lower() != ".json", "a YAML or JSON file")
    if not isinstance(content, dict):
        advice = _ADVICE if isinstance(content, str) and _ARGUMENT.search(content) else ""
        raise ConfigError(Problem(str(path), f"saw {show(content)}", "keys with values", advice))
    return dict(checked(content, str(path)))


def read_flags(words: Sequence[str]) -> Json:
    """Parse `--key value`, `--key=value`, `--key` (true), `--no_key` (false), lists of values.

    Raises ConfigError if `words` begin with anything else, or give a key two values.
    """
    if not words or not _ARGUMENT.match(words[0]):
        actual = f"saw {show(words[0])} first" if words else "saw nothing"
        expected = "--key value: the arguments without the command before them"
        raise ConfigError(Problem("--", actual, expected))
    flags: Json = {}
    for key, value in _pairs(words):
        if key in flags and (flags[key] != value or type(flags[key]) is not type(value)):
            actual = f"saw {show(flags[key])} and {show(value)}"
            raise ConfigError(Problem(f"--{key}", actual, "one value"))
        flags[key] = value
    checked(flags, "--")
    return flags


def checked(given: object, place: str) -> Any:
    """Return `given` if it is a tree of what JSON holds, without shell variables.

    Raises ConfigError, with a problem for each value, if it is not.
    """
    if problems := [*unfit(given, place)] or [*_strange(given, place)]:
        raise ConfigError(*problems)
    return given


def beside(folder: Path, name: str) -> Path | None:
    """Return the path of the file or folder `name`; None if there is none.

    It is relative to `folder`, to the working directory, or to one of the four folders above
    `folder`: a config deep in a repository may name files from the repository's root.
    """
    try:
        path = Path(name).expanduser()
        above = (parent / path for parent in folder.resolve().parents[:4])
        return next((place for place in (folder / path, path, *above) if place.exists()), None)
    except (OSError, RuntimeError, ValueError):
        return None


def _strange(given: object, place: str) -> Iterator[Problem]:
    """Yield a problem for each unprintable key, shell variable and number beyond 64 bits."""
    for path, value, _ in nodes(given):
        where = path or place
        for name in value if isinstance(value, dict) else ():
            if not name.isprintable():
                yield Problem(where, f"saw the key {show(name)}", "keys of printable text")
        if isinstance(value, str) and _VARIABLE.search(value) and "{%" not in value:
            expected = "its value: what a shell puts in is not known here"
            yield Problem(where, f"saw {show(value)}", expected)
        if isinstance(value, int) and abs(value) >= 2**63:
            yield Problem(where, "saw a number beyond 64 bits", "a smaller one")


def _pairs(words: Sequence[str]) -> Iterator[tuple[str, object]]:
    """Yield (key, value) in the order of the command line."""
    starts = [at for at, word in enumerate(words) if _ARGUMENT.match(word)]
    for start, stop in zip(starts, [*starts[1:], len(words)], strict=True):
        name, equals, first = words[start][2:].partition("=")
        given = [*([first] if equals else []), *words[start + 1 : stop]]
        values = [_WORDS.get(word.lower(), word) for word in given]
        key = name.replace("-", "_")
        if not values and key.startswith("no_") and key != "no_cuda":
            yield key.removeprefix("no_"), False
        elif not values:
            yield key, True
        else:
            yield key, values[0] if len(values) == 1 else values
