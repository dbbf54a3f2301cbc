"""The pages that are made from the code and from other pages.

python -m tests.support.reference        # writes docs/reference.md, docs/models.md and llms.txt again
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from pydantic import BaseModel

from tests.support.commands import ROOT
from trainer.config import keys
from trainer.config.keys.grammar import parse
from trainer.config.keys.key import Key
from trainer.config.own_keys import OWN_KEYS, sections_of
from trainer.config.sections.trainer import TrainerSection
from trainer.parallel.checks import TABLE

REFERENCE, LLMS = ROOT / "docs" / "reference.md", ROOT / "llms.txt"
MODELS = ROOT / "docs" / "models.md"
HEAD = "| key | type | unit | default | meaning |\n| --- | --- | --- | --- | --- |"


def one_line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("None:", "null:")


def default_of(key: Key) -> str:
    if key.default is None:
        return "required" if key.needed else ""
    if isinstance(key.default, bool):
        return str(key.default).lower()
    return f"`{key.default!r}`".replace("'", '"')


def table(found: Mapping[str, Key], below: str, sections: bool = False) -> Iterator[str]:
    """Yield the table of the keys of one section, with the sections in it if asked for."""
    yield from ("", HEAD)
    for path, key in found.items():
        section, _, name = path.rpartition(".")
        if section == below and (sections or key.kind != "section"):
            kind = key.expected.replace("|", "\\|")
            unit = "" if key.unit == "number" else key.unit
            words = one_line(" ".join([key.about, *key.facts()]))
            yield f"| `{name}` | {kind} | {unit} | {default_of(key)} | {words} |"


def own_sections() -> Iterator[tuple[str, str]]:
    """Yield (path, docstring) of `trainer` and of each section in it, outer ones first."""
    models = {"trainer": TrainerSection, **dict(sections_of(TrainerSection, "trainer"))}
    for path in sorted(models, key=lambda path: path.count(".")):
        doc = models[path].__doc__
        yield path, one_line(doc) if doc and doc != BaseModel.__doc__ else ""


def reference() -> str:
    """Return docs/reference.md."""
    lines = [
        "# All keys",
        "",
        "Every key that the config reader knows, by section. The tables are those of the reader itself, written out by",
        "`python -m tests.support.reference`. How configs work: [configs.md](configs.md).",
        "",
        "## The section `trainer`",
    ]
    for path, doc in own_sections():
        rows = table(OWN_KEYS, path, sections=True)
        lines += ["", f"### `{path}`", *(["", doc] if doc else []), *rows]
    lines += ["", "## DeepSpeed's keys", "", "### Top level", *table(keys.KEYS, "")]
    for path, key in keys.KEYS.items():
        if key.kind == "section":
            body = list(table(keys.KEYS, path))
            lines += ["", f"### `{path}`", "", one_line(" ".join(key.facts()))]
            lines += body if len(body) > 2 else []
    for title, name in (("Optimizers", "optimizers"), ("Schedulers", "schedulers")):
        text = (ROOT / f"trainer/config/keys/{name}.txt").read_text(encoding="utf-8")
        result = parse(text)
        lines += [
            "",
            f"## {title}",
            "",
            f"The keys of `{name[:-1]}.params`, by `{name[:-1]}.type`.",
        ]
        for kind, key in result.items():
            if key.kind == "section":
                body = list(table(result, kind))
                lines += ["", f"### {kind}", "", one_line(" ".join(key.facts()))]
                lines += body if len(body) > 2 else []
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).replace("..", ".") + "\n"


def llms() -> str:
    """Return llms.txt (llmstxt.org): what the project is, and each page with its first sentence."""
    index = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    summary = one_line(next(part for part in readme.split("\n\n") if part[0].isupper()))
    lines = [
        "# Meshloom",
        "",
        f"> {summary}",
        "",
        "Commands, rules and a map for agents: [AGENTS.md](AGENTS.md).",
    ]
    for line in index.split("\nnav:\n")[1].splitlines():
        if match := re.fullmatch(r"  - ([^:#]+):", line):
            lines += ["", f"## {match[1]}", ""]
        elif match := re.fullmatch(r" +- (.+): (\S+\.md)", line):
            if line.startswith("  - ") and "## Start" not in lines:
                lines += ["", "## Start", ""]
            lines.append(f"- [{match[1]}]({match[2]}): {first_sentence(match[2])}")
    return "\n".join(lines) + "\n"


def first_sentence(page: str) -> str:
    """Return the first sentence of a page's first paragraph, or its title if it begins otherwise."""
    title, *rest = (ROOT / page).read_text(encoding="utf-8").split("\n\n")
    for paragraph in rest:
        if paragraph[0].isupper() or paragraph[0] == "`":
            plain = re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", one_line(paragraph))
            return re.split(r"(?<=\.)\s|:$", plain, maxsplit=1)[0].rstrip(".") + "."
    return title.strip("# ") + "."


def models() -> str:
    """Return docs/models.md with the table of probes as it is in the code."""
    begin, end = "<!-- probes -->\n", "<!-- /probes -->"
    before, rest = MODELS.read_text(encoding="utf-8").split(begin)
    lines = [
        "| what is checked | who needs it | what happens if it does not hold | time |",
        "| --- | --- | --- | --- |",
    ]
    for question in TABLE:
        words = (question.holds, question.need.who, question.otherwise, question.cost)
        lines.append(f"| {' | '.join(words)} |")
    return "\n".join([before + begin.rstrip(), *lines, end + rest.split(end)[1]])


if __name__ == "__main__":
    MODELS.write_text(models(), encoding="utf-8")
    REFERENCE.write_text(reference(), encoding="utf-8")
    LLMS.write_text(llms(), encoding="utf-8")
