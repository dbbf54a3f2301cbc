"""Chat templates of other trainers: by name, as a file, or as text in their config."""

from __future__ import annotations

import re

from trainer.tools.importers.draft import Draft, Entry
from trainer.tools.importers.tables import read_table

PLACE = "trainer.data.chat_template"
_OWN = f"{PLACE} null: the model's own template, of which theirs is a copy"
_NONE = "no template here renders its turns: give a Jinja file as trainer.data.chat_template"
_BREAK = "there the line break after the token that ends an answer counts in its loss"


def put_named(draft: Draft, entry: Entry, system: str) -> None:
    """Set the template here that renders the same turns as theirs of this name.

    `system`: "axolotl" or "llamafactory". Without such a template the key is lost.
    """
    content = read_table("templates")
    rule = content[system].get(str(entry.value), {})
    model = str(draft.get("trainer.model.name_or_path"))
    if "own" in rule and re.search(rule["own"], model, re.IGNORECASE):
        draft.keep(entry, _OWN)
        return
    if "to" not in rule:
        draft.lose(entry, _NONE)
        return
    draft.put(entry, PLACE, rule["to"])
    if rule.get("thought") == "counts":
        put_counted(draft, entry)
    if "note" in rule:
        draft.note(entry, rule["note"])
    if system == "llamafactory" and content["ends"].get(rule["to"]) == "<|im_end|>":
        draft.note(entry, _BREAK)


def put_counted(draft: Draft, entry: Entry) -> None:
    """Count what the template writes before an answer, such as an empty thought, as theirs does."""
    draft.put(entry, "trainer.data.generation_prompt", "score")


def put_given(draft: Draft, entry: Entry) -> None:
    """Set a template from the name of its file or from its text, which the caller writes to one."""
    text = entry.value
    if not isinstance(text, str):
        draft.lose(entry, "neither the text of a template nor the name of a file")
    elif "{" not in text:
        draft.put(entry, PLACE, text)
    elif draft.add_template(text):
        draft.put(entry, PLACE, draft.template_path)
    else:
        draft.lose(entry, "the config has two templates")


def end_of_text(draft: Draft, entry: Entry) -> None:
    """Report what becomes of the end token that a config sets for the tokenizer.

    It is kept if the chat template ends turns with it: the same tokens are then trained on.
    Otherwise theirs adds it to texts and answers, and the key is lost.
    """
    content = read_table("templates")
    token = str(entry.value)
    ends = content["ends"].get(draft.get(PLACE))
    written = token in content["end_tokens"] and token in (draft.template or "")
    if not entry.is_set:
        draft.skip(entry)
    elif token == ends or written:
        draft.keep(entry, "the chat template ends turns with it")
        draft.note(entry, "the tokenizer that is saved keeps its own end token")
    else:
        draft.lose(entry, "save a tokenizer with it, and name that as trainer.data.tokenizer")
