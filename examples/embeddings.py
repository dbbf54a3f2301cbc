"""Teach a small model which docstring is which function's: pairs of Python's standard library.

    python examples/embeddings.py

It writes the pairs, and trains on them by the command that a user types. Each evaluation says how often the docstring
of a held-out function is the nearest of all (`recall_at_1`), and among the ten nearest.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
MODULES = (
    *("argparse", "ast", "asyncio", "base64", "bisect", "calendar", "codecs", "collections", "contextlib", "copy"),
    *("csv", "datetime", "decimal", "difflib", "email.utils", "enum", "fractions", "functools", "glob", "gzip"),
    *("heapq", "inspect", "ipaddress", "itertools", "json", "logging", "math", "mimetypes", "os", "os.path"),
    *("pathlib", "pickle", "random", "re", "shutil", "socket", "statistics", "string", "subprocess", "tarfile"),
    *(
        "tempfile",
        "textwrap",
        "threading",
        "time",
        "tokenize",
        "traceback",
        "types",
        "unittest",
        "urllib.parse",
        "uuid",
    ),
)


def pairs() -> Iterator[dict[str, str]]:
    """Yield each function's name with that of its module, and the first sentence of its docstring."""
    seen = set[str]()
    for name in MODULES:
        for label, member in inspect.getmembers(importlib.import_module(name)):
            inner = inspect.getmembers(member) if inspect.isclass(member) else []
            for own, function in [(label, member), *((f"{label}.{key}", value) for key, value in inner)]:
                text = (inspect.getdoc(function) or "").split("\n\n")[0].replace("\n", " ").partition(". ")[0]
                public = not any(part.startswith("_") for part in own.split("."))
                if callable(function) and public and 20 < len(text) < 200 and text not in seen:
                    seen.add(text)
                    yield {"anchor": f"{name} {own}", "positive": text}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, help="train for so many steps")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="the folder of data and run")
    options = parser.parse_args()
    options.runs.mkdir(parents=True, exist_ok=True)
    data = options.runs / "docstrings.jsonl"
    data.write_text("\n".join(map(json.dumps, pairs())) + "\n", encoding="utf-8")
    line = [sys.executable, str(ROOT / "launch" / "train.py"), "--config", str(ROOT / "examples" / "embeddings.json")]
    more = ["trainer.device=cpu", f"trainer.data.path={data}", f"trainer.run.folder={options.runs}"]
    steps = [f"trainer.steps={options.steps}", "trainer.epochs=null"] if options.steps else []
    subprocess.run([*line, "--fresh", "--processes", "2", *more, *steps], check=True)


if __name__ == "__main__":
    main()
