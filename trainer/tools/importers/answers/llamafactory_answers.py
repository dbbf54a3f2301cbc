"""LLaMA-Factory's stages dpo and rm."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from trainer.errors import ConfigError, Problem, show
from trainer.storage import Json
from trainer.tools.importers import llamafactory, shared_keys
from trainer.tools.importers.answers.losses import (
    put_longest,
    put_pairs,
    put_rewards,
    put_sft,
    turned_off,
)
from trainer.tools.importers.chat_formats import put_named
from trainer.tools.importers.draft import Draft, Entry, Roles
from trainer.tools.importers.tables import (
    Group,
    OtherTrainer,
    inner_table,
    kind_of_training,
    read_table,
    rows_of,
    table,
)

REFUSED = {
    "kto": "its loss (KTO) compares each answer with an estimate over its micro-batch",
    "ppo": "it samples answers while it trains (PPO)",
}
_KTO_PAIR = "it is an older name of a loss that is not offered"
_HEAD = (
    "theirs is TRL's value head, with a bias and dropout; here transformers' own head for one label"
)
_LONG = "a longer pair is an error; theirs truncates prompt and answers in proportion"
_ADAPTER = "theirs compares with the base without that adapter, here with the model before training"
_LISTS = "set ranking: true and the columns chosen and rejected: other rows have no pairs"


def trainer_of(given: Json) -> OtherTrainer | None:
    """Return the trainer of the stage dpo or rm; None for another.

    Raises ConfigError for a stage that is known and not offered.
    """
    stage = str(given.get("stage"))
    if stage in REFUSED:
        actual = f"saw {show(stage)}: {REFUSED[stage]}"
        raise ConfigError(Problem("stage", actual, "sft, pt, dpo or rm"))
    return _TRAINERS.get(stage)


def _loss(draft: Draft, keys: Roles) -> None:
    loss = keys["loss_type"]
    smoothing = keys["dpo_label_smoothing"]
    sft = keys["pref_ftx"]
    kind = read_table("answers/llamafactory")["losses"].get(str(loss.value))
    if kind is None:
        draft.lose(loss, _KTO_PAIR if loss.value == "kto_pair" else "not known")
        return
    put_pairs(draft, loss, kind)
    draft.put(keys["beta"], "trainer.pairs.beta", keys["beta"].value)
    if smoothing.value and kind == "sigmoid":
        draft.put(smoothing, "trainer.pairs.label_smoothing", smoothing.value)
    if kind == "orpo":
        put_sft(draft, sft if sft.value else loss, 1.0 + (sft.value or 0.0))
    elif sft.value:
        put_sft(draft, sft, float(sft.value))
    if kind == "simpo":
        draft.put(keys["simpo_gamma"], "trainer.pairs.gamma", keys["simpo_gamma"].value)
    else:
        draft.skip(keys["simpo_gamma"])
    if kind not in ("simpo", "orpo") and keys["lora_path"].value:
        draft.lose(keys["lora_path"], _ADAPTER)


def _rewards(draft: Draft, keys: Roles) -> None:
    entry = keys["stage"]
    put_rewards(draft, entry)
    draft.note(entry, _HEAD)


def _samples(draft: Draft, keys: Roles) -> None:
    length = keys["cutoff_len"]
    if draft.get("trainer.task") == "labels":
        draft.put(length, "trainer.data.sequence_length", length.value)
    else:
        put_longest(draft, length)
    draft.put(length, "trainer.data.too_long", "error")
    draft.note(length, _LONG)
    for name in ("packing", "neat_packing"):
        if keys[name].value:
            draft.lose(keys[name], "pairs are not packed there")
        draft.skip(keys[name])
    if keys["template"].is_set:
        put_named(draft, keys["template"], "llamafactory")
    draft.skip(keys["template"])


def _data(draft: Draft, keys: Roles) -> None:
    content = read_table("answers/llamafactory")
    rows = {**inner_table("llamafactory"), **dict(rows_of(content["inner"]))}
    llamafactory.put_data(draft, keys, rows, _source)


def _source(part: Draft, keys: Roles) -> None:
    """Convert one data set of ranked answers."""
    path = keys["file_name"]
    kind = keys["formatting"]
    ranking = keys["ranking"]
    query = keys["columns.query"]
    part.put(path, "path", str(path.value))
    for side in ("chosen", "rejected"):
        column = keys[f"columns.{side}"]
        if column.key:
            part.put(column, f"{side}_column", str(column.value))
        else:
            part.lose(kind, _LISTS)
    if ranking.value is not True:
        part.lose(ranking if ranking.key else kind, _LISTS)
    part.skip(ranking)
    if kind.value == "alpaca":
        prompt = keys["columns.prompt"]
        column = prompt if prompt.key else Entry(kind.key, "instruction")
        with_input = not part.given.get("columns") or query.value == "input"
        part.put(kind, "records", "instruction" if with_input else "chat")
        part.put(column, "prompt_column", str(column.value))
        if query.value not in (None, "", "input"):
            part.lose(query, "the column is called input here")
        part.skip(query)
    elif kind.value in ("sharegpt", "openai"):
        messages = keys["columns.messages"]
        usual = "messages" if kind.value == "openai" else "conversations"
        column = messages if messages.key else Entry(kind.key, usual)
        part.put(column, "prompt_column", str(column.value))
        part.keep(kind, "the prompt's messages, and one message for each answer")
    else:
        part.lose(kind)


def _trainer(kind: str, own: Group) -> OtherTrainer:
    groups: tuple[Group, ...] = (
        llamafactory.stage,
        _data,
        turned_off,
        own,
        *shared_keys.GROUPS,
        llamafactory.recomputation,
        _samples,
    )
    content = read_table("answers/llamafactory")[kind]
    return kind_of_training(content, table("llamafactory"), llamafactory.defaults, groups)


_GROUPS: Mapping[str, tuple[str, Callable[[Draft, Roles], None]]] = {
    "dpo": ("pairs", _loss),
    "rm": ("rewards", _rewards),
}
_TRAINERS = {stage: _trainer(kind, own) for stage, (kind, own) in _GROUPS.items()}
