"""The tokens of an answer that the chat template's generation prompt has written at inference.

A template may begin an answer with an empty thought, which the prompt for an answer without
thinking has, too, as Qwen3's. A model is given these tokens, and never writes them
(NVIDIA-NeMo/Automodel#3739).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Literal

GenerationPrompt = Literal["mask", "score"]
Render = Callable[[bool, Mapping[str, object]], str | None]
"""Renders the turns before an answer, with the generation prompt if True, and with variables of the
template; returns None if the template rejects them."""

_SWITCHES = ("enable_thinking", "thinking")
"""The variables with which templates turn thinking off."""


def supplied(template: str, render: Render, text: str) -> int:
    """Return the characters of `text`, a rendered chat, up to the end of an answer's prompt.

    The prompt is the longest of those that the template has for an answer with and without
    thinking, of which the chat has all. 0 if none is.
    """
    bare = render(False, {})
    if bare is None or not text.startswith(bare):
        return 0
    fitting = [
        prompt for prompt in _prompts(template, render) if text.startswith(prompt, len(bare))
    ]
    return len(bare) + max(map(len, fitting)) if fitting else 0


def _prompts(template: str, render: Render) -> Iterator[str]:
    """Yield the generation prompt, and that of an answer without thinking."""
    modes: list[Mapping[str, object]] = [{}]
    modes += [{name: False} for name in _SWITCHES if name in template]
    for mode in modes:
        before = render(False, mode)
        prompted = render(True, mode)
        if before is not None and prompted is not None and prompted.startswith(before):
            yield prompted[len(before) :]
