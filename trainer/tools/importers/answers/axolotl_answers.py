"""Axolotl's `rl` and `reward_model`."""

from __future__ import annotations

from trainer.errors import ConfigError, Problem, show
from trainer.storage import Json
from trainer.tools.importers import axolotl, shared_keys
from trainer.tools.importers.answers.losses import (
    put_longest,
    put_pairs,
    put_rewards,
    put_sft,
    turned_off,
    without_router,
)
from trainer.tools.importers.answers.trl import dpo_loss
from trainer.tools.importers.chat_formats import PLACE
from trainer.tools.importers.draft import Draft, Entry, Roles, names
from trainer.tools.importers.tables import (
    Group,
    OtherTrainer,
    inner_table,
    kind_of_training,
    read_table,
    rows_of,
    table,
)

PAIRS = ("dpo", "ipo", "simpo", "orpo")
_SAMPLES = "it samples answers while it trains"
REFUSED = {
    "kto": "its loss (KTO) compares each answer with an estimate over its micro-batch",
    "grpo": _SAMPLES,
    "gdpo": _SAMPLES,
    "ebft": _SAMPLES,
}
_SMOOTHING = "whether theirs smooths with it depends on the version of TRL: 1.16 does not"
_TEXTS = (
    "theirs puts the tokenizer's own beginning and end of text around what the template renders; "
    "here they are there only if the template has them"
)
_ADAPTER = "whether theirs compares with the base or with this adapter depends on TRL's version"
_PAIRS = "its rows are not read as pairs: see docs/preferences.md"


def trainer_of(given: Json) -> OtherTrainer | None:
    """Return the trainer of pairs or rewards, if a config asks for it; else None.

    Raises ConfigError for a kind that is known and not offered.
    """
    kind = str(given.get("rl") or "")
    if kind in REFUSED:
        actual = f"saw {show(kind)}: {REFUSED[kind]}"
        raise ConfigError(Problem("rl", actual, "one of " + ", ".join(PAIRS)))
    if kind in PAIRS:
        return _TRAINERS["pairs"]
    return _TRAINERS["rewards"] if given.get("reward_model") and not kind else None


def _loss(draft: Draft, keys: Roles) -> None:
    kind = keys["rl"]
    beta = keys["beta"]
    if kind.value in ("dpo", "ipo"):
        loss = keys["dpo_loss_type"]
        own = loss.is_set and kind.value == "dpo"
        usual = "ipo" if kind.value == "ipo" else "sigmoid"
        given = names(loss.value) if own else [usual]
        dpo_loss(draft, loss if own else kind, given, keys["dpo_loss_weights"], Entry())
        draft.keep(kind, 'trainer.task "pairs"')
        if keys["lora_path"].value:
            draft.lose(keys["lora_path"], _ADAPTER)
    else:
        put_pairs(draft, kind, str(kind.value))
        alpha = keys["cpo_alpha"]
        weighted = alpha if alpha.key and kind.value == "simpo" else kind
        put_sft(draft, weighted, float(alpha.value) if weighted is alpha else 1.0)
    if kind.value == "simpo":
        gamma = keys["simpo_gamma"]
        draft.put(gamma, "trainer.pairs.gamma", gamma.value)
        if not gamma.key:
            draft.lose(kind, "theirs has no default for simpo_gamma: set one")
    if beta.key:
        draft.put(beta, "trainer.pairs.beta", beta.value)
    else:
        draft.put(kind, "trainer.pairs.beta", 0.1)
    if keys["dpo_label_smoothing"].value:
        draft.lose(keys["dpo_label_smoothing"], _SMOOTHING)
    for name in ("simpo_gamma", "cpo_alpha", "dpo_loss_type", "dpo_loss_weights"):
        if not draft.reported(keys[name]):
            draft.skip(keys[name])
    without_router(draft, Entry(), kind)


def _rewards(draft: Draft, keys: Roles) -> None:
    entry = keys["reward_model"]
    centring = keys["center_rewards_coefficient"]
    put_rewards(draft, entry)
    draft.put(centring, "trainer.labels.centring", centring.value)
    draft.skip(keys["model_type"], keys["base_model_config"])


