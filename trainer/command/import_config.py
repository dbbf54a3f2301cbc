"""`meshloom import`: converts a config of another trainer to one of this one."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainer.tools.importers.translate import Draft

EPILOG = """
  %(prog)s --from axolotl full.yml --output full.json
  %(prog)s --from llamafactory llama3_full_sft.yaml --output full.json
  %(prog)s --output clm.json -- --model_name_or_path gpt2 --learning_rate 1e-5

FILE is their YAML or JSON. After -- come the Trainer's arguments, or with --from another trainer's.
Each key is listed with what became of it. A key that changes what is trained and has no counterpart
here is an error, and nothing is written; --partial writes the rest. Another kind of training
(preferences, inference, ...) is always an error. Exit codes: 0 written, 64 not.
"""


def main(arguments: Sequence[str], name: str) -> int:
    """Run the command `name`; returns its exit code."""
    from trainer.errors import MeshloomError
    from trainer.storage import disk_errors
    from trainer.tools.importers.reading import read_file, read_flags
    from trainer.tools.importers.translate import SYSTEMS, translate

    at = arguments.index("--") if "--" in arguments else None
    parser = argparse.ArgumentParser(
        prog=name,
        usage="%(prog)s [--from SYSTEM] [--output OUT.json] [--partial] (FILE | -- ARGUMENTS)",
        description="Write a config from one of Axolotl, LLaMA-Factory or Hugging Face's Trainer.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--from",
        dest="system",
        choices=sorted(SYSTEMS),
        help="whose it is; arguments: the Trainer's",
    )
    parser.add_argument(
        "--output", type=Path, metavar="OUT.json", help="where ours goes; else it is printed"
    )
    parser.add_argument(
        "--partial", action="store_true", help="write what can be carried over, and list the rest"
    )
    parser.add_argument("file", type=Path, nargs="?", metavar="FILE")
    options = parser.parse_args(arguments[:at])
    if (options.file is None) == (at is None) or (at is None and options.system is None):
        parser.error("--from SYSTEM FILE, or arguments after --")
    try:
        given = read_file(options.file) if at is None else read_flags(arguments[at + 1 :])
        folder = options.file.parent if options.file else Path()
        draft = translate(options.system or "trainer", given, folder, options.partial)
        text = json.dumps(draft.made, indent=2, ensure_ascii=False) + "\n"
        if options.output:
            with disk_errors(options.output):
                options.output.write_text(text, encoding="utf-8")
    except MeshloomError as error:
        print(error.render(), file=sys.stderr)
        return error.exit_code
    if not options.output:
        print(text, end="")
    report = "\n".join(_report(draft))
    print(report, file=sys.stdout if options.output else sys.stderr)
    return 0


def _report(draft: Draft) -> Iterator[str]:
    """Yield a line for each foreign key that makes a difference, and the names of the others."""
    from trainer.errors import printable

    yield f"carried over ({len(draft.carried)})"
    width = min(44, max(map(len, draft.carried), default=0))
    for key, texts in draft.carried.items():
        yield printable(f"  {key:<{width}}  {'; '.join(texts)}")
    yield f"lost, and changes what is trained ({len(draft.lost)})"
    reasons: dict[str, list[str]] = {}
    for key, texts in draft.lost.items():
        reasons.setdefault("; ".join(texts), []).append(key)
    for reason, keys in reasons.items():
        yield printable(f"  {', '.join(keys)}: {reason}")
    if draft.listed:
        title = (
            "ask for nothing, or change nothing of what is trained beside the others "
            f"({len(draft.listed)})"
        )
        yield printable(f"{title}: {', '.join(draft.listed)}")
    data, model = (draft.made["trainer"].get(name, {}) for name in ("data", "model"))
    missing = {
        "trainer.model.name_or_path": "name_or_path" in model,
        "trainer.data.path": bool({"path", "sources"} & data.keys()),
        "trainer.data.sequence_length": "sequence_length" in data,
        "optimizer.params.lr": "lr" in draft.made.get("optimizer", {}).get("params", {}),
    }
    if absent := [path for path, there in missing.items() if not there]:
        yield f"still to say: {', '.join(absent)}"
