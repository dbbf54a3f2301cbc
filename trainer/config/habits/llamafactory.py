"""LLaMA-Factory's YAML: the Trainer's arguments and its own, and data sets listed in `dataset_info.json`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainer.config.grammar import show
from trainer.config.habits import arguments, training
from trainer.config.habits.draft import Asked, Draft, Group, Roles, fill, names, number, tables
from trainer.config.habits.reading import beside
from trainer.config.habits.sources import put_sources
from trainer.config.read import Json, read
from trainer.errors import ConfigError, Problem

_OWN, _ENTRY = tables("llamafactory")
TABLE = {
    key: row
    for key, row in arguments.TABLE.items()
    if row.section != "carried" or not str(row.says).startswith(("@rows", "@adapter", "trainer.data"))
} | _OWN
_TAGS = {
    "role_tag": ("from", "role"),
    "content_tag": ("value", "content"),
    "user_tag": ("human", "user"),
    "assistant_tag": ("gpt", "assistant", "bot", "model"),
    "observation_tag": ("observation", "tool", "function_response"),
    "function_tag": ("function_call",),
    "system_tag": ("system",),
}
"""The accepted names of a chat message's keys and roles."""
_NOT_THE_TOKENIZERS = ("default", "empty", "fewshot", "alpaca", "vicuna", "original")
"""Templates that belong to no model."""


def defaults(given: Json) -> Json:
    """Return the Trainer's defaults, with LoRA of rank 8, a cut at 2048 tokens, and activation checkpointing."""
    lora = given.get("finetuning_type", "lora") == "lora"
    rank = number(given.get("lora_rank"))
    rank = rank if isinstance(rank, int) else 8
    return {
        **arguments.defaults({}),
        "stage": "sft",
        "finetuning_type": "lora",
        **({"lora_rank": 8, "lora_alpha": 2 * rank, "lora_dropout": 0.0, "lora_target": "all"} if lora else {}),
        "cutoff_len": 2048,
        "gradient_checkpointing": True,
        "dataset_dir": "data",
        "val_size": 0.0,
    }


def _stage(draft: Draft, roles: Roles) -> None:
    """Raise ConfigError for anything but training on text."""
    asked, trains = roles["kind"], roles.get("trains")
    if asked.value not in ("sft", "pt"):
        raise ConfigError(Problem(asked.key, f"saw {show(asked.value)}", "sft or pt: no other is offered"))
    if trains is None or not trains.value:
        seen = f"saw {show(trains and trains.value)}: LLaMA-Factory predicts, chats or exports with it"
        raise ConfigError(Problem("do_train", seen, "true: a training"))
    draft.skip(trains)
    records = "documents in one stream" if asked.value == "pt" else "chats, instructions and pairs"
    draft.change(asked, f"what is learned is found from the rows: {records}")


def _samples(draft: Draft, roles: Roles) -> None:
    draft.put(roles["longest"], "trainer.data.sequence_length", roles["longest"].value)
    packing, neat = roles.get("packing"), roles.get("neat")
    stream = draft.given.get("stage") == "pt" and not (packing and packing.value is False)
    if neat and neat.value:
        draft.put(neat, "trainer.data.documents", "pack")
    elif packing and packing.value and not stream:
        why = "documents in one sample do not see one another, as with neat_packing"
        draft.put(packing, "trainer.data.documents", "pack", why)
    elif stream:
        draft.put(packing or roles["longest"], "trainer.data.documents", "concatenate")
    else:
        draft.put(packing or roles["longest"], "trainer.data.documents", "pad")
    if (last := roles.get("last")) and last.value:
        draft.put(last, "trainer.data.loss_on", "last_assistant")
    if (template := roles.get("template")) and str(template.value) not in _NOT_THE_TOKENIZERS:
        draft.change(template, "the tokenizer's own chat template is used; trainer.data.chat_template takes a file")


def _data(draft: Draft, roles: Roles) -> None:
    folder = str(roles["folder"].value)
    info_path = beside(draft.folder, f"{folder}/dataset_info.json")
    info = read(info_path) if info_path else {}
    draft.keep(roles["folder"], "where dataset_info.json is")
    for role, asked in roles.items():
        if role not in ("train", "test") or not asked.value:
            continue
        found = str(info_path.parent if info_path else folder)
        parts = [_entry(draft, asked, name, info, found) for name in names(asked.value)]
        if role == "train":
            parts = _weighted(draft, roles, parts)
        put_sources(draft, asked, parts, names(asked.value), test=role == "test")
    held = roles["held"]
    if held.value > 1:
        draft.lose(held, "a share is held out, not a number of rows")
    elif "test" not in roles:
        draft.put(held, "trainer.data.evaluation_fraction", held.value)
    elif not held.value:
        draft.skip(held)


