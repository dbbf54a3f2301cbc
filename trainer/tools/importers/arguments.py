"""The arguments of Hugging Face's Trainer, with those of TRL's and transformers' own scripts."""

from __future__ import annotations

from trainer.errors import ConfigError, Problem
from trainer.storage import Json
from trainer.tools.importers.chat_formats import end_of_text, put_counted, put_given
from trainer.tools.importers.draft import Draft, Entry, Roles
from trainer.tools.importers.shared_keys import GROUPS
from trainer.tools.importers.sources import put_mixture
from trainer.tools.importers.tables import Group, read_table


def defaults(given: Json) -> Json:
    """Return the Trainer's defaults that differ from this trainer's.

    TRL's defaults are added: those of LoRA with `use_peft`, those of its loss and length with a
    key that names data.
    """
    content = read_table("arguments")
    values = dict(content["defaults"])
    if given.get("use_peft"):
        values |= content["peft_defaults"]
    if {
        "dataset_name",
        "train_file",
        "datasets",
        "dataset_mixture",
        "dataset_mixer",
    } & given.keys():
        values |= {"assistant_only_loss": False}
        if not {"block_size", "max_seq_length", "model_max_length"} & given.keys():
            values |= {"max_length": 1024}
    return values


def data_sets(draft: Draft, keys: Roles) -> None:
    """Convert the data sets of the scripts of transformers, TRL and the alignment handbook.

    Raises ConfigError for a script that only predicts.
    """
    trains = keys["do_train"]
    predicts = keys["do_predict"]
    if predicts.value and not trains.value:
        actual = "saw true without do_train: the script only predicts"
        raise ConfigError(Problem("do_predict", actual, "do_train"))
    draft.skip(trains, predicts)
    hub = keys["dataset_name"]
    file = keys["train_file"]
    source = hub if hub.key else file
    if not keys["datasets"].is_set:
        draft.put(source, "trainer.data.path", source.value)
    if not source.key or keys["datasets"].is_set:  # TRL's own list has precedence
        put_mixture(draft, keys)
    elif keys["dataset_configs"].is_set:
        text = "it is a key of a mixture: with a dataset_name, only dataset_config names a subset"
        draft.note(keys["dataset_configs"], text)
    if source.key and not draft.get("trainer.data.evaluation_path"):
        _held_out(draft, keys)


def _arrangement(draft: Draft, keys: Roles) -> None:
    """Convert the samples of transformers' scripts (`block_size`) and TRL's (`max_length`)."""
    if draft.get("trainer.data.loss_on") == "assistant":  # theirs counts all that a template marks
        put_counted(draft, Entry("assistant_only_loss", True))
    window = keys["block_size"]
    longest = keys["max_length"]
    packing = keys["packing"]
    for entry in (window, longest):
        draft.put(entry, "trainer.data.sequence_length", entry.value)
    if not window.key:
        entry = packing if packing.key else longest
        draft.put(entry, "trainer.data.documents", "pack" if packing.value else "pad")


def _held_out(draft: Draft, keys: Roles) -> None:
    """Convert the held-out share: of files 5 % by default, as in transformers' scripts.

    `dataset_test_split` is left out, as no split can be named for evaluation here.
    """
    share = keys["validation_split_percentage"]
    test = keys["dataset_test_split"]
    if not share.key:
        share = Entry("validation_split_percentage", 5 if keys["train_file"].key else 0)
    draft.put(share, "trainer.data.evaluation_fraction", share.value / 100)
    draft.skip(test)


def template(draft: Draft, keys: Roles) -> None:
    """Convert TRL's chat template: a Jinja file or its text; a tokenizer's folder is lost."""
    text = keys["chat_template"]
    path = keys["chat_template_path"]
    if text.is_set:
        put_given(draft, text)
    if path.is_set and not str(path.value).endswith((".jinja", ".jinja2", ".j2")):
        draft.lose(path, "it is a tokenizer's folder: give the Jinja file of its template")
    elif path.is_set:
        put_given(draft, path)
    end_of_text(draft, keys["eos_token"])


SCRIPTS: tuple[Group, ...] = (data_sets, _arrangement, *GROUPS, template)
