"""Axolotl's YAML: its keys and defaults."""

from __future__ import annotations

import re

from trainer.config.grammar import show
from trainer.config.read import Json
from trainer.errors import ConfigError, Problem
from trainer.tools.importers import arguments, shared_keys
from trainer.tools.importers.draft import Draft, Entry, Group, Roles, data, fill, tables
from trainer.tools.importers.sources import put_share, put_sources

_SHARED = data("axolotl")["shared"]
_OWN, _SOURCE = tables("axolotl")
TABLE = {
    key: row
    for key, row in arguments.TABLE.items()
    if row.section != "carried" or str(row.says)[1:].partition(" ")[0] in _SHARED
} | _OWN
_FORMATS = {
    "json": "jsonl",
    "jsonl": "jsonl",
    "parquet": "parquet",
    "arrow": "arrow",
    "csv": "csv",
    "text": "text",
}
_PLACES = {"train": "trainer.data: ", "stream": "trainer.data: ", "test": "of those held out: "}


def defaults(given: Json) -> Json:
    """Return Axolotl's defaults that differ from this trainer's."""
    steps = None if {"warmup_steps", "warmup_ratio"} & given.keys() else given.get("max_steps")
    warmup: Json = {"warmup_ratio": 0.03}
    if type(steps) is int and steps > 0:
        warmup = {"warmup_steps": min(int(0.03 * steps), 100)}
    return {
        **data("axolotl")["defaults"],
        **({} if "batch_size" in given else {"gradient_accumulation_steps": 1}),
        **warmup,
        **({} if {"save_steps", "saves_per_epoch"} & given.keys() else {"save_strategy": "epoch"}),
        **({"lora_dropout": 0.0} if given.get("adapter") else {"adapter": ""}),
    }


def _model(draft: Draft, roles: Roles) -> None:
    """Convert the base model, if its files say that it is a causal language model."""
    name, config, kind = (roles.get(role) for role in ("name", "config", "class"))
    if name:
        draft.put(name, "trainer.model.name_or_path", name.value)
    draft.skip(config if config and config.value == (name and name.value) else None)
    if kind and str(kind.value).endswith("ForCausalLM"):
        draft.skip(kind)
    elif kind and re.search("Classification|Reward", str(kind.value)):
        raise ConfigError(Problem(kind.key, f"saw {show(kind.value)}", "a causal language model"))


