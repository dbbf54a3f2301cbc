"""The diagnosis of a file that is no DeepSpeed JSON, in one sentence: a Python dict, YAML, a model's config, ..."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from trainer.errors import ConfigError, Problem

ACCELERATE = ("an Accelerate config", "Its deepspeed_config_file names the DeepSpeed JSON: give that.")

# pattern where reading failed -> what was seen, and the mend
_AT = [
    (r"'", "a single quote", 'JSON text stands in double quotes: "stage".'),
    (r"[“”„‟«»‘’]", "a typographic quote", 'JSON text stands in straight double quotes: "stage".'),
    (r"(True|False|None)\b", "a word of Python's", "JSON writes true, false and null."),
    (r"//|/\*|#", "a comment", 'JSON has none: remove it, or keep it as a key that starts with "_".'),
    (r"[}\]]", "a comma before the closing bracket", "Remove the comma."),
    (r",", "two commas", "Remove one of them."),
    (r"\.\d|0\d|\+|0x", "a number as JSON does not write it", "Write 0.5, 8 or 1e-4."),
    (r"[A-Za-z_]\w*\s*:", "a key without quotes", 'JSON keys stand in double quotes: "stage".'),
    (r"\Z", "the end of the file", "A bracket or a quote is not closed."),
]
_MESSAGES = {
    "Invalid control character": ("a line break or a tab inside text", "Write \\n or \\t, or close the quote before."),
    "Invalid \\": ("a backslash that JSON does not know", "Write two: \\\\."),
    "Unterminated": ("text that is not closed", 'Close it with ".'),
}


def no_json(path: Path, text: str, error: json.JSONDecodeError) -> ConfigError:
    """Build the error for a text that `json` can't read."""
    whole = _kind_of_text(text)
    if whole:
        return ConfigError(Problem(str(path), whole[0], "a DeepSpeed JSON config", whole[1]))
    seen, mend = _at(text, error)
    return ConfigError(Problem(f"{path}:{error.lineno}:{error.colno}", seen, "JSON", mend))


def _kind_of_text(text: str) -> tuple[str, str] | None:
    if not text.strip():
        return "an empty file", "The least of configs is {}."
    start = text.lstrip()[:20_000]
    if re.search(r"^(compute_environment|distributed_type|deepspeed_config)\s*:", start, re.MULTILINE):
        return ACCELERATE
    if start[0] == "<":
        return "a web page or XML", "Download the file itself, not the page about it."
    if start[0] not in "{['\"" and re.match(r"(---|#.*\n|\s)*[\w.-]+\s*:(\s|$)", start):
        return "YAML", "Write it as JSON."
    if start[0] not in "{['\"" and re.match(r"(#.*\n|\s)*(\[[\w.]+\]|[\w.]+\s*=)", start):
        return "TOML, INI or Python", "Write it as JSON."
    return None


def _at(text: str, error: json.JSONDecodeError) -> tuple[str, str]:
    for start, found in _MESSAGES.items():
        if error.msg.startswith(start):
            return found
    rest = text[error.pos : error.pos + 1000].lstrip()
    if error.msg == "Extra data":
        lines = rest[:1] in ("{", "[")
        return ("a second JSON value: JSON lines" if lines else "more text after the config"), "Keep one object {...}."
    before = text[max(0, error.pos - 1000) : error.pos].rstrip()[-1:]
    for pattern, seen, mend in _AT:
        if re.match(pattern, rest) and (rest[:1] not in ("}", "]", ",") or before == ","):
            return seen, mend
    return error.msg, ""


# keys that identify a file -> its kind, and the mend
_KINDS = {
    ("model_type", "architectures"): ("a model's config", "Name it in trainer.model.config."),
    ("tokenizer_class", "added_tokens_decoder"): ("a tokenizer's config", "trainer.data.tokenizer names its folder."),
    ("compute_environment", "distributed_type"): ACCELERATE,
    ("per_device_train_batch_size", "output_dir"): (
        "arguments of Hugging Face's Trainer",
        'Their "deepspeed" names the DeepSpeed JSON: give that.',
    ),
}


def other_config(path: Path, raw: dict[str, Any], known: Collection[str]) -> ConfigError | None:
    """Build the error for the JSON config of something else, without any key of DeepSpeed or this trainer."""
    if any(key in known for key in raw):
        return None
    for keys, (seen, mend) in _KINDS.items():
        if any(key in raw for key in keys):
            return ConfigError(Problem(str(path), seen, "a DeepSpeed JSON config", mend))
    return None
