"""Keys that all importers of pairs and rewards convert: the loss, lengths, and dropout."""

from __future__ import annotations

import re

from trainer.config.read import read
from trainer.errors import ConfigError
from trainer.storage import Json
from trainer.tools.importers.draft import Draft, Entry, Roles
from trainer.tools.importers.reading import beside

_ONE_FEWER = (
    "theirs counts the tokens of a pair's longer answer with its prompt; here those that are read, "
    "which is one fewer"
)
_SFT = (
    "here a mean over the tokens of the step's chosen answers; theirs is a mean of the means of "
    "answers or micro-batches"
)
_TURNED_OFF = "disable_dropout turns it off, too"
_RATES = "a model's own rates stay here: if it has any, set them to 0 in its config.json"
_ROUTER = "theirs adds the router's loss of a mixture of experts; here pairs and rewards have none"
_RATE = re.compile(r"drop(out)?($|_)|_pdrop$|_dropout")
_HEADS = re.compile("summary|classifier")


def put_pairs(draft: Draft, entry: Entry, loss: str) -> None:
    """Set the task and the loss, for the key that names the loss."""
    draft.put(entry, "trainer.task", "pairs")
    draft.put(entry, "trainer.pairs.loss", loss)


def put_rewards(draft: Draft, entry: Entry) -> None:
    draft.put(entry, "trainer.task", "labels")
    draft.put(entry, "trainer.labels.kind", "reward")


def put_sft(draft: Draft, entry: Entry, weight: float) -> None:
    """Set the weight of the chosen answers' cross-entropy."""
    draft.put(entry, "trainer.pairs.sft_weight", weight)
    if weight:
        draft.note(entry, _SFT)


def put_longest(draft: Draft, entry: Entry) -> None:
    """Set the length of a prompt with its answer: one fewer, as the last token is only a target."""
    draft.put(entry, "trainer.data.sequence_length", int(entry.value) - 1)
    draft.note(entry, _ONE_FEWER)


def turned_off(draft: Draft, keys: Roles) -> None:
    """Convert dropout that theirs turns off, in the model and in an adapter."""
    entry = keys["disable_dropout"]
    adapter = keys["lora_dropout"]
    if not entry.key:
        return
    if not entry.value:
        draft.skip(entry)
        return
    if adapter.value:
        draft.note(adapter, _TURNED_OFF)
    if adapter.key:
        keys["lora_dropout"] = Entry(entry.key, 0.0)
    known = base_config(draft)
    rates = [f"{name} {value:g}" for name, value in known.items() if _is_rate(name, value)]
    if rates:
        reason = f"the model has dropout ({', '.join(rates)}): set it to 0 in its config.json"
        draft.lose(entry, reason)
    elif not known:
        draft.note(entry, _RATES)


def without_router(draft: Draft, entry: Entry, source: Entry) -> None:
    """Report a router's loss, which theirs adds to that of pairs if the model has a router.

    `entry`: the key of its weight, if there is one. `source`: the key to report it under for a
    model whose config is not known.
    """
    known = base_config(draft)
    if entry.key:
        (draft.lose if entry.value else draft.skip)(entry)
    elif known.get("router_aux_loss_coef") and "output_router_logits" in known:
        draft.lose(
            Entry("router_aux_loss_coef", known["router_aux_loss_coef"]), f"{_ROUTER}: set it to 0"
        )
    elif not known:
        draft.note(source, _ROUTER)


def base_config(draft: Draft) -> Json:
    """Return the content of the base's config.json; empty if the base is not a folder here."""
    name = draft.get("trainer.model.name_or_path")
    path = beside(draft.folder, f"{name}/config.json") if isinstance(name, str) else None
    if path is None:
        return {}
    try:
        known: Json = read(path)
    except ConfigError:  # the run reports what is wrong with it
        return {}
    return known


def _is_rate(name: str, value: object) -> bool:
    rate = isinstance(value, int | float) and not isinstance(value, bool) and value > 0
    return rate and bool(_RATE.search(name)) and not _HEADS.search(name)
