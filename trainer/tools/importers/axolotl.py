"""Axolotl's YAML: its defaults, and the conversion of keys that belong together."""

from __future__ import annotations

import re

from trainer.errors import show
from trainer.storage import Json
from trainer.tools.importers import shared_keys
from trainer.tools.importers.chat_formats import end_of_text, put_given, put_named
from trainer.tools.importers.draft import OTHERWISE, Draft, Entry, Roles
from trainer.tools.importers.sources import put_share, put_sources
from trainer.tools.importers.tables import Group, Table, fill, inner_table, read_table

PLACES = {
    "datasets": "trainer.data: ",
    "pretraining_dataset": "trainer.data: ",
    "test_datasets": "held-out data: ",
}


def defaults(given: Json) -> Json:
    """Return Axolotl's defaults that differ from this trainer's."""
    values = dict(read_table("axolotl")["defaults"])
    steps = given.get("max_steps")
    if {"warmup_steps", "warmup_ratio"} & given.keys() or type(steps) is not int or steps <= 0:
        values["warmup_ratio"] = 0.03
    else:
        values["warmup_steps"] = min(int(0.03 * steps), 100)
    if "batch_size" not in given:
        values["gradient_accumulation_steps"] = 1
    if not {"save_steps", "saves_per_epoch"} & given.keys():
        values["save_strategy"] = "epoch"
    return values | ({"lora_dropout": 0.0} if given.get("adapter") else {"adapter": ""})


def model(draft: Draft, keys: Roles) -> None:
    """Accept a `model_type` that is a causal language model; another is lost.

    `base_model_config` is accepted if it is the base model itself. Raises ConfigError for a
    classifier or a reward model.
    """
    config = keys["base_model_config"]
    kind = keys["model_type"]
    if config.value == draft.given.get("base_model"):
        draft.skip(config)
    if str(kind.value).endswith("ForCausalLM"):
        draft.skip(kind)
    elif re.search("Classification|Reward", str(kind.value)):
        raise kind.refused("a causal language model")