def _weighted(draft: Draft, roles: Roles, parts: list[Json]) -> list[Json]:
    """Add the data sets' shares of an epoch, if they are interleaved by such."""
    mix, weights = roles.get("mix"), roles.get("weights")
    if mix is None or not str(mix.value).startswith("interleave"):
        if mix and mix.value == "concat":
            draft.keep(mix, "an epoch has all rows of each")
        return parts
    shares = [number(text) for text in names(weights.value)] if weights else []
    if weights is None or len(shares) != len(parts) or len(parts) < 2:
        return parts
    draft.change(mix, "each source has its share of the samples of an epoch")
    draft.change(weights, "each source has this share of the samples of an epoch")
    return [part | {"weight": share} for part, share in zip(parts, shares, strict=True)]


def _entry(draft: Draft, asked: Asked, name: str, info: dict[str, Any], folder: str) -> Json:
    """Convert a data set by its name in `dataset_info.json`."""
    entry = info.get(name)
    if not isinstance(entry, dict):
        draft.lose(asked, f"{folder}/dataset_info.json has no {show(name)}")
        return {"path": str(Path(folder) / name)}
    part = Draft(entry, draft.folder, "trainer.data: ", f"{name}.")
    if "file_name" in entry and "hf_hub_url" not in entry:
        part.given = entry | {"file_name": str(Path(folder) / str(entry["file_name"]))}
    fill(part, _ENTRY, {"formatting": "alpaca"}, {"source": _source})
    return draft.take(part)


def _source(part: Draft, roles: Roles) -> None:
    if path := roles.get("path"):
        part.put(path, "path", str(path.value))
    asked = roles.get("columns") or roles["formatting"]
    columns = asked.value if isinstance(asked.value, dict) else {}
    if roles["formatting"].value == "alpaca":
        _instructions(part, asked, columns)
        return
    if roles["formatting"].value not in ("sharegpt", "openai"):
        part.lose(roles["formatting"], "only alpaca, sharegpt and openai are read")
    part.put(roles["formatting"], "records", "chat")
    column = columns.get("messages", "messages" if roles["formatting"].value == "openai" else "conversations")
    part.put(asked, "chat_column", column)
    if tags := roles.get("tags"):
        strange = [tag for tag, value in tags.value.items() if value not in _TAGS.get(tag, ())]
        for tag in strange:
            part.lose(tags, f"{tag} {show(tags.value[tag])}: messages have {' or '.join(_TAGS.get(tag, ()))} there")
        if not strange:
            part.keep(tags, "messages are read so")
    _renamed(part, asked, {"messages": column, "system": "system", "tools": "tools"}, columns)


def _instructions(part: Draft, asked: Asked, columns: Json) -> None:
    """Convert Alpaca's columns; a single column is a text; a prompt and a response of other names are a pair."""
    if set(columns) == {"prompt"}:
        part.put(asked, "records", "text")
        part.put(asked, "text_column", columns["prompt"])
        return
    usual = {"prompt": "instruction", "query": "input", "response": "output", "system": "system", "history": "history"}
    if all(columns.get(key, usual[key]) == usual[key] for key in ("prompt", "response")):
        part.put(asked, "records", "instruction", "instruction and input are the user's turn, by the chat template")
        _renamed(part, asked, usual, columns)
        return
    part.put(asked, "records", "prompt_completion", "text is not put into a chat template")
    for key, ours in (("prompt", "prompt_column"), ("response", "completion_column")):
        part.put(asked, ours, columns.get(key, usual[key]))
    for key in columns.keys() - {"prompt", "response"}:
        if columns[key]:
            part.lose(asked, f"{key} {show(columns[key])}: a pair has a prompt and a completion alone")


def _renamed(part: Draft, asked: Asked, usual: dict[str, str], columns: Json) -> None:
    """Report as lost the columns that have another name here, or that nothing reads."""
    for key, name in columns.items():
        if name not in (usual.get(key), None, ""):
            part.lose(asked, f"{key} {show(name)}: {f'it is called {usual[key]} here' if key in usual else 'not read'}")


GROUPS: dict[str, Group] = {"stage": _stage, **training.GROUPS, "samples": _samples, "data": _data}
