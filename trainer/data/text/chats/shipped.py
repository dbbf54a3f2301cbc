"""The chat templates that are shipped, and which of them suits a model's own template."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from trainer.errors import ConfigError, Problem, suggestion

FOLDER = Path(__file__).parent.parent / "templates"
NAMES = (
    *("chatml", "deepseek", "deepseek-r1", "gemma3", "glm4", "gpt-oss", "llama3", "mistral"),
    *("phi4", "qwen3", "qwen3.5"),
)

_MARKS = (
    (("<|start|>", "<|channel|>"), "gpt-oss"),
    (("<|im_start|>", "<|im_sep|>"), "phi4"),
    (("<|im_start|>", "<think>", "<function="), "qwen3.5"),
    (("<|im_start|>", "<think>"), "qwen3"),
    (("<|im_start|>",), "chatml"),
    (("<|start_header_id|>",), "llama3"),
    (("<start_of_turn>",), "gemma3"),
    (("[INST]",), "mistral"),
    (("<|assistant|>", "<|observation|>"), "glm4"),
    (("<｜User｜>", "<｜Assistant｜><think>"), "deepseek-r1"),
    (("<｜User｜>",), "deepseek"),
)
"""Texts that stand together in a family's templates or among its special tokens; the first fits."""


def read(name: str) -> str:
    """Return the template of a name in NAMES."""
    return (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")


def check_name(path: str, place: str) -> None:
    """Raise ConfigError, with the names that are shipped, for a name that is no file."""
    if Path(path).expanduser().exists() or "/" in path:
        return
    hint = f"{suggestion(path, list(NAMES))} Shipped are {', '.join(NAMES)}".lstrip()
    expected = "a file with a Jinja template, or the name of a shipped one"
    raise ConfigError(Problem(place, "no such file, and no such name", expected, hint))


def recognised(template: str, special: Iterable[str] = ()) -> str | None:
    """Return the shipped template of the family that a template, or its special tokens, show."""
    tokens = set(special)
    for texts, name in _MARKS:
        if all(text in template for text in texts):
            return name
    return next((name for texts, name in _MARKS if tokens.issuperset(texts)), None)