def _batch(draft: Draft, roles: Roles) -> None:
    """Convert the batch sizes: Axolotl's `batch_size` is that of one process, micro-batch times
    accumulation.
    """
    micro, whole, accumulation = roles["micro"], roles.get("whole"), roles.get("accumulation")
    draft.put(micro, "train_micro_batch_size_per_gpu", micro.value)
    if accumulation:
        draft.put(accumulation, "gradient_accumulation_steps", accumulation.value)
    elif whole and micro.value > 0 and whole.value % micro.value == 0:
        draft.put(whole, "gradient_accumulation_steps", int(whole.value // micro.value))
    elif whole:
        draft.lose(
            whole, f"a process's batch, and no multiple of its micro-batch of {show(micro.value)}"
        )


def _samples(draft: Draft, roles: Roles) -> None:
    longest, packing, excess = roles["longest"], roles.get("packing"), roles["excess"]
    draft.put(longest, "trainer.data.sequence_length", longest.value)
    packs = bool(packing and packing.value)
    kinds = [
        str(part.get("type", "")) for part in _parts(Entry("datasets", draft.given.get("datasets")))
    ]
    if (kinds and all(kind.startswith("completion") for kind in kinds)) or draft.given.get(
        "pretraining_dataset"
    ):
        draft.put(
            packing or longest, "trainer.data.documents", "concatenate"
        )  # long texts are cut, and none is lost
        draft.put(packing or longest, "trainer.data.isolate", True)
        draft.skip(excess)
        if not (packs or draft.given.get("pretraining_dataset")):
            draft.lose(
                longest,
                (
                    "without sample_packing each text is a sample of its own there, and here "
                    "several "
                    "fill one"
                ),
            )
        return
    draft.put(packing or longest, "trainer.data.documents", "pack" if packs else "pad")
    if any(kind.startswith("completion") for kind in kinds):
        draft.lose(
            longest,
            "beside other data sets a long text is cut up there, and here dropped or cut off",
        )
    if ours := {"raise": "error", "truncate": "truncate", "drop": "drop"}.get(str(excess.value)):
        draft.put(excess, "trainer.data.too_long", ours)


def _template(draft: Draft, roles: Roles) -> None:
    name, text = roles.get("name"), roles.get("text")
    if text and text.value:
        if "{" in str(text.value):
            draft.lose(text, "write it to a file, and give its path")
        else:
            draft.put(text, "trainer.data.chat_template", str(text.value))
    if name and name.value not in (None, "", "tokenizer_default", "jinja"):
        draft.lose(name, "the tokenizer's own is used, or a file that chat_template_jinja names")


def _data(draft: Draft, roles: Roles) -> None:
    for role in ("train", "stream", "test"):
        if (entry := roles.get(role)) is None or not entry.value:
            continue
        given = _parts(entry)
        parts = []
        for at, own in enumerate(given):
            part = Draft(own, draft.folder, _PLACES[role], f"{entry.key}[{at}].")
            fill(part, _SOURCE, {"type": ""}, {"source": _rows})
            parts.append(draft.take(part))
        put_sources(
            draft, entry, parts, [str(part.get("path")) for part in given], test=role == "test"
        )
    put_share(draft, roles["held"])


def _parts(entry: Entry) -> list[Json]:
    """Return the data sets of a list; a path alone is one, too."""
    listed = entry.value if isinstance(entry.value, list) else [entry.value] if entry.value else []
    parts = [{"path": part} if isinstance(part, str) else part for part in listed]
    if not all(isinstance(part, dict) and {"path", "data_files"} & part.keys() for part in parts):
        raise ConfigError(
            Problem(entry.key, f"saw {show(entry.value)}", "a list of sections with a path")
        )
    return parts


def _rows(part: Draft, roles: Roles) -> None:
    path, files, kind = roles.get("path"), roles.get("files"), roles.get("format")
    where = files or path
    if where is not None:
        part.put(where, "path", where.value)
    if path and files and str(path.value) in _FORMATS:
        part.put(path, "format", _FORMATS[str(path.value)])
    elif path and files:
        part.lose(path, "its files are read, not a data set of the hub")
    if kind:
        part.put(kind, "format", _FORMATS.get(str(kind.value), str(kind.value)))
    _records(part, roles, roles["type"])


def _records(part: Draft, roles: Roles, kind: Entry) -> None:
    """Convert Axolotl's `type` into the kind of rows."""
    name, _, field = (kind.value if isinstance(kind.value, str) else "own").partition(":")
    messages = roles.get("messages")
    if name in ("chat_template", "sharegpt"):
        part.put(kind, "records", "chat")
        usual = "conversations" if name == "sharegpt" else "messages"
        part.put(messages or kind, "chat_column", str(messages.value) if messages else usual)
    elif kind.value == "alpaca":
        part.put(kind, "records", "alpaca")
    elif name in ("completion", "pretrain"):
        part.put(kind, "records", "text")
        column = roles.get("field") or (Entry(kind.key, field) if field else None)
        if column:
            part.put(column, "text_column", column.value)
    elif kind.value:
        part.lose(
            kind,
            "it has a prompt of its own: write its texts as rows with a prompt and a completion",
        )


GROUPS: dict[str, Group] = {
    "model": _model,
    "batch": _batch,
    **shared_keys.GROUPS,
    "samples": _samples,
    "template": _template,
    "data": _data,
}
