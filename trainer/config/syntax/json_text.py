"""Reads JSON with comments; jiter, pydantic's parser, names the line of an error."""

from __future__ import annotations

import re

import jiter

from trainer.errors import ConfigError, Problem, show

_COMMENT = re.compile(
    r'(?P<text>"(?:\\.|[^"\\])*(?:"|\\?\Z))|//[^\n]*|#[^\n]*|/\*.*?(?P<closed>\*/|\Z)', re.DOTALL
)
"""A string or a comment; one that is not closed goes up to the end."""
_FAULT = re.compile(r"(?P<why>.*) at line (?P<line>\d+) column (?P<column>\d+)", re.DOTALL)
"""An error of jiter; it counts the column in bytes."""
_DUPLICATE = re.compile(r'Detected duplicate key "(?P<key>.*)"', re.DOTALL)
_NOT_FINITE = re.compile(r"NaN|-?Infinity")


class DuplicateKey(ConfigError):
    """A section has a key twice."""


def parse_json(text: str, place: str) -> object:
    """Parse the JSON text of `place`, without comments.

    Raises ConfigError with the line, also for a key that a section has twice and for NaN, or
    RecursionError if sections are nested too deep.
    """
    try:
        data = text.encode(errors="surrogatepass")
        return jiter.from_json(data, allow_inf_nan=False, catch_duplicate_keys=True)
    except ValueError as error:
        fault = _FAULT.fullmatch(str(error))
        if fault is None or "recursion" in fault["why"]:
            raise RecursionError from None
        line = f"{place}:{fault['line']}"
        if duplicate := _DUPLICATE.fullmatch(fault["why"]):
            raise DuplicateKey(twice(line, duplicate["key"])) from None
        raise ConfigError(_problem(text, line, fault)) from None


def without_comments(text: str) -> str:
    """Return a JSON text with spaces in place of comments, so that errors name the right place."""
    return _COMMENT.sub(_blank, text)


def twice(place: str, key: str) -> Problem:
    """Build the problem of a key that a section has twice."""
    return Problem(place, f"saw the key {show(key)} twice in one section", "once")


def _blank(match: re.Match[str]) -> str:
    kept = match["text"] is not None or match["closed"] == ""
    return match[0] if kept else re.sub(r"[^\n]", " ", match[0])


def _problem(text: str, place: str, fault: re.Match[str]) -> Problem:
    lines = text.split("\n")
    line = lines[int(fault["line"]) - 1]
    before = line.encode(errors="surrogatepass")[: int(fault["column"]) - 1]
    column = len(before.decode(errors="replace"))
    if fault["why"].startswith("EOF"):
        return Problem(f"{place}:{len(line) + 1}", f"{fault['why']} at the end", "JSON")
    if number := _NOT_FINITE.match(line, column - line[:column].endswith("-")):
        return Problem(f"{place}:{number.start() + 1}", f"saw {number[0]}", "a finite number")
    rest = "\n".join([line[column:], *lines[int(fault["line"]) :]])
    return Problem(f"{place}:{column + 1}", f"{fault['why']} at {show(rest[:20])}", "JSON")
