"""Reads a JSON or YAML config file, and applies `key.path=value` overrides."""

from __future__ import annotations

import math
import os
import re
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from trainer.config.syntax.json_text import DuplicateKey, parse_json, without_comments
from trainer.config.syntax.yaml_text import DIGITS, SHOWN, parse_yaml
from trainer.errors import ConfigError, Problem, show
from trainer.storage import Json, read_file

LARGEST = 1 << 20
"""The most bytes of a config."""
DEEPEST = 40
"""The most levels of nested sections."""
LONGEST_NUMBER = int(DIGITS * math.log2(10))
"""The most bits of a number."""
YAML = (".yaml", ".yml")
"""The endings of files that are YAML."""


def read(path: Path) -> Json:
    """Read the object in a JSON file, which may have comments as DeepSpeed's may, or a YAML file.

    Raises ConfigError if it is not a regular file, not UTF-8, neither JSON nor YAML, not an object,
    too large or nested too deep.
    """
    in_yaml = path.suffix.lower() in YAML
    raw = parse(path, in_yaml, "a DeepSpeed JSON config")
    if not isinstance(raw, dict):
        expected = "keys with values" if in_yaml else "a JSON object {...}"
        raise ConfigError(Problem(str(path), f"saw {show(raw)}", expected))
    if problems := [*unfit(raw, str(path))]:
        raise ConfigError(*problems)
    return raw


def parse(path: Path, in_yaml: bool, wanted: str) -> object:
    """Parse a YAML or JSON file, whose value may have any type.

    `wanted` names what the file should be, for errors. Raises ConfigError as `read` does.
    """
    try:
        text = re.sub("\r\n?", "\n", _bytes(path, wanted).decode().removeprefix("\ufeff"))
        if in_yaml:
            return parse_yaml(text, str(path))
        return parse_json(without_comments(text), str(path))
    except UnicodeDecodeError as error:
        actual = f"byte {error.start} is not UTF-8"
        raise ConfigError(Problem(str(path), actual, "a UTF-8 text file")) from None
    except RecursionError:
        raise ConfigError(_too_deep(str(path))) from None


def _bytes(path: Path, wanted: str) -> bytes:
    place = str(path)
    try:
        return read_file(path, LARGEST)
    except FileNotFoundError:
        actual = "no such file"
        if path.is_symlink():
            actual = f"a link to {os.readlink(path)}, which is not there"
        hints = [_nearby(path), f"Shipped: {', '.join(sorted(_paths()))}"]
        raise ConfigError(Problem(place, actual, wanted, ". ".join(filter(None, hints)))) from None
    except (OSError, ValueError) as error:
        actual = getattr(error, "strerror", "") or str(error)
        raise ConfigError(Problem(place, actual, wanted)) from None


def nodes(tree: object) -> Iterator[tuple[str, object, int]]:
    """Yield (path, value, depth) of a tree itself, and of all values in its sections and lists."""
    waiting: deque[tuple[str, object, int]] = deque([("", tree, 0)])
    while waiting:
        path, value, depth = waiting.popleft()
        yield path, value, depth
        if isinstance(value, dict | list):
            named = value if isinstance(value, dict) else {f"[{n}]": v for n, v in enumerate(value)}
            start = f"{path[:SHOWN]}." if path else ""
            waiting += [
                (f"{start}{str(name)[:SHOWN]}".replace(".[", "["), it, depth + 1)
                for name, it in named.items()
            ]


def unfit(raw: object, place: str) -> Iterator[Problem]:
    """Yield the problems of a tree: too deep, or values that no float, file or terminal takes."""
    for path, value, depth in nodes(raw):
        if depth > DEEPEST and isinstance(value, dict | list):
            yield _too_deep(place)
            return
        if isinstance(value, float) and not math.isfinite(value):
            yield Problem(f"{place}: {path}", f"saw {show(value)}", "a finite number")
        elif isinstance(value, int) and value.bit_length() > LONGEST_NUMBER:
            actual = f"a number of more than {DIGITS:,} digits"
            yield Problem(f"{place}: {path}", f"saw {actual}", "a finite number")
        texts = [value] if isinstance(value, str) else []
        for text in value if isinstance(value, dict) else texts:
            if not isinstance(text, str) or "\0" in text or re.search("[\ud800-\udfff]", text):
                expected = "text without the character 0 and without halves of characters"
                yield Problem(f"{place}: {path}" if path else place, f"saw {show(text)}", expected)