def _samples(draft: Draft, keys: Roles) -> None:
    length = keys["sequence_len"]
    excess = keys["excess_length_strategy"]
    if draft.get("trainer.task") == "labels":
        draft.put(length, "trainer.data.sequence_length", length.value)
        draft.put(length, "trainer.data.too_long", "truncate")
        draft.skip(excess)
    else:
        put_longest(draft, length)
        ours = "error" if excess.value == "raise" else str(excess.value)
        draft.put(excess, "trainer.data.too_long", ours)
    for name in ("sample_packing", "train_on_inputs", "pretraining_dataset"):
        if keys[name].is_set:
            draft.lose(keys[name], "it has no meaning for pairs")
        draft.skip(keys[name])


def _data(draft: Draft, keys: Roles) -> None:
    """Convert the data sets, and set the chat template that their types may begin with."""
    content = read_table("answers/axolotl")
    rows = {**inner_table("axolotl"), **dict(rows_of(content["inner"]))}
    axolotl.put_data(draft, keys, rows, _source)
    entry = keys["datasets"]
    types = [str(part.get("type") or "") for part in axolotl.parts_of(entry)]
    named = {kind.partition(".")[0] for kind in types} & set(content["templates"])
    if not named:
        return
    alike = len(named) == 1 and all(kind.partition(".")[0] in named for kind in types)
    if alike:
        draft.put(entry, PLACE, min(named))
        draft.note(entry, _TEXTS)
        draft.skip(keys["chat_template"])
        keys["chat_template"] = Entry()
    else:
        draft.lose(entry, "its types have several chat templates: here there is one for all data")


def _source(part: Draft, keys: Roles) -> None:
    """Convert one data set; Axolotl's `type` is the kind of its rows."""
    axolotl.put_path(part, keys)
    kind = keys["type"]
    template, _, form = str(kind.value or "").partition(".")
    content = read_table("answers/axolotl")
    if template in content["templates"] and form == "argilla":
        part.lose(kind, "its columns depend on the rows: name them in a type of your own")
    elif template in content["templates"] and form in content["types"]:
        for name, value in content["types"][form].items():
            part.put(kind, name, value)
        part.keep(kind, "the columns chosen and rejected")
    elif kind.value == "chat_template.default":
        _chat_rows(part, keys)
    elif kind.value in ("chat_template.argilla_chat", "chat_template.argilla"):
        part.keep(kind, "the columns chosen and rejected, with the prompt in them")
    elif template == "bradley_terry":
        part.put(kind, "records", "chat")
        part.put(kind, "prompt_column", "input")
    elif kind.value in ("", None, "passthrough.default", "user_defined.default"):
        _own_rows(part, keys)
    else:
        part.lose(kind, _PAIRS)


def _chat_rows(part: Draft, keys: Roles) -> None:
    part.put(keys["type"], "records", "chat")
    columns = {"prompt": "field_messages", "chosen": "field_chosen", "rejected": "field_rejected"}
    for side, name in columns.items():
        entry = keys[name]
        usual = "messages" if side == "prompt" else side
        decides = entry if entry.key else keys["type"]
        part.put(decides, f"{side}_column", str(entry.value) if entry.key else usual)


def _own_rows(part: Draft, keys: Roles) -> None:
    """Convert rows of plain texts, whose columns a custom `type` may name."""
    for side in ("prompt", "chosen", "rejected"):
        entry = keys[f"type.field_{side}"]
        if entry.is_set:
            part.put(entry, f"{side}_column", str(entry.value))
    part.skip(keys["type.field_system"])
    part.keep(keys["type"], "the columns prompt, chosen and rejected, as they are")


def _trainer(kind: str, *own: Group) -> OtherTrainer:
    groups: tuple[Group, ...] = (
        axolotl.batch,
        _data,
        turned_off,
        *own,
        *shared_keys.GROUPS,
        axolotl.layout,
        axolotl.weights,
        _samples,
        axolotl.template,
    )
    content = read_table("answers/axolotl")[kind]
    return kind_of_training(content, table("axolotl"), axolotl.defaults, groups)


_TRAINERS = {
    "pairs": _trainer("pairs", axolotl.model, _loss),
    "rewards": _trainer("rewards", _rewards),
}
