"""The arguments of Hugging Face's Trainer, and those added by TRL's and transformers' own
scripts.
"""

from __future__ import annotations

from trainer.config.read import Json
from trainer.errors import ConfigError, Problem
from trainer.tools.importers.draft import Draft, Entry, Group, Roles, data, tables
from trainer.tools.importers.shared_keys import GROUPS

TABLE = tables("arguments")[0]


def defaults(given: Json) -> Json:
    """Return the Trainer's defaults that differ from this trainer's; with `use_peft`, TRL's."""
    return {
        **data("arguments")["defaults"],
        **({"lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.05} if given.get("use_peft") else {}),
        **({"assistant_only_loss": False} if {"dataset_name", "train_file"} & given.keys() else {}),
    }


def _rows(draft: Draft, roles: Roles) -> None:
    """Convert the data keys of transformers' scripts (`block_size`) and of TRL (`max_length`,
    `packing`).
    """
    trains, predicts = (
        bool((entry := roles.get(role)) and entry.value) for role in ("trains", "predicts")
    )
    if predicts and not trains:
        raise ConfigError(
            Problem("do_predict", "saw true without do_train: a prediction", "a training")
        )
    draft.skip(roles.get("trains"), roles.get("predicts"))
    for role in ("hub", "file"):
        if (entry := roles.get(role)) and (role == "hub" or "hub" not in roles):
            draft.put(entry, "trainer.data.path", entry.value)
    for role in ("window", "longest"):
        if entry := roles.get(role):
            draft.put(entry, "trainer.data.sequence_length", entry.value)
    if (entry := roles.get("packing") or roles.get("longest")) and "window" not in roles:
        packs = "packing" in roles and bool(entry.value)
        draft.put(entry, "trainer.data.documents", "pack" if packs else "pad")
    if entry := roles.get("answers"):
        draft.put(entry, "trainer.data.loss_on", "assistant" if entry.value else "all")
    if {"hub", "file"} & roles.keys():
        _held_out(draft, roles)


def _held_out(draft: Draft, roles: Roles) -> None:
    """Convert the evaluation rows; it is unknown here if a hub data set has a part for
    evaluation.
    """
    if draft.has("trainer.data.evaluation_path"):
        return
    held = roles.get("held") or Entry("validation_split_percentage", 5 if "file" in roles else 0)
    draft.put(held, "trainer.data.evaluation_fraction", held.value / 100)
    test = roles.get("test")
    if "hub" in roles and draft.has("trainer.evaluation.every"):
        draft.lose(
            test or roles["hub"], "its rows to evaluate on: a validation_file is carried over"
        )
    elif test:
        draft.skip(test)


SCRIPTS: dict[str, Group] = {**GROUPS, "rows": _rows}
