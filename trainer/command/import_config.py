"""`meshloom import`: converts a config of another trainer to one of this one."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.command import parser_of, reporting
from trainer.errors import ConfigError, Problem, printable, refused

if TYPE_CHECKING:
    from trainer.tools.importers.translate import Draft

DESCRIPTION = "Write a config from one of Axolotl, LLaMA-Factory, Hugging Face's Trainer or TRL."
USAGE = "%(prog)s [--from SYSTEM] [--output OUT.json] [--partial] (FILE | -- ARGUMENTS)"
EPILOG = """
  %(prog)s --from axolotl full.yml --output full.json
  %(prog)s --from llamafactory llama3_full_sft.yaml --output full.json
  %(prog)s --output clm.json -- --model_name_or_path gpt2 --learning_rate 1e-5
  %(prog)s --from trl-dpo --output dpo.json -- --model_name_or_path m --beta 0.1

FILE is their YAML or JSON. After -- come the Trainer's arguments, or with --from another trainer's.
Each key is listed with what became of it. A key that changes what is trained and has no counterpart
here is an error, and nothing is written; --partial writes the rest, unless the key decides which
parameters are trained or on which loss. A kind of training that is not offered (KTO, PPO, ...) is
always an error. A chat template in their config goes to OUT.jinja. Exit codes: 0 written, 64 not.
"""

REQUIRED = (
    "trainer.model.name_or_path",
    "trainer.data.path",
    "trainer.data.sequence_length",
    "optimizer.params.lr",
)
"""Keys that a config for fine-tuning needs, and that an import may lack."""


@reporting
def main(arguments: Sequence[str], name: str) -> int:
    from trainer.storage import disk_errors
    from trainer.tools.importers.reading import read_file, read_flags
    from trainer.tools.importers.translate import SYSTEMS, translate

    end = arguments.index("--") if "--" in arguments else None
    parser = parser_of(name, DESCRIPTION, EPILOG, USAGE)
    text = (
        "the trainer whose config it is; trainer: Hugging Face's Trainer; trl-dpo: TRL's DPOConfig"
    )
    parser.add_argument("--from", dest="system", choices=sorted(SYSTEMS), help=text)
    text = "file for the converted config (default: print it)"
    parser.add_argument("--output", type=Path, metavar="OUT.json", help=text)
    text = "write what can be carried over, and list the rest"
    parser.add_argument("--partial", action="store_true", help=text)
    parser.add_argument("file", type=Path, nargs="?", metavar="FILE")
    options = parser.parse_args(arguments[:end])
    if (options.file is None) == (end is None) or (end is None and options.system is None):
        parser.error("--from SYSTEM FILE, or arguments after --")
    given = read_file(options.file) if end is None else read_flags(arguments[end + 1 :])
    folder = options.file.parent if options.file else Path()
    output = options.output or Path("config.json")
    template = output.with_name(f"{output.name.removesuffix('.json')}.jinja")
    draft = translate(options.system or "trainer", given, folder, options.partial, str(template))
    text = json.dumps(draft.made, indent=2, ensure_ascii=False) + "\n"
    if draft.template is not None:
        _check_room(options.output, template, draft.template)
    if options.output:
        with disk_errors(options.output):
            options.output.write_text(text, encoding="utf-8")
            if draft.template is not None:
                template.write_text(draft.template, encoding="utf-8")
    else:
        print(text, end="")
    print("\n".join(_report(draft)), file=sys.stdout if options.output else sys.stderr)
    return 0


def _check_room(output: Path | None, template: Path, text: str) -> None:
    """Raise ConfigError if their chat template has no file to go to, or that has another text."""
    if output is None:
        actual = "their config has a chat template, which goes to a file beside the new config"
        raise ConfigError(Problem("--output", actual, "a file", "Give --output OUT.json."))
    if template.exists():
        with refused(str(template), "a chat template", OSError, UnicodeDecodeError):
            existing = template.read_text(encoding="utf-8")
        if existing != text:
            actual = "another chat template is there"
            hint = "Move it, or choose another --output."
            raise ConfigError(Problem(str(template), actual, "the one of their config", hint))


def _report(draft: Draft) -> Iterator[str]:
    """Yield a line for each foreign key that makes a difference, and the names of the others."""
    yield f"carried over ({len(draft.carried)})"
    width = min(44, max(map(len, draft.carried), default=0))
    for key, places in draft.carried.items():
        yield printable(f"  {key:<{width}}  {'; '.join(places)}")
    yield f"lost, though it changes what is trained ({len(draft.lost)})"
    yield from _by_reason(draft.lost)
    if draft.notes:
        yield f"known differences, and keys of speed alone ({len(draft.notes)})"
        yield from _by_reason(draft.notes)
    if draft.listed:
        yield f"no effect, or none on what is trained ({len(draft.listed)})"
        yield printable(f"  {', '.join(draft.listed)}")
    absent = [path for path in REQUIRED if draft.get(path) is None]
    if draft.get("trainer.data.sources"):
        absent.remove("trainer.data.path")
    if absent:
        yield f"still to set: {', '.join(absent)}"


def _by_reason(lines: Mapping[str, Sequence[str]]) -> Iterator[str]:
    reasons: dict[str, list[str]] = {}
    for key, why in lines.items():
        reasons.setdefault("; ".join(why), []).append(key)
    for reason, keys in reasons.items():
        yield printable(f"  {', '.join(keys)}: {reason}")
