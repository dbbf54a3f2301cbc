"""`meshloom generate`, `chat` and `evaluate`: the model of a run, a checkpoint or a folder."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from trainer.command import parser_of, reporting

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from trainer.models.opened import Adapted

PATH = """
PATH is a run's folder (of an unfinished one, its newest whole checkpoint is taken), a checkpoint,
or any folder of a Hugging Face model or a LoRA adapter. GPUs are used if there are any.
Several PATHs are LoRA adapters on one base, which is loaded once: each continues the text.
In a chat, a line is a message. Ctrl-C ends an answer, Ctrl-D the chat. With several PATHs,
/adapter 2 lets the second one answer from there on.
Exit codes: 0 done, 64 model or options do not fit, 65 no tokenizer, 74 a damaged checkpoint.
"""


@reporting
def main(arguments: Sequence[str], name: str) -> int:
    """Run the command that is the last word of `name`; return its exit code."""
    command = name.rpartition(" ")[2]
    options = _parser(name, command).parse_args(arguments)
    from trainer.data.text.tokenizer import load_tokenizer
    from trainer.models.opened import opened_on_one_base
    from trainer.run.start.folder import model_in
    from trainer.supervise.process import quiet_libraries

    quiet_libraries()
    folders = [model_in(path) for path in options.path]
    trust = options.trust_remote_code
    for folder in folders:
        print(f"model   {folder}", file=sys.stderr)
    if command == "evaluate":
        from trainer.tasks.harness import table

        requested = {"num_fewshot": options.shots, "apply_chat_template": options.chat_template}
        print(table(folders[0], trust, options.tasks.split(","), limit=options.limit, **requested))
        return 0
    adapted = opened_on_one_base(folders, trust)
    tokenizers = [load_tokenizer(str(folder), trust) for folder in folders]
    speakers = [Speaker(*one) for one in zip(adapted, tokenizers, strict=True)]
    (_continue if command == "generate" else _chat)(options, speakers)
    return 0


class Speaker(NamedTuple):
    """A model, or one of the adapters in it, with its tokenizer."""

    adapted: Adapted
    tokenizer: PreTrainedTokenizerBase


def _continue(options: Namespace, speakers: Sequence[Speaker]) -> None:
    for path, speaker in zip(options.path, speakers, strict=True):
        if len(speakers) > 1:
            print(f"adapter {path}", file=sys.stderr)
        speaker.adapted.choose()
        _written(options, speaker)


def _parser(name: str, command: str) -> ArgumentParser:
    parser = parser_of(name, PATH)
    count = 1 if command == "evaluate" else "+"
    parser.add_argument("path", type=Path, metavar="PATH", nargs=count)
    parser.add_argument("--trust-remote-code", action="store_true", help="run a model's own code")
    if command == "evaluate":
        parser.add_argument("--tasks", required=True, metavar="A,B", help="names, or YAML files")
        parser.add_argument("--limit", type=int, metavar="N", help="the first N questions of each")
        parser.add_argument("--shots", type=int, metavar="N", help="examples before each question")
        parser.add_argument("--chat-template", action="store_true", help="ask as in a chat")
        return parser
    if command == "generate":
        parser.add_argument("--prompt", required=True, metavar="TEXT", help="the text to continue")
    else:
        parser.add_argument("--system", metavar="TEXT", help="the system's message")
    text = "the most tokens to write (default: 256)"
    parser.add_argument("--tokens", type=int, default=256, metavar="N", help=text)
    text = "of the draw (default: 0.8); 0: always the likeliest token"
    parser.add_argument("--temperature", type=float, default=0.8, metavar="T", help=text)
    text = "draw from the likeliest tokens that have this probability, at most 50 (default: 1)"
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P", help=text)
    text = "of the random numbers: the same seed draws the same text"
    parser.add_argument("--seed", type=int, metavar="S", help=text)
    return parser


def _chat(options: Namespace, speakers: Sequence[Speaker]) -> None:
    import readline  # noqa: F401  # arrow keys in a line

    speaker = speakers[0]
    turns = [{"role": "system", "content": options.system}] if options.system else []
    with suppress(EOFError, KeyboardInterrupt):
        while True:
            line = input("> " if sys.stdin.isatty() else "").strip()
            if len(speakers) > 1 and line.split()[:1] == ["/adapter"]:
                speaker = _switched(options.path, speakers, line) or speaker
            elif line:
                turns.append({"role": "user", "content": line})
                answer = _written(options, speaker, turns)
                turns.append({"role": "assistant", "content": answer})


def _switched(paths: Sequence[Path], speakers: Sequence[Speaker], line: str) -> Speaker | None:
    """Switch to the adapter whose number a line has; None, with their numbers, if it has none."""
    numbers = {str(number): speaker for number, speaker in enumerate(speakers, start=1)}
    speaker = numbers.get(line.removeprefix("/adapter").strip())
    if speaker is None:
        for number, path in zip(numbers, paths, strict=True):
            print(f"/adapter {number}  {path}", file=sys.stderr)
        return None
    speaker.adapted.choose()
    return speaker


def _written(options: Namespace, speaker: Speaker, turns: Sequence[dict[str, str]] = ()) -> str:
    """Print what a model adds to a prompt, or to a chat's `turns`, up to a Ctrl-C; return it."""
    import torch

    from trainer.tasks.generation import Shown, continued

    if options.seed is not None:
        torch.manual_seed(options.seed % 2**63)
    shown = Shown(speaker.tokenizer, skip_prompt=True, skip_special_tokens=True)
    how = {"temperature": options.temperature, "top_p": options.top_p, "streamer": shown}
    try:
        continued(
            speaker.adapted.model, speaker.tokenizer, turns or options.prompt, options.tokens, **how
        )
    except KeyboardInterrupt:
        shown.end()
    return shown.text
