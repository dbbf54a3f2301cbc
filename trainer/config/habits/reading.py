"""Files of other trainers: YAML, JSON, and the shell lines that start them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from trainer.config.grammar import show
from trainer.config.read import LARGEST, Json, read
from trainer.errors import ConfigError, Problem, first_line

_ARGUMENT = re.compile(r"--[A-Za-z_]")
_VARIABLE = re.compile(r"(?:export )?(\w+)=[\"']?([^\"'`$]*)[\"']?")
_ENDS = frozenset({"&&", "||", ";", "|", ">", ">>", "2>&1", "&", "2>"})
"""What ends the arguments of a command in a shell."""


def read_arguments(path: Path) -> Json:
    """The keys of a YAML or JSON file, or of the `--key value` pairs in it. Raises ConfigError."""
    if path.suffix == ".json":
        return read(path)
    text = _text(path)
    bare = re.sub(r"(?m)(^|\s)#.*$", "", text)
    if any(_ARGUMENT.match(word) for word in bare.split()):
        return _shell(path, bare)
    try:
        found = yaml.load(text, _Unique)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{path}:{mark.line + 1}" if mark else str(path)
        raise ConfigError(Problem(place, getattr(error, "problem", "") or first_line(error), "YAML")) from None
    if not isinstance(found, dict):
        raise ConfigError(Problem(str(path), f"saw {show(found)}", "keys with values, or --key value"))
    return {str(key): value for key, value in found.items()}


def beside(folder: Path, name: str) -> Path | None:
    """The file or folder of that name, seen from `folder`, or else from here; None if there is none."""
    path = Path(name).expanduser()
    return next((found for found in (folder / path, path) if found.exists()), None)


def _text(path: Path) -> str:
    try:
        if not path.is_file():
            seen = "a folder" if path.is_dir() else "no such file"
            raise ConfigError(Problem(str(path), seen, "a YAML or JSON file, or one with --key value"))
        found = path.read_bytes()[: LARGEST + 1]
        if len(found) > LARGEST:
            raise ConfigError(Problem(str(path), f"more than {LARGEST >> 20} MB", "a config"))
        return found.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(Problem(str(path), first_line(error), "a text file that can be read")) from None


class _Unique(yaml.SafeLoader):  # type: ignore[misc]
    """Says so where a mapping has a key twice; YAML's own loader takes the last."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen and isinstance(key.value, str):
                raise yaml.constructor.ConstructorError(None, None, f"the key {key.value} twice", key.start_mark)
            seen.add(str(key.value))
        found: dict[Any, Any] = super().construct_mapping(node, deep)
        return found


def _shell(path: Path, text: str) -> Json:
    """The arguments after the script's name, or all if there is none; `NAME=value` lines are put in for `$NAME`."""
    lines = [line.strip() for line in re.sub(r"\\\r?\n", " ", text).splitlines()]
    variables = {found[1]: found[2] for line in lines if (found := _VARIABLE.fullmatch(line))}
    commands = [line for line in lines if any(_ARGUMENT.match(word) for word in line.split())]
    if len(commands) > 1 and not all(line.startswith("-") for line in commands[1:]):
        raise ConfigError(Problem(str(path), f"{len(commands)} commands", "one", "Keep that of the training alone."))
    whole = re.sub(r"\$\{?(\w+)\}?", lambda match: variables.get(match[1], match[0]), " ".join(commands))
    try:
        words = shlex.split(whole)
    except ValueError as error:
        raise ConfigError(Problem(str(path), str(error).lower(), "a line as a shell takes it")) from None
    ends = [at for at, word in enumerate(words) if word in _ENDS]
    words = words[: ends[0]] if ends else words
    scripts = [at for at, word in enumerate(words) if word.endswith(".py") or (at and words[at - 1] == "-m")]
    return dict(_pairs(words[scripts[0] + 1 :] if scripts else words))


def _pairs(words: list[str]) -> Iterator[tuple[str, Any]]:
    """(key, value): true for a key alone, a list for several values."""
    starts = [at for at, word in enumerate(words) if _ARGUMENT.match(word)]
    for start, stop in zip(starts, [*starts[1:], len(words)], strict=True):
        name, equals, first = words[start][2:].partition("=")
        values = [_value(word) for word in ([first] if equals else []) + words[start + 1 : stop]]
        yield name.replace("-", "_"), True if not values else values[0] if len(values) == 1 else values


def _value(word: str) -> Any:
    try:
        return yaml.safe_load(word)
    except yaml.YAMLError:
        return word
