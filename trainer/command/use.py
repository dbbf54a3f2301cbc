"""`meshloom generate`, `chat` and `evaluate`: the model of a run, a checkpoint or a folder."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainer.command import parser_of, reporting
from trainer.errors import ConfigError, DataError, Problem, first_line

PATH = """
PATH is a run's folder (its final model or, while it is unfinished, its newest whole checkpoint), a
checkpoint, or any folder of a Hugging Face model or a LoRA adapter. GPUs are used if there are any.
Exit codes: 0 done, 64 no language model, or an option does not fit it, 65 no tokenizer, or the chat
template refuses the chat, 74 the checkpoint is damaged.
"""


@reporting
def generate(arguments: Sequence[str], name: str) -> int:
    """Run the command `name`; returns its exit code."""
    parser = _parser(name, "Continue a text with a trained model.", writes=True)
    parser.add_argument("--prompt", required=True, metavar="TEXT", help="how it begins")
    options = parser.parse_args(arguments)
    _written(options.prompt, options, *_opened(options))
    return 0


@reporting
def chat(arguments: Sequence[str], name: str) -> int:
    """Run the command `name`; returns its exit code."""
    text = "Chat with a trained model: a line is a message, Ctrl-C ends an answer, Ctrl-D the chat."
    parser = _parser(name, text, writes=True)
    parser.add_argument("--system", metavar="TEXT", help="the system's message")
    options = parser.parse_args(arguments)
    model, tokenizer = _opened(options)
    if not tokenizer.chat_template:
        hint = "meshloom generate continues a text"
        expected = "a model that was trained on chats"
        raise ConfigError(Problem(str(options.path), "no chat template", expected, hint))
    with suppress(ImportError):
        import readline  # noqa: F401  # arrow keys in a line
    turns = [{"role": "system", "content": options.system}] if options.system else []
    with suppress(EOFError, KeyboardInterrupt):
        while True:
            if (line := input("> " if sys.stdin.isatty() else "")).strip():
                turns.append({"role": "user", "content": line})
                answer = _written(_rendered(tokenizer, turns), options, model, tokenizer)
                turns.append({"role": "assistant", "content": answer})
    return 0


@reporting
def evaluate(arguments: Sequence[str], name: str) -> int:
    """Run the command `name`; returns its exit code."""
    parser = _parser(name, "Evaluate a trained model on tasks of lm-eval.")
    text = "names of tasks, or paths of their YAML files, with commas between them"
    parser.add_argument("--tasks", required=True, metavar="A,B", help=text)
    text = "only the first N questions of each"
    parser.add_argument("--limit", type=int, metavar="N", help=text)
    parser.add_argument("--shots", type=int, metavar="N", help="examples before each question")
    text = "ask by the tokenizer's chat template"
    parser.add_argument("--chat-template", action="store_true", help=text)
    options = parser.parse_args(arguments)
    from trainer.tasks.harness import harness_tasks, results

    tasks, asked = harness_tasks(options.tasks.split(",")), {"num_fewshot": options.shots}
    asked |= {"limit": options.limit, "apply_chat_template": options.chat_template}
    found = results(*_opened(options), tasks, **asked)
    from lm_eval.utils import make_table

    kinds = (kind for kind in ("results", "groups") if found.get(kind))
    print(*(make_table(found, kind) for kind in kinds), sep="\n")
    return 0


def _parser(name: str, description: str, *, writes: bool = False) -> argparse.ArgumentParser:
    parser = parser_of(name, description, PATH)
    parser.add_argument("path", type=Path, metavar="PATH", help="a run, a checkpoint or a model")
    text = "run the code that a model brings along"
    parser.add_argument("--trust-remote-code", action="store_true", help=text)
    if writes:
        text = "the most tokens of a text or an answer (default: %(default)s)"
        parser.add_argument("--tokens", type=int, default=256, metavar="N", help=text)
        text = "0 takes the most likely token each time (default: %(default)s)"
        parser.add_argument("--temperature", type=float, default=0.8, metavar="T", help=text)
        text = "draw from the likeliest tokens of this probability (default: %(default)s)"
        parser.add_argument("--top-p", type=float, default=1.0, metavar="P", help=text)
        parser.add_argument("--seed", type=int, metavar="S", help="draw the same again")
    return parser


def _opened(options: argparse.Namespace) -> tuple[Any, Any]:
    """Return the model and its tokenizer. Raises ConfigError, DataError or DiskError."""
    from trainer.data.text.tokenizer import load_tokenizer
    from trainer.models.opened import opened_language_model
    from trainer.run.folder import model_in
    from trainer.supervise.process import quiet_libraries

    quiet_libraries()
    folder, trust = model_in(options.path), options.trust_remote_code
    print(f"model   {folder}", file=sys.stderr)
    model = opened_language_model(folder, trust=trust)
    try:
        return model, load_tokenizer(str(folder), trust)
    except DataError as error:
        hint = "Copy the tokenizer's files into it"
        raise DataError(replace(error.problems[0], mend=hint)) from error


def _written(
    prompt: str | list[int], options: argparse.Namespace, model: Any, tokenizer: Any
) -> str:
    """Show what a model adds to a prompt, up to a Ctrl-C; return it. Raises ConfigError."""
    import torch

    from trainer.tasks.generation import Shown, continued

    if options.seed is not None:
        torch.manual_seed(options.seed)
    shown, how = Shown(tokenizer), (options.tokens, options.temperature, options.top_p)
    try:
        continued(model, tokenizer, prompt, *how, shown)
    except KeyboardInterrupt:
        shown.end()
    return shown.text


def _rendered(tokenizer: Any, turns: list[dict[str, str]]) -> list[int]:
    """Return the tokens of a chat up to where the model answers. Raises DataError."""
    try:
        return list(tokenizer.apply_chat_template(turns, add_generation_prompt=True)["input_ids"])
    except Exception as error:  # a template raises whatever it likes
        seen = f"the chat template refuses it: {first_line(error)}"
        raise DataError(Problem("the chat", seen, "a chat that the template takes")) from error
