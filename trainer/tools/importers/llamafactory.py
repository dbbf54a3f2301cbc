"""LLaMA-Factory's YAML: the Trainer's arguments and its own, and data sets listed in
`dataset_info.json`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainer.config.grammar import show
from trainer.config.read import Json, read
from trainer.errors import ConfigError, Problem
from trainer.tools.importers import arguments, shared_keys
from trainer.tools.importers.draft import (
    Draft,
    Entry,
    Group,
    Roles,
    data,
    fill,
    names,
    number,
    tables,
)
from trainer.tools.importers.reading import beside
from trainer.tools.importers.sources import put_share, put_sources

_OWN, _DATA_SET = tables("llamafactory")
TABLE = {
    key: row
    for key, row in arguments.TABLE.items()
    if row.section != "carried"
    or not str(row.says).startswith(("@rows", "@adapter", "trainer.data"))
} | _OWN


def defaults(given: Json) -> Json:
    """Return the Trainer's defaults, with LoRA of rank 8, a cut at 2048 tokens, and activation
    checkpointing.
    """
    lora = given.get("finetuning_type", "lora") == "lora"
    rank = number(given.get("lora_rank"))
    rank = rank if isinstance(rank, int) else 8
    return {
        **arguments.defaults({}),
        **data("llamafactory")["defaults"],
        **(
            {"lora_rank": 8, "lora_alpha": 2 * rank, "lora_dropout": 0.0, "lora_target": "all"}
            if lora
            else {}
        ),
    }


def _stage(draft: Draft, roles: Roles) -> None:
    """Raise ConfigError for anything but training on text."""
    entry, trains = roles["kind"], roles.get("trains")
    if entry.value not in ("sft", "pt"):
        raise ConfigError(
            Problem(entry.key, f"saw {show(entry.value)}", "sft or pt: no other is offered")
        )
    if trains is None or not trains.value:
        seen = (
            f"saw {show(trains and trains.value)}: LLaMA-Factory predicts, chats or exports with it"
        )
        raise ConfigError(Problem("do_train", seen, "true: a training"))
    draft.skip(trains)
    draft.skip(entry)


def _samples(draft: Draft, roles: Roles) -> None:
    draft.put(roles["longest"], "trainer.data.sequence_length", roles["longest"].value)
    packing, neat = roles.get("packing"), roles.get("neat")
    stream = draft.given.get("stage") == "pt" and not (packing and packing.value is False)
    if neat and neat.value:
        draft.put(neat, "trainer.data.documents", "pack")
    elif packing and packing.value and not stream:
        draft.put(packing, "trainer.data.documents", "pack")
        draft.lose(
            packing,
            "documents in one sample do not see one another here, as with neat_packing: true",
        )
    elif stream:
        draft.put(packing or roles["longest"], "trainer.data.documents", "concatenate")
    else:
        draft.put(packing or roles["longest"], "trainer.data.documents", "pad")
    if not stream:
        draft.put(
            roles["longest"],
            "trainer.data.too_long",
            "error",
            "theirs cuts question and answer in proportion",
        )
    for role, learned in (("last", "last_assistant"), ("all", "all")):
        if (entry := roles.get(role)) and entry.value:
            draft.put(entry, "trainer.data.loss_on", learned)
    if (template := roles.get("template")) and draft.given.get("stage") == "pt":
        draft.skip(template)
    elif template:
        draft.lose(
            template,
            (
                "the tokenizer's own chat template is used, or a file that "
                "trainer.data.chat_template "
                "names"
            ),
        )


def _data(draft: Draft, roles: Roles) -> None:
    folder = str(roles["folder"].value)
    info_path = beside(draft.folder, f"{folder}/dataset_info.json")
    info = read(info_path) if info_path else {}
    draft.skip(roles["folder"])
    for role, entry in roles.items():
        if role not in ("train", "test") or not entry.value:
            continue
        found = str(info_path.parent if info_path else folder)
        parts = [_data_set(draft, entry, name, info, found) for name in names(entry.value)]
        if role == "train" and (most := roles.get("most")) and most.value:
            draft.keep(most, "trainer.data: max_rows")
            parts = [part | {"max_rows": int(most.value)} for part in parts]
        put_sources(draft, entry, parts, names(entry.value), test=role == "test")
    put_share(draft, roles["held"])


def _data_set(draft: Draft, entry: Entry, name: str, info: dict[str, Any], folder: str) -> Json:
    """Convert a data set by its name in `dataset_info.json`."""
    known = info.get(name)
    if not isinstance(known, dict):
        draft.lose(entry, f"{folder}/dataset_info.json has no {show(name)}")
        return {"path": str(Path(folder) / name)}
    if "file_name" in known and "hf_hub_url" not in known:
        known = known | {"file_name": str(Path(folder) / str(known["file_name"]))}
    part = Draft(known, draft.folder, "trainer.data: ", f"{name}.")
    fill(part, _DATA_SET, {"formatting": "alpaca"}, {"source": _source})
    return draft.take(part)


def _source(part: Draft, roles: Roles) -> None:
    if path := roles.get("path"):
        part.put(path, "path", str(path.value))
    kind = roles["formatting"]
    columns = {key: roles[key] for key in ("prompt", "response") if key in roles}
    if kind.value == "alpaca" and columns and set(part.given["columns"]) == {"prompt"}:
        part.put(columns["prompt"], "records", "text")
        part.put(columns["prompt"], "text_column", columns["prompt"].value)
    elif kind.value == "alpaca":
        part.put(kind, "records", "instruction")
        for key, usual in (("prompt", "instruction"), ("response", "output")):
            if (entry := columns.get(key)) and entry.value != usual:
                part.lose(entry, f"it is called {usual} here")
            elif entry:
                part.skip(entry)
    else:
        part.put(kind, "records", "chat")
        usual = "messages" if kind.value == "openai" else "conversations"
        part.put(
            roles.get("messages", kind),
            "chat_column",
            roles.get("messages", kind._replace(value=usual)).value,
        )
        if kind.value not in ("sharegpt", "openai"):
            part.lose(kind, "only alpaca, sharegpt and openai are read")


GROUPS: dict[str, Group] = {
    "stage": _stage,
    **shared_keys.GROUPS,
    "samples": _samples,
    "data": _data,
}
