"""Reads a JSON or YAML config file, and applies `key.path=value` overrides."""

from __future__ import annotations

import json
import math
import os
import re
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import Any

import yaml

from trainer.config.grammar import show
from trainer.errors import MOST_SHOWN, ConfigError, Problem, first_line
from trainer.storage import read_file

Json = dict[str, Any]


LARGEST = 1 << 20
"""The most bytes of a config."""
DEEPEST = 40
"""The most levels of nested sections."""
DIGITS = 1000
"""The most digits of a number; more exceed any float."""
MOST = 100_000
"""The most values of a YAML file, each counted as often as an anchor repeats it."""
YAML = (".yaml", ".yml")
"""The endings of files that are YAML."""
SHOWN = 200
"""The most characters of a key's path in an error."""


def read(path: Path) -> Json:
    """Read the object in a JSON file, which may have comments, as DeepSpeed's may, or in YAML.

    Raises ConfigError if it is no regular file, no UTF-8, neither JSON nor YAML, or too large.
    """
    in_yaml = path.suffix.lower() in YAML
    raw, text = parse(path, in_yaml, "a DeepSpeed JSON config")
    if not isinstance(raw, dict):
        expected = "keys with values" if in_yaml else "a JSON object {...}"
        raise ConfigError(Problem(str(path), f"saw {show(raw)}", expected))
    if problems := [*unfit(raw, str(path), text)]:
        raise ConfigError(*problems)
    return raw


def parse(path: Path, in_yaml: bool, wanted: str) -> tuple[Any, str]:
    """Parse a YAML or JSON file, any value; return also the JSON without comments, for `unfit`.

    `wanted`: what the file should be. Raises ConfigError as `read` does.
    """
    try:
        text = re.sub("\r\n?", "\n", _bytes(path, wanted).decode().removeprefix("\ufeff"))
        if in_yaml:
            return parse_yaml(text, str(path)), ""
        text = _COMMENT.sub(_blank, text)
        raw = _parse(text)
    except UnicodeDecodeError as error:
        seen = f"byte {error.start} is not UTF-8"
        raise ConfigError(Problem(str(path), seen, "a UTF-8 text file")) from None
    except json.JSONDecodeError as error:
        rest = text[error.pos :]
        seen = f"{error.msg} at {show(rest[:20]) if rest.strip() else 'the end'}"
        raise ConfigError(Problem(f"{path}:{error.lineno}:{error.colno}", seen, "JSON")) from None
    except RecursionError:
        raise ConfigError(_too_deep(str(path))) from None
    if twice := [_double(f"{path}:{line}", key) for key, line in _twice(text)]:
        raise ConfigError(*twice)
    return raw, text


_COMMENT = re.compile(
    r'(?P<text>"(?:\\.|[^"\\])*(?:"|\\?\Z))|//[^\n]*|#[^\n]*|/\*.*?(?P<closed>\*/|\Z)', re.DOTALL
)
"""A string or a comment; one that is not closed goes up to the end."""


def _blank(found: re.Match[str]) -> str:
    """Return spaces and line breaks in place of a comment, so that errors name the right place."""
    kept = found["text"] is not None or found["closed"] == ""
    return found[0] if kept else re.sub(r"[^\n]", " ", found[0])


def _bytes(path: Path, wanted: str) -> bytes:
    place = str(path)
    try:
        return read_file(path, LARGEST)
    except FileNotFoundError:
        seen = "no such file"
        if path.is_symlink():
            seen = f"a link to {os.readlink(path)}, which is not there"
        hints = [_nearby(path), f"Shipped: {', '.join(sorted(_paths()))}"]
        raise ConfigError(Problem(place, seen, wanted, ". ".join(filter(None, hints)))) from None
    except (OSError, ValueError) as error:
        seen = getattr(error, "strerror", "") or str(error)
        raise ConfigError(Problem(place, seen, wanted)) from None


@dataclass(frozen=True)
class _NoNumber:
    """A stand-in, until it is reported, for a number that no float holds."""

    text: str
    order: int
    """The number of such numbers before it in the text."""

    def __str__(self) -> str:
        return self.text


def _parse(text: str) -> Any:
    """Parse a JSON text. Raises ValueError and RecursionError."""
    order = count()
    return json.loads(
        text,
        parse_constant=lambda name: _NoNumber(name, next(order)),
        parse_int=lambda it: int(it) if len(it) <= DIGITS else _NoNumber(it, next(order)),
    )


def _lines(text: str) -> Iterator[int]:
    """Yield the line of each number that no float holds, in order."""
    for token in re.finditer(r'"(?:\\.|[^"\\])*"|NaN|-?Infinity|-?\d[\d.eE+-]*', text):
        number = token[0].lstrip("-")
        if number in ("NaN", "Infinity") or (number.isdecimal() and len(token[0]) > DIGITS):
            yield text.count("\n", 0, token.start()) + 1


def nodes(tree: Any) -> Iterator[tuple[str, Any, int]]:
    """Yield (path, value, depth) of a tree, of its sections and lists, and of what they hold."""
    waiting: deque[tuple[str, Any, int]] = deque([("", tree, 0)])
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


