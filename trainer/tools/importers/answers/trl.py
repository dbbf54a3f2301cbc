"""TRL's DPOConfig, CPOConfig, ORPOConfig and RewardConfig, with its scripts' arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from trainer.errors import show
from trainer.storage import Json
from trainer.tools.importers import arguments
from trainer.tools.importers.answers.losses import (
    put_longest,
    put_pairs,
    put_rewards,
    put_sft,
    turned_off,
    without_router,
)
from trainer.tools.importers.chat_formats import put_counted
from trainer.tools.importers.draft import Draft, Entry, Roles, names, number
from trainer.tools.importers.shared_keys import GROUPS
from trainer.tools.importers.tables import Group, OtherTrainer, extended, read_table, table

_IGNORED = "TRL ignores it with this loss, and nothing is smoothed here, either"
_CUT = "it cuts the prompts of both answers differently: keep_start alone is offered"
_UNCUT = "a maximum length is needed here: set one"
_CHATS = (
    "of chats, theirs scores all that the template writes after the prompt, also a line break "
    "after the token that ends the answer; here the answer and that token. Of texts, theirs "
    "tokenises prompt and answer together, here apart"
)


def dpo_loss(
    draft: Draft, loss: Entry, given: Sequence[str], weights: Entry, smoothing: Entry
) -> None:
    """Convert a loss with a reference, alone or with the chosen answers' cross-entropy ("sft").

    `given`: TRL's names of the losses that the key `loss` asks for. `weights` and `smoothing`: the
    keys of their weights and of label smoothing. What is not offered is lost.
    """
    content = read_table("answers/trl")
    factors = _factors(weights, given)
    own = [name for name in given if name != "sft"]
    if len(own) != 1:
        draft.lose(loss, 'one loss is offered here, alone or with "sft"')
        return
    [name] = own
    if name not in content["losses"].split():
        draft.lose(loss, content["left_out"].get(name, "not known"))
        return
    put_pairs(draft, loss, name)
    if factors is None:
        draft.lose(weights, "not a number for each loss")
    elif factors[given.index(name)] != 1:
        draft.lose(weights, f"the weight of {name} is 1 here: divide both weights by it")
    elif len(given) > 1:
        entry = weights if weights.is_set else loss
        put_sft(draft, entry, float(factors[given.index("sft")]))
    if len(given) == 1 and factors == [1]:
        draft.skip(weights)
    if name in content["smoothed"].split():
        draft.put(smoothing, "trainer.pairs.label_smoothing", smoothing.value)
    elif smoothing.value:
        draft.note(smoothing, _IGNORED)
    else:
        draft.skip(smoothing)


def _factors(weights: Entry, given: Sequence[str]) -> list[float] | None:
    """Return the weight of each loss; None unless there is a number for each."""
    if not weights.is_set:
        return [1.0] * len(given)
    value = weights.value
    listed = value if isinstance(value, list) else names(str(value))
    factors = [number(one) for one in listed]
    fits = len(factors) == len(given) and all(type(one) in (int, float) for one in factors)
    return factors if fits else None


def _dpo(draft: Draft, keys: Roles) -> None:
    loss = keys["loss_type"]
    dpo_loss(draft, loss, names(loss.value), keys["loss_weights"], keys["label_smoothing"])
    draft.put(keys["beta"], "trainer.pairs.beta", keys["beta"].value)
    without_router(draft, keys["router_aux_loss_coef"], loss)
    if keys["truncation_mode"].value not in (None, "keep_start"):
        draft.lose(keys["truncation_mode"], _CUT)
    draft.skip(keys["truncation_mode"])


def _cpo(draft: Draft, keys: Roles) -> None:
    loss = keys["loss_type"]
    kinds = {"sigmoid": "cpo", "simpo": "simpo"}
    kind = kinds.get(str(loss.value))
    if kind is None:
        draft.lose(loss, "without a reference, only sigmoid and simpo are offered here")
        return
    put_pairs(draft, loss, kind)
    draft.put(keys["beta"], "trainer.pairs.beta", keys["beta"].value)
    draft.put(
        keys["label_smoothing"], "trainer.pairs.label_smoothing", keys["label_smoothing"].value
    )
    put_sft(draft, keys["cpo_alpha"], keys["cpo_alpha"].value)
    without_router(draft, Entry(), loss)
    if kind == "simpo":
        draft.put(keys["simpo_gamma"], "trainer.pairs.gamma", keys["simpo_gamma"].value)
    else:
        draft.skip(keys["simpo_gamma"])


def _orpo(draft: Draft, keys: Roles) -> None:
    beta = keys["beta"]
    source = Entry("--from", "trl-orpo")
    put_pairs(draft, source, "orpo")
    put_sft(draft, source, 1.0)
    draft.note(source, "its cross-entropy counts the prompt's tokens, too; here the answer's alone")
    draft.put(beta, "trainer.pairs.beta", beta.value)
    without_router(draft, Entry(), source)


def _reward(draft: Draft, keys: Roles) -> None:
    centring = keys["center_rewards_coefficient"]
    put_rewards(draft, Entry("--from", "trl-reward"))
    draft.put(centring, "trainer.labels.centring", centring.value)


def _longest(draft: Draft, keys: Roles) -> None:
    longest = keys["max_length"]
    if draft.given.get("max_length", 0) in (None, "None", "none", "null"):
        draft.lose(Entry("max_length", None), _UNCUT)
    elif draft.get("trainer.task") == "labels":
        draft.put(longest, "trainer.data.sequence_length", longest.value)
        draft.put(longest, "trainer.data.too_long", "drop")
    else:
        put_longest(draft, longest)
    if draft.get("trainer.task") == "pairs":
        draft.note(longest, _CHATS)
        put_counted(draft, longest)
    for name in ("block_size", "packing"):
        if keys[name].value:
            draft.lose(keys[name], f"{show(keys[name].value)} has no meaning for pairs")


def _trainer(kind: str, own: Group) -> OtherTrainer:
    content = read_table("answers/trl")[kind]

    def defaults(given: Json) -> Json:
        """Return TRL's defaults; in bfloat16 unless it is to be in float16."""
        values = arguments.defaults({name: given[name] for name in given if name == "use_peft"})
        bf16 = not given.get("fp16")
        return {**values, **content["defaults"], "bf16": bf16}

    groups = (arguments.data_sets, turned_off, *GROUPS, arguments.template, own, _longest)
    return OtherTrainer(extended(table("arguments"), content), defaults, groups)


_OWN: dict[str, Callable[[Draft, Roles], None]] = {
    "dpo": _dpo,
    "cpo": _cpo,
    "orpo": _orpo,
    "reward": _reward,
}
TRAINERS = {f"trl-{kind}": _trainer(kind, own) for kind, own in _OWN.items()}
