"""A config in the making, and the report on what became of each foreign key."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from trainer.config.keys.key import AUTO
from trainer.config.read import at
from trainer.errors import ConfigError, Problem, show
from trainer.storage import Json

OTHERWISE = "is trained otherwise here"


class Entry(NamedTuple):
    """A key of the foreign config, and its value; the key is empty if it was not given."""

    key: str = ""
    value: Any = None

    @property
    def is_set(self) -> bool:
        """True if the value asks for something."""
        return is_set(self.value)

    def refused(self, expected: str, more: str = "") -> ConfigError:
        """Build the error of a value that is not `expected`; `more` follows the value."""
        return ConfigError(Problem(self.key, f"saw {show(self.value)}{more}", expected))


Roles = defaultdict[str, Entry]
"""The keys that are converted together, by the name that the Trainer has for each."""


@dataclass
class Draft:
    """The converted config so far, and the report on foreign keys."""

    given: Json
    folder: Path
    """The folder of the foreign file."""
    place: str = ""
    """The prefix of our keys in the report, for a part of a config."""
    prefix: str = ""
    """The prefix of foreign keys."""
    made: Json = field(default_factory=dict)
    base: Json = field(default_factory=dict)
    """The content of the DeepSpeed file; its values stay, except for "auto"."""
    carried: dict[str, list[str]] = field(default_factory=dict)
    lost: dict[str, list[str]] = field(default_factory=dict)
    """Foreign keys that change the training and are not carried over, with the reasons."""
    notes: dict[str, list[str]] = field(default_factory=dict)
    """Foreign keys whose effect is the same here up to a known difference, with that difference."""
    template_path: str = "chat_template.jinja"
    """The file for a chat template that stands in the foreign config itself."""
    template: str | None = None
    """The text of that file."""
    listed: list[str] = field(default_factory=list)
    """Keys that ask for nothing, or that change nothing of what is trained, given the others."""

    def put(self, entry: Entry, path: str, value: object) -> None:
        """Set `path`, a key of ours, for a foreign key, unless the DeepSpeed file decides it.

        A foreign key that the user gave is lost if the file has another value.
        """
        section = path.partition(".")[0]
        base = at(self.base, path)
        own = section in ("optimizer", "scheduler") and section in self.base and base is None
        if own or base not in (None, AUTO):
            if self.explicit(entry) and not own and base != value:
                self.lose(entry, f"the DeepSpeed file says {path} {show(base)}")
            elif self.explicit(entry):
                self.keep(entry, f"the DeepSpeed file says {section if own else path}")
        elif entry.key:
            *sections, name = path.split(".")
            inner = self.made
            for part in sections:
                inner = inner.setdefault(part, {})
            inner[name] = value
            self.keep(entry, f"{self.place}{path} {show(value)}")

    def replace(self, entry: Entry, path: str, value: object) -> None:
        """Set `path` for this key, in the report too, instead of the key that set it before."""
        for texts in self.carried.values():
            texts[:] = [text for text in texts if not text.startswith(f"{self.place}{path} ")]
        self.put(entry, path, value)

    def keep(self, entry: Entry, place: str) -> None:
        """Report where a foreign key is in ours."""
        self._report(self.carried, entry, place)

    def lose(self, entry: Entry, reason: str = "has no counterpart here") -> None:
        """Report that a foreign key changes what is trained, and is not carried over."""
        self._report(self.lost, entry, reason)

    def note(self, entry: Entry, difference: str) -> None:
        """Report a known difference, which changes nothing or little of what is trained."""
        self._report(self.notes, entry, difference)

    def add_template(self, text: str) -> bool:
        """Keep the text of a chat template for its file; return False if there is another one."""
        if self.template is None:
            self.template = text
        return self.template == text

    def skip(self, *entries: Entry) -> None:
        """Report keys that change nothing of what is trained, given the others."""
        keys = (entry.key for entry in entries if self.explicit(entry))
        self.listed += [key for key in keys if key not in self.listed]

    def get(self, path: str) -> Any:
        """Return the value of a key of ours, or of the DeepSpeed file; None without one."""
        return at(self.made, path)

    def take(self, part: Draft) -> Json:
        """Return the part of a config that `part` converted, and add its report to this one."""
        both = (self.carried, part.carried), (self.lost, part.lost), (self.notes, part.notes)
        for ours, theirs in both:
            for key, lines in theirs.items():
                ours.setdefault(key, []).extend(lines)
        self.listed += part.listed
        return part.made

    def explicit(self, entry: Entry) -> bool:
        """Return True if the user wrote the key; else it is a default of the foreign trainer."""
        key = entry.key.removeprefix(self.prefix)
        return key.startswith("--") or key in self.given or key.partition(".")[0] in self.given

    def reported(self, entry: Entry) -> bool:
        lines = (*self.carried, *self.lost, *self.notes)
        return entry.key in {*self.listed, *(line.partition(" ")[0] for line in lines)}

    def _report(self, lines: dict[str, list[str]], entry: Entry, text: str) -> None:
        if not entry.key:
            return
        origin = "" if self.explicit(entry) else " (their default)"
        texts = lines.setdefault(f"{entry.key} {show(entry.value)}{origin}", [])
        if text not in texts:
            texts.append(text)


def is_set(value: object) -> bool:
    """Return True if a value asks for something; for a section, if any of its values does."""
    if isinstance(value, dict):
        return any(map(is_set, value.values()))
    return not (value is None or value is False or value in ("", "none", "None", []))


def number(value: Any) -> Any:
    """Convert a number written as text, as YAML reads 2e-5; return any other value as it is."""
    if not isinstance(value, str) or value[:1] not in "-+.0123456789" or len(value) > 40:
        return value
    try:
        converted = float(value)
    except ValueError:
        return value
    if not math.isfinite(converted):
        return value
    return int(converted) if value.lstrip("-").isdigit() else converted


def names(value: object) -> list[str]:
    """Return the names in a list, or in a text separated by commas or spaces."""
    given = value if isinstance(value, list) else str(value).replace(",", " ").split()
    return [str(name) for name in given]