def unfit(raw: Any, place: str, text: str = "") -> Iterator[Problem]:
    """Yield the problems of a tree: too deep, or values that no float, file or terminal takes."""
    lines = dict(enumerate(islice(_lines(text), MOST_SHOWN)))
    for path, value, depth in nodes(raw):
        if depth > DEEPEST and isinstance(value, dict | list):
            yield _too_deep(place)
            return
        if isinstance(value, _NoNumber):
            line = f":{lines[value.order]}" if value.order in lines else ""
            digits = len(value.text)
            seen = value.text if digits < DIGITS else f"a number of {digits:,} digits"
            yield Problem(f"{place}{line}: {path}", f"saw {seen}", "a finite number")
        elif isinstance(value, float) and not text and not math.isfinite(value):
            yield Problem(f"{place}: {path}", f"saw {show(value)}", "a finite number")
        for part in value if isinstance(value, dict) else [value] if isinstance(value, str) else []:
            if not isinstance(part, str) or "\0" in part or re.search("[\ud800-\udfff]", part):
                expected = "text without the character 0 and without halves of characters"
                yield Problem(f"{place}: {path}" if path else place, f"saw {show(part)}", expected)


def _too_deep(place: str) -> Problem:
    seen = f"sections nested more than {DEEPEST} deep"
    return Problem(place, seen, "the few levels of a DeepSpeed JSON config")


def _double(place: str, key: str) -> Problem:
    return Problem(place, f"saw the key {show(key)} twice in one section", "once")


