"""`meshloom import`: what another trainer is told, as a config of this one."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainer.config.habits import Draft

EPILOG = """
  %(prog)s --from axolotl qlora.yml --output qlora.json
  %(prog)s --from llamafactory examples/train_lora/llama3_lora_sft.yaml --output lora.json
  %(prog)s --from trainer run_clm.sh > clm.json

FILE is their YAML or JSON; of the Trainer also a script or a text with --key value. Each key is named with what became
of it: carried over, carried over with another meaning, or left out and why. Exit codes: 0 written, 64 not a config, or
a training that is another one.
"""


def main(arguments: Sequence[str], name: str) -> int:
    """Run the command `name`; returns its exit code."""
    from trainer.config.habits import SYSTEMS, translate
    from trainer.errors import MeshloomError
    from trainer.storage import disk_errors

    parser = argparse.ArgumentParser(
        prog=name,
        description="Write a config from one of Axolotl, LLaMA-Factory or Hugging Face's Trainer.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--from", dest="system", required=True, choices=sorted(SYSTEMS), help="whose FILE is")
    parser.add_argument("file", type=Path, metavar="FILE")
    parser.add_argument("--output", type=Path, metavar="OUT.json", help="where ours goes; else it is printed")
    options = parser.parse_args(arguments)
    try:
        draft = translate(options.system, options.file)
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
    """A line for each key of theirs."""
    titles = ("carried over", "carried over with another meaning", "left out")
    for title, lines in zip(titles, (draft.carried, draft.changed, draft.left), strict=True):
        yield f"{title} ({len(lines)})"
        width = min(44, max(map(len, lines), default=0))
        yield from (f"  {key:<{width}}  {'; '.join(dict.fromkeys(texts))}" for key, texts in lines.items())
    if draft.idle:
        yield f"ask for nothing: {', '.join(draft.idle)}"
    data, model = (draft.made["trainer"].get(name, {}) for name in ("data", "model"))
    missing = {
        "trainer.model.name_or_path": "name_or_path" in model,
        "trainer.data.path": bool({"path", "sources"} & data.keys()),
    }
    if absent := [path for path, there in missing.items() if not there]:
        yield f"still to say: {', '.join(absent)}"
