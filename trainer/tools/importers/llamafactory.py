"""LLaMA-Factory's YAML: its defaults, its keys that belong together, and its data sets."""

from __future__ import annotations

from pathlib import Path

from trainer.config.read import read
from trainer.errors import ConfigError, Problem, show
from trainer.storage import Json
from trainer.tools.importers import arguments, shared_keys
from trainer.tools.importers.chat_formats import put_named
from trainer.tools.importers.draft import OTHERWISE, Draft, Entry, Roles, names, number
from trainer.tools.importers.reading import beside
from trainer.tools.importers.sources import put_share, put_sources
from trainer.tools.importers.tables import Group, Table, fill, inner_table, read_table


def defaults(given: Json) -> Json:
    """Return the Trainer's defaults, with LLaMA-Factory's own, and LoRA's unless it is off."""
    content = read_table("llamafactory")
    values = {**arguments.defaults({}), **content["defaults"]}
    if given.get("finetuning_type", "lora") == "lora":
        rank = number(given.get("lora_rank"))
        values |= content["peft_defaults"]
        values["lora_alpha"] = 2 * (rank if isinstance(rank, int) else 8)
        if given.get("quantization_bit"):
            values["double_quantization"] = True
    return values


def stage(draft: Draft, keys: Roles) -> None:
    """Raise ConfigError for a stage that is not imported, and without `do_train`."""
    kind = keys["stage"]
    trains = keys["do_train"]
    if kind.value not in ("sft", "pt", "dpo", "rm"):
        raise kind.refused("sft, pt, dpo or rm: no other is imported")
    if not trains.value:
        actual = f"saw {show(trains.value)}: LLaMA-Factory then predicts, chats or exports"
        raise ConfigError(Problem("do_train", actual, "true"))
    draft.skip(trains, kind)


def recomputation(draft: Draft, keys: Roles) -> None:
    off = keys["disable_gradient_checkpointing"]
    on = keys["gradient_checkpointing"]
    if on.value and not off.value:
        draft.put(on, "trainer.activation_checkpointing", "full")
    else:
        draft.skip(on, off)


def _samples(draft: Draft, keys: Roles) -> None:
    length = keys["cutoff_len"]
    packing = keys["packing"]
    neat = keys["neat_packing"]
    template = keys["template"]
    texts = keys["stage"].value == "pt"
    draft.put(length, "trainer.data.sequence_length", length.value)
    stream = texts and packing.value is not False
    decides = packing if packing.key else length
    if neat.value:
        draft.put(neat, "trainer.data.documents", "pack")
    elif stream:
        draft.put(decides, "trainer.data.documents", "concatenate")
    else:
        draft.put(decides, "trainer.data.documents", "pack" if packing.value else "pad")
        if packing.value:
            draft.lose(
                packing, "there documents in a sample attend to one another: set neat_packing: true"
            )
    if not stream:
        draft.put(length, "trainer.data.too_long", "error")
        draft.note(length, "a longer sample is an error; theirs truncates question and answer")
    if texts or not template.is_set:
        draft.skip(template)
    else:
        put_named(draft, template, "llamafactory")


def put_data(draft: Draft, keys: Roles, rows: Table, source: Group) -> None:
    """Convert the data sets and the held-out share.

    Each data set is converted by `rows`, the rules of its keys, and `source`, a function of those
    keys that belong together.
    """
    folder = str(keys["dataset_dir"].value)
    info_path = beside(draft.folder, f"{folder}/dataset_info.json")
    info = read(info_path) if info_path else {}
    draft.skip(keys["dataset_dir"])
    limit = keys["max_samples"]
    for role in ("dataset", "eval_dataset"):
        entry = keys[role]
        test = role == "eval_dataset"
        if not entry.value:
            continue
        where = str(info_path.parent if info_path else folder)
        known = {name: _known(draft, entry, name, info, where) for name in names(entry.value)}
        parts = [_data_set(draft, own, f"{name}.", rows, source) for name, own in known.items()]
        if limit.value and not test:
            draft.keep(limit, "trainer.data: max_rows")
            parts = [{**part, "max_rows": int(limit.value)} for part in parts]
        put_sources(draft, entry, parts, names(entry.value), test=test)
    put_share(draft, keys["val_size"])


def _data(draft: Draft, keys: Roles) -> None:
    put_data(draft, keys, inner_table("llamafactory"), _source)


def _known(draft: Draft, entry: Entry, name: str, info: dict[str, object], folder: str) -> Json:
    """Return the entry of a data set in `dataset_info.json`; without one, `entry` is lost."""
    known = info.get(name)
    if not isinstance(known, dict):
        draft.lose(entry, f"{folder}/dataset_info.json has no {show(name)}")
        return {}
    if "file_name" in known and "hf_hub_url" not in known:
        return known | {"file_name": str(Path(folder) / str(known["file_name"]))}
    return known


def _data_set(draft: Draft, known: Json, prefix: str, rows: Table, source: Group) -> Json:
    """Convert a data set's entry in `dataset_info.json`; without one its name is its path."""
    if not known:
        return {"path": prefix.removesuffix(".")}
    part = Draft(known, draft.folder, "trainer.data: ", prefix)
    fill(part, rows, {"formatting": "alpaca"}, [source])
    return draft.take(part)


def _source(part: Draft, keys: Roles) -> None:
    path = keys["file_name"]
    kind = keys["formatting"]
    messages = keys["columns.messages"]
    prompt = keys["columns.prompt"]
    response = keys["columns.response"]
    part.put(path, "path", str(path.value))
    if kind.value == "alpaca" and set(part.given.get("columns", ())) == {"prompt"}:
        part.put(prompt, "records", "text")
        part.put(prompt, "text_column", prompt.value)
    elif kind.value == "alpaca":
        part.put(kind, "records", "instruction")
        for entry, usual in ((prompt, "instruction"), (response, "output")):
            if entry.value == usual:
                part.skip(entry)
            else:
                part.lose(entry, f"the column is called {usual} here")
    else:
        part.put(kind, "records", "chat")
        usual = "messages" if kind.value == "openai" else "conversations"
        column = messages if messages.key else Entry(kind.key, usual)
        part.put(column if messages.key else kind, "chat_column", column.value)
        if kind.value not in ("sharegpt", "openai"):
            part.lose(kind, OTHERWISE)


GROUPS: tuple[Group, ...] = (stage, _data, *shared_keys.GROUPS, recomputation, _samples)
