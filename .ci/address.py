"""Write the repository's address into a copy of it, before it is built: `address.py FOLDER ADDRESS`.

The address is that of the clone from which a release is made (`git remote get-url origin`); it
stands nowhere else. `pyproject.toml` gets its URLs, and the README, which PyPI shows by itself,
absolute links, to the files of this version's tag.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

LINK = re.compile(r"(!?\[(?:[^\[\]]|!?\[[^\]]*\]\([^)]*\))*\])\((?!https?://|#)([^()\s]+)\)")
VERSION = re.compile(r'^VERSION = "([\d.]+)"$', re.MULTILINE)


def https(address: str) -> str:
    """Return a clone's address as that of its page: `git@host:owner/name.git` has one, too.

    Raises ValueError for an address without a host, an owner and a name.
    """
    found = re.fullmatch(
        r"(?:https://|ssh://)?(?:[^@/]+@)?([\w.-]+\.\w+)[:/](.+?)(?:\.git)?/?", address
    )
    if found is None or found[2].count("/") != 1:
        raise ValueError(
            f"{address} is no address of a repository: expected https://HOST/OWNER/NAME"
        )
    return f"https://{found[1]}/{found[2]}"


def urls(page: str) -> str:
    """Return the table of pyproject.toml with the project's URLs."""
    of_project = {
        "Repository": page,
        "Documentation": f"{page}/blob/HEAD/docs/index.md",
        "Issues": f"{page}/issues",
        "Changelog": f"{page}/blob/HEAD/CHANGELOG.md",
    }
    lines = [f'{name} = "{url}"' for name, url in of_project.items()]
    return "\n".join(["", "[project.urls]", *lines, ""])


def absolute(text: str, page: str, tag: str) -> str:
    """Return Markdown of the top folder whose relative links are absolute, pictures as files."""

    def replaced(match: re.Match[str]) -> str:
        label = LINK.sub(replaced, match[1]) if match[1].startswith("[!") else match[1]
        if match[2].startswith("../../"):  # of the repository's page, as its badge
            return f"{label}({page}/{match[2].removeprefix('../../')})"
        kind = "raw" if label.startswith("!") else "blob"
        return f"{label}({page}/{kind}/{tag}/{match[2]})"

    return LINK.sub(replaced, text)


def stamp(folder: Path, address: str) -> None:
    """Write the address into the folder's pyproject.toml and README.md. Raises ValueError."""
    page = https(address)
    version = VERSION.search((folder / "trainer/state.py").read_text())
    project = folder / "pyproject.toml"
    if version is None or "urls" in tomllib.loads(project.read_text())["project"]:
        raise ValueError(f"{folder} has no version, or has URLs already")
    project.write_text(project.read_text() + urls(page))
    readme = folder / "README.md"
    readme.write_text(absolute(readme.read_text(), page, f"v{version[1]}"))


if __name__ == "__main__":
    stamp(Path(sys.argv[1]), sys.argv[2])
