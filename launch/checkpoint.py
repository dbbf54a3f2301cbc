#!/usr/bin/env python3
"""List, verify, look into and import checkpoints. See --help."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

EPILOG = """
  launch/checkpoint.py list runs/zero2            the checkpoints of a run
  launch/checkpoint.py verify runs/zero2          every byte of all of them against their manifests
  launch/checkpoint.py show runs/zero2/checkpoints/step-000100
  launch/checkpoint.py import old/checkpoint-500 imported --model my-llama
                                                  a ZeRO checkpoint of DeepSpeed, to go on from with --resume

PATH is a run's folder, its folder of checkpoints, or one checkpoint. Exit codes: 0 good, 64 nothing there, 65 not data,
74 damaged.
"""


def main() -> int:
    parser = argparse.ArgumentParser(
        description="List, verify, look into and import checkpoints.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, work in COMMANDS.items():
        commands.add_parser(name, help=work.__doc__).add_argument("path", type=Path, metavar="PATH")
    importing = commands.add_parser("import", help=import_deepspeed.__doc__)
    importing.add_argument("path", type=Path, metavar="PATH", help="global_stepN, or the folder above it")
    importing.add_argument("target", type=Path, metavar="TARGET", help="where step-N is made")
    importing.add_argument("--model", help="folder or name with config and tokenizer, if PATH has none")
    options = parser.parse_args()
    from trainer.errors import MeshloomError

    try:
        if options.command == "import":
            return import_deepspeed(options.path, options.target, options.model)
        return each(options.path, COMMANDS[options.command])
    except MeshloomError as error:
        print(error.render(), file=sys.stderr)
        return error.exit_code


def each(path: Path, work: Callable[[Path], int]) -> int:
    """Do `work` for each checkpoint of `path`; the worst of the exit codes."""
    from trainer.checkpoint import leftovers

    found = checkpoints(path)
    code = max(work(checkpoint) for checkpoint in found)
    for left in leftovers(found[0].parent) if path != found[0] else []:
        print(f"{left.name}  left over")
    return code


def import_deepspeed(path: Path, target: Path, model: str | None) -> int:
    """A checkpoint of this format from a ZeRO checkpoint of DeepSpeed."""
    from trainer.checkpoint import save
    from trainer.checkpoint.from_deepspeed import read_deepspeed
    from trainer.errors import ConfigError, Problem
    from trainer.ranks import ALONE

    found = read_deepspeed(path)
    source = model or next((str(p) for p in (path, path.parent) if (p / "config.json").is_file()), None)
    if source is None:
        mend = "Give its folder or name with --model"
        raise ConfigError(Problem(str(path), "no config.json", "the model's config and tokenizer", mend))
    made = save(target, found.state, found.pieces, found.description, partial(_copy_model_files, source), ALONE)
    print(f"{made}: go on from it with launch/train.py --config ... --resume {made}")
    return 0


def _copy_model_files(source: str, folder: Path) -> None:
    from transformers import AutoConfig, AutoTokenizer

    from trainer.errors import ConfigError, Problem

    try:
        AutoConfig.from_pretrained(source).save_pretrained(folder)
        AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    except (OSError, ValueError) as error:
        expected = "a folder or name with the model's config and tokenizer"
        raise ConfigError(Problem(f"--model: {source}", str(error).splitlines()[0], expected)) from error


def checkpoints(path: Path) -> list[Path]:
    """What `path` holds, oldest first. Raises ConfigError if that is none."""
    from trainer.checkpoint import published
    from trainer.errors import ConfigError, Problem

    if (path / "manifest.json").exists():
        return [path]
    found = published(path) or published(path / "checkpoints")
    if not found:
        expected = "a run's folder, its folder of checkpoints, or one checkpoint"
        raise ConfigError(Problem(str(path), "no checkpoint", expected))
    return found


def summarise(path: Path) -> int:
    """One line each: step, size, what saved it; whether the files have their sizes."""
    from trainer.checkpoint import read_description
    from trainer.checkpoint.disk import size
    from trainer.checkpoint.manifest import DESCRIPTION, check_sizes, read_manifest

    problems = check_sizes(path)
    if problems:
        print(f"{path.name}  damaged: {problems[0]}")
        return 74
    records = read_manifest(path)
    line = f"{path.name}  {size(sum(record.size for record in records.values()))}"
    if DESCRIPTION in records:
        description = read_description(path)
        line += f"  {description['position']['samples']:,} samples  {_saved_by(description)}"
    print(line.rstrip())
    return 0


def verify(path: Path) -> int:
    """Every byte against the manifest."""
    from trainer.checkpoint import verify as wrong

    problems = wrong(path)
    print(f"{path.name}  {'; '.join(map(str, problems)) if problems else 'good'}")
    return 74 if problems else 0


def show(path: Path) -> int:
    """What is in it: position, what saved it, and every tensor."""
    from trainer.checkpoint import read_description
    from trainer.checkpoint.disk import size
    from trainer.checkpoint.manifest import DESCRIPTION

    if code := summarise(path):
        return code
    if (path / DESCRIPTION).exists():
        description = read_description(path)
        told = {key: description[key] for key in ("position", "seed", "versions") if key in description}
        print(json.dumps(told, indent=2))
    for line, count in _tensors(path):
        print(f"  {line}  {size(count)}")
    return 0


def _saved_by(description: dict[str, object]) -> str:
    layout = description.get("layout")
    if not isinstance(layout, dict):
        return ""
    axes = [f"{name} {layout[name]}" for name in ("pipeline", "replicate", "shard", "tensor") if layout[name] > 1]
    return f"{description.get('engine')}: {' x '.join(axes) or 'one process'}, ZeRO-{layout['zero_stage']}"


def _tensors(path: Path) -> Iterator[tuple[str, int]]:
    from trainer.checkpoint.manifest import read_manifest
    from trainer.checkpoint.safetensors_stream import read_header

    for name in sorted(read_manifest(path)):
        if name.endswith(".safetensors"):
            for tensor, (dtype, shape, count) in read_header(path / name).items():
                yield f"{name}: {tensor}  {dtype} {' x '.join(map(str, shape)) or 'scalar'}", count


COMMANDS: dict[str, Callable[[Path], int]] = {"list": summarise, "verify": verify, "show": show}

if __name__ == "__main__":
    sys.exit(main())
