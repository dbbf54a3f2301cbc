"""Reads YAML: numbers as in JSON, keys that are text and unique, and errors with their line."""

from __future__ import annotations

import math
import re

import yaml

from trainer.config.syntax.json_text import twice
from trainer.errors import ConfigError, Problem, first_line

DIGITS = 1000
"""The most digits of a number; more exceed any float."""
MOST = 100_000
"""The most values of a YAML file, each counted as often as an anchor repeats it."""
SHOWN = 200
"""The most characters of a key's path in an error."""

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

    def construct_object(self, node: object, deep: bool = False) -> object:
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
"""The texts allowed for plain values, by tag; 010 and 1:30 are not, which YAML 1.1 and 1.2 read
differently."""


def parse_yaml(text: str, place: str) -> object:
    """Parse the YAML text of `place`. Raises ConfigError, or RecursionError if nested too deep."""
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        problems: list[Problem] = []
        count = _examine(node, "", {}, problems, place)
        if problems or count > MOST:
            actual = f"more than {MOST:,} values"
            expected = "a config: anchors repeat what they hold"
            raise ConfigError(*(problems or [Problem(place, actual, expected)]))
        return loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        actual = ", ".join(filter(None, (error.context, error.problem)))
        raise _no_yaml(place, error.problem_mark.line, actual) from None
    except yaml.reader.ReaderError as error:
        raise _no_yaml(place, text.count("\n", 0, error.position), first_line(error)) from None
    except (ValueError, OverflowError) as error:  # by the number of an escaped character in quotes
        raise _no_yaml(place, loader.line, first_line(error)) from None


def _no_yaml(place: str, line: int, reason: str) -> ConfigError:
    return ConfigError(Problem(f"{place}:{line + 1}", reason[:200], "YAML"))


def _examine(
    node: yaml.Node, path: str, known: dict[object, int], problems: list[Problem], at: str
) -> int:
    """Count a node and the values below it, and add a problem for each that JSON does not have."""
    line = f"{at}:{node.start_mark.line + 1}"
    if node in known:
        if known[node] == 0:
            problems.append(Problem(line, f"saw {path} in itself", "no anchor that holds itself"))
        return known[node]
    known[node] = 0
    parts: list[tuple[str, object]] = []
    if isinstance(node, yaml.SequenceNode):
        parts = [(f"{path}[{index}]", part) for index, part in enumerate(node.value)]
    elif isinstance(node, yaml.MappingNode):
        parts = [(f"{path}.{_name(key)}".lstrip("."), part) for key, part in node.value]
        problems += _keys(node, at)
    elif node.tag in _PLAIN:
        value = node.value.replace("_", "")
        digits = len(node.value)
        fits = digits <= DIGITS and _PLAIN[node.tag].fullmatch(value)
        if not fits or (_PLAIN[node.tag] is _FLOAT and not math.isfinite(float(value))):
            actual = f"a number of {digits:,} digits" if digits > DIGITS else node.value[:60]
            expected = "a finite number, true, false or null as in JSON, or text in quotes"
            problems.append(Problem(f"{line}: {path}", f"saw {actual or 'nothing'}", expected))
    known[node] = 1 + sum(_examine(part, name[:SHOWN], known, problems, at) for name, part in parts)
    return known[node]


def _name(key: object) -> str:
    """Return a key's text; not of a key with several values, which anchors may make endless."""
    return str(key.value)[:SHOWN] if isinstance(key, yaml.ScalarNode) else "of several values"


def _keys(node: yaml.MappingNode, at: str) -> list[Problem]:
    """List the problems of a section's keys: one that is there twice, or that is not text."""
    problems = []
    known = set()
    for key, _ in node.value:
        place = f"{at}:{key.start_mark.line + 1}"
        if key.tag not in (f"{_TAG}str", f"{_TAG}merge"):
            problems.append(Problem(place, f"saw the key {_name(key)}", "text, a number in quotes"))
        elif key.value in known:
            problems.append(twice(place, key.value))
        else:
            known.add(key.value)
    return problems