_TAG = "tag:yaml.org,2002:"


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """Keeps dates as text, reads 1e-3 as a number, as JSON does, and copies what anchors repeat."""

    yaml_implicit_resolvers = {
        first: [pair for pair in pairs if pair[0] not in (f"{_TAG}timestamp", f"{_TAG}value")]
        for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    yaml_constructors = {
        tag: make
        for tag, make in yaml.SafeLoader.yaml_constructors.items()
        if str(tag).removeprefix(_TAG) not in ("binary", "timestamp", "set", "omap", "pairs")
    }

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        made = super().construct_object(node, deep=True)
        self.constructed_objects.pop(node, None)
        return made


_FLOAT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?", re.ASCII)
_NEW = re.compile(rf"(?=.*[eE]|[-+]\.){_FLOAT.pattern}$", re.ASCII)
_Loader.add_implicit_resolver(f"{_TAG}float", _NEW, list("-+.0123456789"))
_PLAIN = {
    f"{_TAG}int": re.compile(r"[-+]?(0|[1-9]\d*|0x[\da-fA-F]+)", re.ASCII),
    f"{_TAG}float": _FLOAT,
    f"{_TAG}bool": re.compile("(?i:yes|no|true|false|on|off)"),
    f"{_TAG}null": re.compile("(?i:null)|~|"),
}
"""The texts of values; 010 and 1:30, numbers in YAML 1.1, are others or texts in YAML 1.2."""


def parse_yaml(text: str, place: str) -> Any:
    """Parse the YAML text of `place`. Raises ConfigError, or RecursionError if nested too deep."""
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        problems: list[Problem] = []
        count = _examine(node, "", {}, problems, place)
        if problems or count > MOST:
            seen, expected = f"more than {MOST:,} values", "a config: anchors repeat what they hold"
            raise ConfigError(*(problems or [Problem(place, seen, expected)]))
        return loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        seen = ", ".join(filter(None, (error.context, error.problem)))
        raise _no_yaml(place, error.problem_mark.line, seen) from None
    except yaml.reader.ReaderError as error:
        raise _no_yaml(place, text.count("\n", 0, error.position), first_line(error)) from None
    except (ValueError, OverflowError) as error:  # of the number of a character in quotes
        raise _no_yaml(place, loader.line, first_line(error)) from None


def _no_yaml(place: str, line: int, reason: str) -> ConfigError:
    return ConfigError(Problem(f"{place}:{line + 1}", reason[:200], "YAML"))


def _examine(node: Any, path: str, known: dict[Any, int], problems: list[Problem], at: str) -> int:
    """Count the values below a node, and note those that JSON does not have."""
    line = f"{at}:{node.start_mark.line + 1}"
    if node in known:
        if known[node] == 0:
            problems.append(Problem(line, f"saw {path} in itself", "no anchor that holds itself"))
        return known[node]
    known[node] = 0
    parts: list[tuple[str, Any]] = []
    if isinstance(node, yaml.SequenceNode):
        parts = [(f"{path}[{index}]", part) for index, part in enumerate(node.value)]
    elif isinstance(node, yaml.MappingNode):
        parts = [(f"{path}.{_name(key)}".lstrip("."), part) for key, part in node.value]
        problems += _keys(node, at)
    elif node.tag in _PLAIN:
        value, digits = node.value.replace("_", ""), len(node.value)
        fits = digits <= DIGITS and _PLAIN[node.tag].fullmatch(value)
        if not fits or (_PLAIN[node.tag] is _FLOAT and not math.isfinite(float(value))):
            seen = f"a number of {digits:,} digits" if digits > DIGITS else node.value[:60]
            expected = "a finite number, true, false or null as in JSON, or text in quotes"
            problems.append(Problem(f"{line}: {path}", f"saw {seen or 'nothing'}", expected))
    known[node] = 1 + sum(_examine(part, name[:SHOWN], known, problems, at) for name, part in parts)
    return known[node]


def _name(key: Any) -> str:
    """Show a key: of several values, which anchors may repeat without end, none."""
    return str(key.value)[:SHOWN] if isinstance(key, yaml.ScalarNode) else "of several values"


def _keys(node: yaml.MappingNode, at: str) -> list[Problem]:
    """List the problems of a section's keys: one that is there twice, or that is not text."""
    problems, seen = [], set()
    for key, _ in node.value:
        place = f"{at}:{key.start_mark.line + 1}"
        if key.tag not in (f"{_TAG}str", f"{_TAG}merge"):
            problems.append(Problem(place, f"saw the key {_name(key)}", "text, a number in quotes"))
        elif key.value in seen:
            problems.append(_double(place, key.value))
        else:
            seen.add(key.value)
    return problems


def override(raw: Json, overrides: Sequence[str]) -> tuple[Json, list[str], list[Problem]]:
    """Return `raw` with each `key.path=value` set; also the paths that were set, and the problems.

    A value is JSON if it parses as such, else a string. Missing sections are created.
    """
    result, paths, problems = deepcopy(raw), [], []
    for text in overrides:
        path, equals, value = text.partition("=")
        names = path.split(".")
        if not equals or not all(names) or len(names) > DEEPEST:
            seen, spaces = "saw an override without a key path", text == "=" or "=" in overrides
            hint = "Write it without spaces around the =." if spaces else ""
            problems.append(Problem(text, seen, "key.path=value", hint))
            continue
        section: Any = result
        for depth, name in enumerate(names[:-1], start=1):
            section = section.setdefault(name, {})
            if not isinstance(section, dict):
                seen = f'"{".".join(names[:depth])}" is {show(section)}'
                mend = "Set that key itself instead."
                problems.append(Problem(text, seen, "a section {...}", mend))
                break
        else:
            found = {names[-1]: (read := _value(value))}
            twice = dict(_twice(value)) if isinstance(read, dict | list) else {}
            wrong = [*(_double(text, key) for key in sorted(twice)), *unfit(found, text)]
            section.update({} if wrong else found)
            paths.append(path)
            problems += wrong
    return result, paths, problems


def leaves(tree: Json, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted path, value) for every value of a tree that is not a section."""
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def at(tree: Json, path: str) -> Any:
    """Return the value at a dotted path; None if there is none."""
    found: Any = tree
    for name in filter(None, path.split(".")):
        found = found.get(name) if isinstance(found, dict) else None
    return found


def _value(text: str) -> Any:
    try:
        value = _parse(text) if len(text) <= LARGEST else text
        return text if value != text and any(_lines(text)) else value
    except (ValueError, RecursionError):
        return text


def _twice(text: str) -> Iterator[tuple[str, int]]:
    """Yield (key, line) for every key of a JSON text that its section already has."""
    sections: list[set[str]] = []
    for token in re.finditer(r'("(?:\\.|[^"\\])*")(\s*:)?|[{}]', text):
        if token[0] == "{":
            sections.append(set())
        elif token[0] == "}":
            sections.pop()
        elif token[2]:
            if (key := json.loads(token[1])) in sections[-1]:
                yield key, text.count("\n", 0, token.start()) + 1
            sections[-1].add(key)


def _nearby(path: Path) -> str:
    """Return a hint that names the JSON and YAML files beside a path."""
    beside = islice(path.parent.iterdir(), 1000) if path.parent.is_dir() else ()
    names = sorted(found.name for found in beside if found.suffix.lower() in (".json", *YAML))[:6]
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


def other_config(path: Path, raw: dict[str, Any], known: Collection[str]) -> ConfigError | None:
    """Build the error for the JSON config of something else, which has none of the known keys."""
    if any(key in known for key in raw):
        return None
    for keys, (seen, mend) in _KINDS.items():
        if any(key in raw for key in keys):
            return ConfigError(Problem(str(path), seen, "a DeepSpeed JSON config", mend))
    return None


_PACKAGE = Path(__file__).resolve().parent.parent
_FOLDERS = (_PACKAGE / "ds_configs", _PACKAGE.parent / "ds_configs")
"""The folder of the configs that come with Meshloom, in a wheel, and in a checkout."""


def shipped(name: str) -> Path | None:
    """Return the shipped config called `name`, with or without ".json"; None if there is none."""
    return _paths().get(name.removesuffix(".json"))


def _paths() -> dict[str, Path]:
    folder = next(filter(Path.is_dir, _FOLDERS), _FOLDERS[0])
    return {path.stem: path for path in folder.glob("*.json")}