def _too_deep(place: str) -> Problem:
    actual = f"sections nested more than {DEEPEST} deep"
    return Problem(place, actual, "the few levels of a DeepSpeed JSON config")


def override(raw: Json, overrides: Sequence[str]) -> tuple[Json, list[str], list[Problem]]:
    """Return `raw` with each `key.path=value` set; also the paths that were set, and the problems.

    A value is JSON if it parses as such, else a string. Missing sections are created.
    """
    result = deepcopy(raw)
    paths = []
    problems = []
    for text in overrides:
        path, equals, value = text.partition("=")
        names = path.split(".")
        if not equals or not all(names) or len(names) > DEEPEST:
            actual = "saw an override without a key path"
            spaces = text == "=" or "=" in overrides
            hint = "Write it without spaces around the =." if spaces else ""
            problems.append(Problem(text, actual, "key.path=value", hint))
            continue
        section: Any = result
        for depth, name in enumerate(names[:-1], start=1):
            section = section.setdefault(name, {})
            if not isinstance(section, dict):
                actual = f'"{".".join(names[:depth])}" is {show(section)}'
                hint = "Set that key itself instead."
                problems.append(Problem(text, actual, "a section {...}", hint))
                break
        else:
            given, wrong = _value(text, names[-1], value)
            section.update({} if wrong else given)
            paths.append(path)
            problems += wrong
    return result, paths, problems


def leaves(tree: Json, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield (dotted path, value) for every value of a tree that is no section, or an empty one."""
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def at(tree: Json, path: str) -> Any:
    """Return the value at a dotted path; None if there is none."""
    result: object = tree
    for name in filter(None, path.split(".")):
        result = result.get(name) if isinstance(result, dict) else None
    return result


def _value(text: str, name: str, value: str) -> tuple[Json, list[Problem]]:
    """Return the value of the override `text` under its name, and the problems with it."""
    read: object = value
    if len(value) <= LARGEST:
        try:
            read = parse_json(value, text)
        except DuplicateKey as error:
            return {}, [replace(one, place=text) for one in error.problems]
        except (ConfigError, RecursionError):
            pass  # it is text
    given = {name: read}
    return given, list(unfit(given, text))


def _nearby(path: Path) -> str:
    """Return a hint that names the JSON and YAML files beside a path."""
    beside = islice(path.parent.iterdir(), 1000) if path.parent.is_dir() else ()
    names = sorted(path.name for path in beside if path.suffix.lower() in (".json", *YAML))[:6]
    return f"In {path.parent}: {', '.join(names)}" if names else ""


# keys that identify a file -> its kind, and what to do
_KINDS = {
    ("model_type", "architectures"): ("a model's config", "Name it in trainer.model.config."),
    ("tokenizer_class", "added_tokens_decoder"): (
        "a tokenizer's config",
        "trainer.data.tokenizer names its folder.",
    ),
    ("compute_environment", "distributed_type"): (
        "an Accelerate config",
        "Give its deepspeed_config_file.",
    ),
    ("per_device_train_batch_size", "output_dir"): (
        "arguments of Hugging Face's Trainer",
        'Give their "deepspeed".',
    ),
}


def other_config(path: Path, raw: Json, known: Collection[str]) -> ConfigError | None:
    """Return the error for the config of another tool; None if it is not known to be one."""
    if any(key in known for key in raw):
        return None
    for keys, (actual, hint) in _KINDS.items():
        if any(key in raw for key in keys):
            return ConfigError(Problem(str(path), actual, "a DeepSpeed JSON config", hint))
    return None


_PACKAGE = Path(__file__).resolve().parent.parent
_FOLDERS = (_PACKAGE / "ds_configs", _PACKAGE.parent / "ds_configs")
"""The folder of the configs that come with Meshloom, in a wheel, and in a checkout."""


def shipped(name: str) -> Path | None:
    """Return the shipped config called `name`, with or without ".json"; None if there is none."""
    return _paths().get(name.removesuffix(".json"))


def _paths() -> dict[str, Path]:
    # in a checkout the first is a link to the second
    folder = next(filter(Path.is_dir, _FOLDERS), _FOLDERS[0]).resolve()
    return {path.stem: path for path in folder.glob("*.json")}
