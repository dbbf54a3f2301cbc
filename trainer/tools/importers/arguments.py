"""The arguments of Hugging Face's Trainer, with those of TRL's and transformers' own scripts."""

from __future__ import annotations

from trainer.config.read import Json
from trainer.errors import ConfigError, Problem
from trainer.tools.importers.draft import Draft, Entry, Roles
from trainer.tools.importers.shared_keys import GROUPS
from trainer.tools.importers.tables import Group, read_table


def defaults(given: Json) -> Json:
    """Return the Trainer's defaults that differ from this trainer's; with `use_peft`, TRL's."""
    content = read_table("arguments")
    values = dict(content["defaults"])
    if given.get("use_peft"):
        values |= content["peft_defaults"]
    if {"dataset_name", "train_file"} & given.keys():
        values |= {"assistant_only_loss": False}
    return values


def _rows(draft: Draft, keys: Roles) -> None:
    """Convert the data keys of transformers' scripts (`block_size`) and TRL's (`max_length`)."""
    trains, predicts = keys["do_train"], keys["do_predict"]
    if predicts.value and not trains.value:
        seen = "saw true without do_train: a prediction"
        raise ConfigError(Problem("do_predict", seen, "a training"))
    draft.skip(trains, predicts)
    hub, file = keys["dataset_name"], keys["train_file"]
    source = hub if hub.key else file
    draft.put(source, "trainer.data.path", source.value)
    window, longest, packing = keys["block_size"], keys["max_length"], keys["packing"]
    for entry in (window, longest):
        draft.put(entry, "trainer.data.sequence_length", entry.value)
    if not window.key:
        entry = packing if packing.key else longest
        draft.put(entry, "trainer.data.documents", "pack" if packing.value else "pad")
    if source.key and not draft.get("trainer.data.evaluation_path"):
        _held_out(draft, keys, hub)


def _held_out(draft: Draft, keys: Roles, hub: Entry) -> None:
    """Convert the evaluation rows; the parts of a hub data set are not known here."""
    share, test = keys["validation_split_percentage"], keys["dataset_test_split"]
    if not share.key:
        share = Entry("validation_split_percentage", 5 if keys["train_file"].key else 0)
    draft.put(share, "trainer.data.evaluation_fraction", share.value / 100)
    if hub.key and draft.get("trainer.evaluation.every"):
        reason = "its rows to evaluate on: a validation_file is carried over"
        draft.lose(test if test.key else hub, reason)
    else:
        draft.skip(test)


SCRIPTS: tuple[Group, ...] = (*GROUPS, _rows)
