"""The documentation: every link leads somewhere, the site builds from it, and what is made from the
code is up to date.
"""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.support import reference
from tests.support.commands import ROOT
from trainer import errors

PAGES = sorted(
    {
        path.relative_to(ROOT)
        for glob in ("*.md", "llms.txt", "docs/*.md", "examples/**/*.md", "benchmarks/**/*.md")
        + ("skills/**/*.md",)
        for path in ROOT.glob(glob)
    }
)
LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^()\s]+)\)")


def prose(text: str) -> str:
    """Return a page without its code."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^    .*$", "", text, flags=re.MULTILINE))


@cache
def anchors(path: Path) -> set[str]:
    """Return the anchors of a page's headings, as both GitHub and MkDocs name them."""
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    plain = [re.sub(r"[^\w\s-]", "", heading.lower()).strip() for heading in headings]
    return {re.sub(r"\s", "-", one) for one in plain} & {
        re.sub(r"[\s-]+", "-", one) for one in plain
    }


def broken(page: Path) -> list[str]:
    """Return the links of a page that lead nowhere. External ones are checked for form alone."""
    results = []
    for target in LINK.findall(prose((ROOT / page).read_text())):
        parts = urlsplit(target)
        if target.startswith("../../actions/workflows/") and page == Path("README.md"):
            # of the repository's page, where the README is shown
            right = (ROOT / ".github/workflows" / target.split("/")[4]).is_file()
        elif parts.scheme or parts.netloc:
            right = parts.scheme == "https" and "." in parts.netloc
        else:
            path = (ROOT / page.parent / parts.path).resolve() if parts.path else ROOT / page
            right = path.is_relative_to(ROOT) and path.exists()
            if right and parts.fragment:
                right = path.suffix == ".md" and parts.fragment in anchors(path)
        results += [] if right else [target]
    return results


WORDS = 1500
"""The most that a first visit reads of a page."""
TABLES = {"families.md", "gallery.md", "reference.md"}
"""Pages in which a line is looked up."""


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda path: path.name)
def test_a_page_is_short_enough_for_a_first_visit(page: Path):
    if page.name not in TABLES:  # others are split by what a reader asks
        assert len(page.read_text().split()) <= WORDS


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_every_link_leads_somewhere(page: Path):
    assert broken(page) == []


def test_a_link_that_leads_nowhere_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    (tmp_path / "b.md").write_text("# One `two`: three\n")
    links = [
        "b.md",
        "b.md#one-two-three",
        "c.md",
        "b.md#four",
        "#five",
        "https://x",
        "http://a.org",
    ]
    (tmp_path / "a.md").write_text("".join(f"[x]({link}) " for link in links) + "`[y](d.md)`")
    assert broken(Path("a.md")) == ["c.md", "b.md#four", "#five", "https://x", "http://a.org"]


def test_the_site_builds_without_a_warning_and_loads_nothing_from_elsewhere(tmp_path: Path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stdout + result.stderr
    for page in PAGES:
        if page.suffix == ".md":
            name = page.with_name("index.html" if page.name == "README.md" else f"{page.stem}.html")
            html = (tmp_path / name).read_text()
            loaded = re.findall(r"<(?:script|img)[^>]*\ssrc=\"?([^\s\">]+)", html)
            loaded += re.findall(r"<link[^>]*rel=\"?stylesheet[^>]*href=\"?([^\s\">]+)", html)
            assert loaded and not [link for link in loaded if urlsplit(link).netloc], name


def test_the_diagrams_are_those_of_their_script():
    """`python docs/diagrams.py` writes them."""
    made = runpy.run_path(str(ROOT / "docs" / "diagrams.py"))["DIAGRAMS"]
    assert {f"{name}.svg" for name in made} == {path.name for path in ROOT.glob("docs/*.svg")}
    for name, draw in made.items():
        assert draw().svg() == (ROOT / "docs" / f"{name}.svg").read_text(), name


def test_the_reference_is_that_of_the_code():
    assert reference.reference() == reference.REFERENCE.read_text(), reference.__doc__


def test_llms_txt_is_that_of_the_pages():
    assert reference.llms() == reference.LLMS.read_text(), reference.__doc__


def test_the_table_of_probes_is_that_of_the_code():
    assert reference.models() == reference.MODELS.read_text(), reference.__doc__


def test_each_key_of_the_trainer_section_is_in_the_reference():
    from trainer.config.own_keys import OWN_KEYS

    text = reference.REFERENCE.read_text()
    for path in OWN_KEYS:
        section, _, name = path.rpartition(".")
        rows = text.split(f"\n### `{section}`\n")[1].split("\n### ")[0]
        assert f"| `{name}` |" in rows, path


def test_each_exit_code_is_found_from_the_troubleshooting_page():
    rows = (ROOT / "docs/troubleshooting.md").read_text().split("\n## ")[0]
    codes = {kind.exit_code for kind in vars(errors).values() if hasattr(kind, "exit_code")}
    assert codes <= {int(code) for code in re.findall(r"^\| (\d+)", rows, re.MULTILINE)}
