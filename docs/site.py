"""The hook of mkdocs.yml: the site has the paths of the repository, so that each relative link of a
page is right in both.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"\]\(([^)#\s:]+)(?:#[\w-]+)?\)")


def pages() -> list[Path]:
    """Return the files of the site that are Markdown, relative to the repository."""
    globs = ("*.md", "docs/*.md", "examples/**/*.md", "skills/**/*.md", "benchmarks/results/*.md")
    return sorted({path.relative_to(ROOT) for glob in globs for path in ROOT.glob(glob)})


def linked(page: Path) -> Iterator[Path]:
    """Yield the files, relative to the repository, to which a page links."""
    for target in LINK.findall((ROOT / page).read_text(encoding="utf-8")):
        path = (ROOT / page.parent / target).resolve()
        if path.is_file() and path.is_relative_to(ROOT):
            yield path.relative_to(ROOT)


def on_page_markdown(markdown: str, **about: Any) -> str:
    """Leave out the README's badges, which come from elsewhere."""
    return re.sub(r"^\[!\[.*$", "", markdown, flags=re.MULTILINE)


def on_files(files: Any, config: Any) -> Any:
    """Replace the pages of docs/ by all pages and the files that they link to."""
    from mkdocs.structure.files import File, InclusionLevel

    for file in list(files):
        if file.src_dir == config.docs_dir:
            files.remove(file)
    found = pages()
    for path in sorted({*found, *(target for page in found for target in linked(page))}):
        known = InclusionLevel.UNDEFINED if path.parts[0] == "docs" else InclusionLevel.NOT_IN_NAV
        files.append(
            File.generated(config, path.as_posix(), abs_src_path=str(ROOT / path), inclusion=known)
        )
    return files