def batch(draft: Draft, keys: Roles) -> None:
    """Convert the batch sizes: Axolotl's `batch_size` is micro-batch times accumulation."""
    micro = keys["micro_batch_size"]
    whole = keys["batch_size"]
    accumulation = keys["gradient_accumulation_steps"]
    draft.put(micro, "train_micro_batch_size_per_gpu", micro.value)
    if accumulation.key:
        draft.put(accumulation, "gradient_accumulation_steps", accumulation.value)
    elif whole.key and micro.value > 0 and whole.value % micro.value == 0:
        draft.put(whole, "gradient_accumulation_steps", int(whole.value // micro.value))
    else:
        draft.lose(whole, f"it is no multiple of the micro-batch size, {show(micro.value)}")


def layout(draft: Draft, keys: Roles) -> None:
    """Convert the parallel axes: with the number of devices, they decide the global batch size."""
    tensor = keys["tensor_parallel_size"]
    context = keys["context_parallel_size"]
    for entry, path in (
        (tensor, "tensor_parallel.autotp_size"),
        (context, "sequence_parallel_size"),
        (keys["dp_replicate_size"], "trainer.mesh.replicate"),
    ):
        if type(entry.value) is int and entry.value > 1:
            draft.put(entry, path, entry.value)
            draft.replace(entry, "trainer.engine", "mesh")
        elif not entry.is_set or entry.value == 1:
            draft.skip(entry)
    draft.skip(keys["dp_shard_size"])  # here it is the devices that the other axes leave


def weights(draft: Draft, keys: Roles) -> None:
    """Note that Axolotl keeps weights in bfloat16 if it computes in bfloat16.

    Nothing is noted with DeepSpeed, FSDP or an adapter, which keep float32 in both.
    """
    masters = draft.base or draft.get("trainer.adapter.type") or draft.get("trainer.engine")
    bf16 = keys["bf16"]
    if bf16.value in (True, 1, "auto") and draft.explicit(bf16) and not masters:
        draft.note(bf16, shared_keys.LOW_WEIGHTS)


def _samples(draft: Draft, keys: Roles) -> None:
    length = keys["sequence_len"]
    packing = keys["sample_packing"]
    excess = keys["excess_length_strategy"]
    stream = keys["pretraining_dataset"].value
    decides = packing if packing.key else length
    kinds = [str(part.get("type", "")) for part in parts_of(keys["datasets"])]
    texts = [kind.startswith("completion") for kind in kinds]
    draft.put(length, "trainer.data.sequence_length", length.value)
    if stream or (texts and all(texts)):  # long texts are split, and no part is lost
        draft.put(decides, "trainer.data.documents", "concatenate")
        draft.put(decides, "trainer.data.isolate", True)
        draft.skip(excess, keys["train_on_inputs"])
        if not packing.value and not stream:
            draft.lose(length, "there each text is a sample of its own; here several share one")
        return
    if keys["train_on_inputs"].is_set:
        draft.lose(keys["train_on_inputs"], OTHERWISE)
    draft.skip(keys["train_on_inputs"])
    draft.put(decides, "trainer.data.documents", "pack" if packing.value else "pad")
    if any(texts):
        draft.lose(length, "a long text is split there; here it is dropped or truncated")
    if excess.value in ("raise", "truncate", "drop"):
        ours = "error" if excess.value == "raise" else excess.value
        draft.put(excess, "trainer.data.too_long", ours)


def template(draft: Draft, keys: Roles) -> None:
    text = keys["chat_template_jinja"]
    name = keys["chat_template"]
    if text.value:
        put_given(draft, text)
    if str(name.value) in ("", "none", "tokenizer_default", "jinja") or not name.is_set:
        draft.skip(name)
    else:
        put_named(draft, name, "axolotl")
    end_of_text(draft, keys["special_tokens.eos_token"])


def put_data(draft: Draft, keys: Roles, rows: Table, source: Group) -> None:
    """Convert the data sets and the held-out share.

    Each data set is converted by `rows`, the rules of its keys, and `source`, a function of those
    keys that belong together.
    """
    for role, place in PLACES.items():
        entry = keys[role]
        test = role == "test_datasets"
        given = parts_of(entry)
        parts = []
        for at, own in enumerate(given):
            part = Draft(own, draft.folder, place, f"{entry.key}[{at}].")
            fill(part, rows, {"type": ""}, [source])
            parts.append(draft.take(part))
        if parts:
            labels = [str(part.get("path")) for part in given]
            put_sources(draft, entry, parts, labels, test=test)
    put_share(draft, keys["val_set_size"])


def _data(draft: Draft, keys: Roles) -> None:
    put_data(draft, keys, inner_table("axolotl"), _source)


def parts_of(entry: Entry) -> list[Json]:
    """Return the sections of a list of data sets; a path alone becomes one.

    Raises ConfigError for a data set without a path or files.
    """
    listed = entry.value or []
    if not isinstance(listed, list):
        listed = [listed]
    parts = [{"path": part} if isinstance(part, str) else part for part in listed]
    if not all(isinstance(part, dict) and {"path", "data_files"} & part.keys() for part in parts):
        raise entry.refused("a list of sections with a path")
    return parts


def put_path(part: Draft, keys: Roles) -> None:
    """Convert the place of a data set, and the format of its files."""
    path = keys["path"]
    files = keys["data_files"]
    formats = read_table("axolotl")["formats"]
    where = files if files.key else path
    part.put(where, "path", where.value)
    if files.key and str(path.value) in formats:
        part.put(path, "format", formats[str(path.value)])
    elif files.key:
        part.lose(path, "the data_files are read here, not a data set of the Hub")
    ds_type = keys["ds_type"]
    part.put(ds_type, "format", formats.get(str(ds_type.value), str(ds_type.value)))


def _source(part: Draft, keys: Roles) -> None:
    """Convert one data set; Axolotl's `type` is the kind of its rows."""
    put_path(part, keys)
    kind = keys["type"]
    name, _, field = (kind.value if isinstance(kind.value, str) else "own").partition(":")
    messages = keys["field_messages"]
    column = keys["field"]
    if name in ("chat_template", "sharegpt"):
        part.put(kind, "records", "chat")
        usual = "conversations" if name == "sharegpt" else "messages"
        decides = messages if messages.key else kind
        part.put(decides, "chat_column", str(messages.value) if messages.key else usual)
    elif kind.value == "alpaca":
        part.put(kind, "records", "alpaca")
    elif name in ("completion", "pretrain"):
        part.put(kind, "records", "text")
        if column.key or field:
            part.put(column if column.key else kind, "text_column", column.value or field)
    elif kind.value:
        part.lose(kind, OTHERWISE)


GROUPS: tuple[Group, ...] = (
    model,
    batch,
    _data,
    *shared_keys.GROUPS,
    layout,
    weights,
    _samples,
    template,
)
