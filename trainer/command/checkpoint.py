"""`meshloom checkpoint`: lists, verifies, shows and imports checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from trainer.command import parser_of, reporting
from trainer.errors import ConfigError, DiskError, Problem, listed, printable

EPILOG = """
the checkpoints of a run, and every byte of all of them against their manifests:
  %(prog)s list runs/zero2
  %(prog)s verify runs/zero2

what is in one of them:
  %(prog)s show runs/zero2/checkpoints/step-000100

one from a ZeRO checkpoint of DeepSpeed, to resume from with --resume:
  %(prog)s import old/checkpoint-500 imported --model my-llama

PATH is a run's folder, its folder of checkpoints, or one checkpoint.
Exit codes: 0 good, 64 no checkpoint, 65 a file to import is damaged or not data, 74 damaged.
"""


@reporting
def main(arguments: Sequence[str], name: str) -> int:
    parser = parser_of(name, "List, verify, show and import checkpoints.", EPILOG)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command, work in COMMANDS.items():
        one = commands.add_parser(command, help=work.__doc__)
        one.add_argument("path", type=Path, metavar="PATH")
    importing = commands.add_parser("import", help=import_deepspeed.__doc__)
    text = "global_stepN, or the folder above it"
    importing.add_argument("path", type=Path, metavar="PATH", help=text)
    importing.add_argument("target", type=Path, metavar="TARGET", help="where step-N is made")
    text = "folder or name with config and tokenizer, if PATH has none"
    importing.add_argument("--model", help=text)
    options = parser.parse_args(arguments)
    if options.command == "import":
        return import_deepspeed(options.path, options.target, options.model)
    return each(options.path, COMMANDS[options.command])


Finding = tuple[int, list[str]]
"""An exit code, and lines for the user."""


def each(path: Path, work: Callable[[Path], Finding]) -> int:
    """Run `work` on each checkpoint of `path`; return the worst exit code."""
    from trainer.checkpoint import leftovers

    folders = checkpoints(path)
    worst = 0
    for checkpoint in folders:
        try:
            code, lines = work(checkpoint)
        except ConfigError as error:  # a later format, or a hash without its package
            code = error.exit_code
            lines = [f"{checkpoint.name}  {error}"]
        except (OSError, ValueError, DiskError):
            if checkpoint.is_dir():
                raise
            code = 74
            lines = []
        if code and not checkpoint.is_dir():  # removed by a run that is in progress
            code = 0
            lines = [f"{checkpoint.name}  removed meanwhile"]
        for line in lines:
            print(printable(line))
        worst = max(worst, code)
    for left in leftovers(folders[0].parent) if path != folders[0] else []:
        print(printable(f"{left.name}  left over"))
    return worst


def import_deepspeed(path: Path, target: Path, model: str | None) -> int:
    """Convert a ZeRO checkpoint of DeepSpeed to this format."""
    from trainer.checkpoint import ModelFolder, save
    from trainer.distributed.ranks import ALONE
    from trainer.tools.importers.deepspeed_checkpoint import read_deepspeed

    read = read_deepspeed(path)
    folders = (folder for folder in (path, path.parent) if (folder / "config.json").is_file())
    if (source := model or next(map(str, folders), None)) is None:
        hint = "Give its folder or name with --model"
        expected = "the model's config and tokenizer"
        raise ConfigError(Problem(str(path), "no config.json", expected, hint))
    kept = ModelFolder(partial(_copy_model_files, source))
    made = save(target, *read, kept, ALONE)
    print(f"{made}: resume from it with meshloom train --config ... --resume {made}")
    return 0


def _copy_model_files(source: str, folder: Path) -> None:
    from transformers import AutoConfig, AutoTokenizer

    from trainer.models.door import BUILD_MEMORY, BUILD_SECONDS, bounded, check_folder, opening
    from trainer.models.language.model_config import check_kernels

    expected = "a folder or name with the model's config and tokenizer"
    check_folder(Path(source))
    with opening(f"--model: {source}", expected), bounded(BUILD_MEMORY, BUILD_SECONDS):
        # explicit, since with a default of None the user is asked if the folder's own code may run
        files = [
            k.from_pretrained(source, trust_remote_code=False) for k in (AutoConfig, AutoTokenizer)
        ]
        check_kernels(files[0], f"--model: {source}")
        for one in files:
            one.save_pretrained(folder)


def checkpoints(path: Path) -> list[Path]:
    """List the checkpoints in `path`, oldest first. Raises ConfigError if there is none."""
    from trainer.checkpoint import published

    if (path / "manifest.json").exists():
        return [path]
    if not (folders := published(path) or published(path / "checkpoints")):
        expected = "a run's folder, its folder of checkpoints, or one checkpoint"
        raise ConfigError(Problem(str(path), "no checkpoint", expected))
    return folders


def summarise(path: Path) -> Finding:
    """Show a line for each: step, size, the layout that saved it; check the sizes of files."""
    from trainer.checkpoint import read_description
    from trainer.checkpoint.manifest import DESCRIPTION, check_sizes, read_manifest
    from trainer.storage import size

    if problems := check_sizes(path):
        return 74, [f"{path.name}  damaged: {problems[0]}"]
    records = read_manifest(path)
    line = f"{path.name}  {size(sum(record.size for record in records.values()))}"
    if DESCRIPTION in records:
        description = read_description(path)
        line += f"  {description['position']['samples']:,} samples  {_saved_by(description)}"
    return 0, [line.rstrip()]


def verify(path: Path) -> Finding:
    """Check every byte against the manifest, and that nothing else could be read in its place."""
    from trainer.checkpoint import strangers
    from trainer.checkpoint import verify as wrong

    problems = wrong(path)
    others = list[str]()
    if not problems:  # with a manifest that can be read
        problems, others = strangers(path)
    line = f"{path.name}  {'; '.join(map(str, problems)) or 'good'}"
    if others:
        line += f"; not in the manifest, and not checked: {listed(others)}"
    return 74 if problems else 0, [line]


def show(path: Path) -> Finding:
    """Show the content: position, the layout that saved it, and every tensor."""
    from trainer.checkpoint import read_description
    from trainer.checkpoint.manifest import DESCRIPTION
    from trainer.storage import size

    code, lines = summarise(path)
    if code:
        return code, lines
    if (path / DESCRIPTION).exists():
        description = read_description(path)
        shown = ("position", "seed", "versions")
        content = {key: description[key] for key in shown if key in description}
        lines.append(json.dumps(content, indent=2))
    return 0, [*lines, *(f"  {line}  {size(count)}" for line, count in _tensors(path))]


def _saved_by(description: dict[str, object]) -> str:
    layout = description.get("layout")
    if not isinstance(layout, dict):
        return ""
    names = ("pipeline", "replicate", "shard", "tensor")
    axes = " x ".join(f"{name} {layout[name]}" for name in names if layout[name] > 1)
    return f"{description.get('engine')}: {axes or 'one process'}, ZeRO-{layout['zero_stage']}"


def _tensors(path: Path) -> Iterator[tuple[str, int]]:
    from trainer.checkpoint.manifest import read_manifest
    from trainer.checkpoint.safetensors_stream import read_header

    for name in sorted(read_manifest(path)):
        if name.endswith(".safetensors"):
            for tensor, (dtype, shape, count) in read_header(path / name).items():
                yield f"{name}: {tensor}  {dtype} {' x '.join(map(str, shape)) or 'scalar'}", count


COMMANDS: dict[str, Callable[[Path], Finding]] = {"list": summarise, "verify": verify, "show": show}
